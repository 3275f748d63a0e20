"""Failures as annotations of GitHub Actions: lines of output that it shows beside the changed files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pytest_quantguard.report.headline import failed_groups, first_line
from pytest_quantguard.report.visible import visible
from pytest_quantguard.results import RunResult

SHOWN = 10
"""GitHub shows ten errors per step."""
LONGEST = 4000


def workflow_commands(result: RunResult, environment: Mapping[str, str] = os.environ) -> list[str]:
    """One `::error` line for each group of failed checks, `::warning` for checks that only warn; none outside
    of GitHub Actions.
    """
    if environment.get("GITHUB_ACTIONS") != "true":
        return []
    groups = failed_groups(result)
    lines = [
        _line("error", result, environment, [group.sentence, *result.diagnosis[:1], group.worst.message])
        for group in groups[:SHOWN]
    ]
    warned = [check for check in result.checks if check.outcome == "warned"]
    lines += [
        _line("warning", result, environment, [f"{check.id}: {first_line(check.message)}"])
        for check in warned[:SHOWN]
    ]
    return lines


def _line(kind: str, result: RunResult, environment: Mapping[str, str], parts: list[str]) -> str:
    file = _within(Path(result.config_path), environment.get("GITHUB_WORKSPACE"))
    where = f"file={_property(file)}," if file else ""
    message = "\n".join(visible(line) for part in parts for line in part.split("\n"))[:LONGEST]
    title = _property(f"quantguard: {result.name}")
    return f"::{kind} {where}title={title}::{_data(message)}"


def _within(path: Path, workspace: str | None) -> str | None:
    """The path as the repository knows it; None outside of it."""
    if workspace is None:
        return None
    try:
        return path.absolute().relative_to(workspace).as_posix()
    except ValueError:
        return None


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(visible(text)).replace(":", "%3A").replace(",", "%2C")
