"""The files of a run, beside its server's log: result.json, report.html, summary.md, a line of history.jsonl.

A file that cannot be written is a problem to tell, and keeps no other file from being written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_quantguard.errors import QuantguardError
from pytest_quantguard.report.history import HISTORY_FILE, append_entry, entry_of, read_history
from pytest_quantguard.report.html import render_html
from pytest_quantguard.report.markdown import render_markdown
from pytest_quantguard.results import ELSEWHERE, RunResult, write_result, write_whole

REPORT_FILE = "report.html"
SUMMARY_FILE = "summary.md"

Changes = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Written:
    """report: the HTML file; None where it could not be written. problems: sentences for the user."""

    report: Path | None
    problems: tuple[str, ...]


def write_run(folder: Path, result: RunResult, environment: Mapping[str, str] = os.environ) -> Written:
    """Write everything about a run that has just ended, and add to the job summary of GitHub Actions.

    A run that was interrupted before its first check has nothing for the history.
    """
    problems: list[str] = []
    _attempt(problems, lambda: write_result(folder, result))
    changes: Changes | None = None
    if any(check.outcome != "skipped" for check in result.checks):
        try:
            changes = _add_to_history(folder, result)
        except QuantguardError as error:
            problems.append(str(error))
    report = _attempt(problems, lambda: write_report(folder / REPORT_FILE, result, changes))
    _attempt(problems, lambda: write_summary(folder / SUMMARY_FILE, result, changes))
    _attempt(problems, lambda: _append_step_summary(result, changes, environment))
    return Written(report, tuple(problems))


def write_unfinished(folder: Path, result: RunResult) -> list[str]:
    """Write the partial result of a run that goes on; returns what could not be written."""
    problems: list[str] = []
    _attempt(problems, lambda: write_result(folder, result))
    _attempt(problems, lambda: write_report(folder / REPORT_FILE, result))
    _attempt(problems, lambda: write_summary(folder / SUMMARY_FILE, result))
    return problems


def changes_of(folder: Path, result: RunResult) -> Changes | None:
    """The experiment log of a run whose line is in the history beside it; None where it is not."""
    if not (folder / HISTORY_FILE).exists():
        return None
    for entry in reversed(read_history(folder).entries):
        if (entry.name, entry.finished) == (result.name, result.finished):
            return (entry.changed, entry.effect) if entry.changed else None
    return None


def write_report(
    path: Path, result: RunResult, changes: Changes | None = None, elsewhere: str = ELSEWHERE
) -> Path:
    """The HTML report; raises `QuantguardError` where it cannot be written, but perhaps `elsewhere`."""
    return write_whole(path, render_html(result, changes=changes).encode(), "The report", elsewhere)


def write_summary(
    path: Path, result: RunResult, changes: Changes | None = None, elsewhere: str = ELSEWHERE
) -> Path:
    """The Markdown summary; raises `QuantguardError` where it cannot be written, but perhaps `elsewhere`."""
    return write_whole(path, render_markdown(result, changes=changes).encode(), "The summary", elsewhere)


def _add_to_history(folder: Path, result: RunResult) -> Changes | None:
    before = read_history(folder).before(result.name) if (folder / HISTORY_FILE).exists() else None
    entry = entry_of(result, before)
    append_entry(folder, entry)
    return (entry.changed, entry.effect) if entry.changed else None


def _append_step_summary(result: RunResult, changes: Changes | None, environment: Mapping[str, str]) -> None:
    path = environment.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    try:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(render_markdown(result, changes=changes) + "\n")
    except OSError as error:
        raise QuantguardError(
            f"The job summary could not be added to {path} (GITHUB_STEP_SUMMARY): {error.strerror or error}."
        ) from error


def _attempt(problems: list[str], write: Callable[[], Path | None]) -> Path | None:
    try:
        return write()
    except QuantguardError as error:
        problems.append(str(error))
        return None
