"""`history.jsonl`: one line for each run, and the two-line experiment log that a line makes with the one
before it: what changed in the config, and what that did to accuracy and speed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import Field, FiniteFloat, ValidationError

from pytest_quantguard.errors import QuantguardError
from pytest_quantguard.generation.metrics import GENERATION_METRICS
from pytest_quantguard.logprobs.metrics import METRICS
from pytest_quantguard.report.headline import cell_name, figure, first_cells, reason
from pytest_quantguard.report.visible import visible
from pytest_quantguard.results import CheckResult, Result, RunResult, to_json

HISTORY_FILE = "history.jsonl"
HISTORY_VERSION: Literal[1] = 1
METRICS_KEPT = ("kl_mean", "kl_p99", "cosine_mean", "agreement")
SHOWN_CHANGES = 6
LONGEST_VALUE = 60
SAME = 0.0005
"""Figures that moved by a smaller share than this are not worth a word."""


class HistoryEntry(Result):
    """A run in one line.

    candidate: who answered, in words. baseline: digest of the scored texts, since figures compare only over
    the same. figures: "kl_mean[prefill-bs8]" or a check's id -> value. reason: why the verdict is what it is.
    changed, effect: the experiment log against the run before; empty for the first.
    """

    history_version: Literal[1] = HISTORY_VERSION
    finished: str
    name: str
    commit: str | None = None
    branch: str | None = None
    ci_run: str | None = None
    candidate: str | None = None
    server_version: str | None = None
    device: str | None = None
    baseline: str | None = None
    config_digest: str
    config: dict[str, Any]
    verdict: Literal["passed", "failed", "incomplete"]
    reason: str
    seconds: FiniteFloat
    figures: dict[str, FiniteFloat] = Field(default={}, description="By metric and cell, or by check.")
    units: dict[str, str] = Field(default={}, description="Of figures that are no metrics.")
    changed: str = ""
    effect: str = ""


@dataclass(frozen=True, slots=True)
class History:
    """Entries in the order of the file, and sentences about lines that could not be read."""

    entries: tuple[HistoryEntry, ...]
    problems: tuple[str, ...] = ()

    def before(self, name: str) -> HistoryEntry | None:
        """The last entry of a config that measured something."""
        return next((one for one in reversed(self.entries) if one.name == name and one.figures), None)


def entry_of(result: RunResult, before: HistoryEntry | None) -> HistoryEntry:
    """The line of a run, with its experiment log against the run before."""
    said = result.candidate.capabilities if result.candidate is not None else {}
    config = result.config
    entry = HistoryEntry(
        finished=result.finished,
        name=result.name,
        commit=result.environment.get("commit"),
        branch=result.environment.get("branch"),
        ci_run=result.environment.get("ci_run"),
        candidate=result.candidate.title if result.candidate is not None else None,
        server_version=said.get("version"),
        device=said.get("device"),
        baseline=(result.baseline or {}).get("suite", {}).get("prompts_digest"),
        config_digest=hashlib.sha256(to_json(config, orjson.OPT_SORT_KEYS)).hexdigest()[:16],
        config=config,
        verdict=result.verdict,
        reason=visible(reason(result), longest=300),
        seconds=result.seconds,
        figures=dict(_figures(result)),
        units={check.id: check.unit for check in _outside_cells(result) if check.unit},
    )
    if before is None or not entry.figures:
        return entry
    return entry.model_copy(
        update={"changed": what_changed(before, entry), "effect": what_it_did(before, entry)}
    )


def append_entry(folder: Path, entry: HistoryEntry) -> Path:
    """Add a line to `folder/history.jsonl`; raises `QuantguardError` where that is not possible.

    One write at the end of the file, so that two runs at once leave two lines.
    """
    path = folder / HISTORY_FILE
    line = to_json(entry.model_dump(mode="json"), orjson.OPT_APPEND_NEWLINE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                line = line if file.read(1) == b"\n" else b"\n" + line
            file.write(line)
    except OSError as error:
        raise QuantguardError(
            f"The history could not be written to {path}: {error.strerror or error}. Free space or "
            "permissions there, or choose another folder with --quantguard-output=DIR."
        ) from error
    return path


def read_history(path: Path) -> History:
    """Read a `history.jsonl`, or the one in a folder. Lines that cannot be read are named, the others kept.

    Raises `QuantguardError` where there is no history at all.
    """
    file = path / HISTORY_FILE if path.is_dir() else path
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        below = sorted(str(found.parent) for found in path.glob(f"*/{HISTORY_FILE}"))
        advice = (
            f"There is one in each of: {', '.join(below)}."
            if below
            else "Every run of the gate adds a line to it: quantguard run CONFIG."
        )
        raise QuantguardError(f"There is no history at {file}. {advice}") from None
    except OSError as error:
        raise QuantguardError(f"{file} cannot be read: {error.strerror or error}.") from error
    entries, problems = [], []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entries.append(_entry(orjson.loads(line)))
        except (orjson.JSONDecodeError, ValidationError, ValueError) as error:
            problems.append(f"{file}, line {number} is left out: {_short(error)}")
    return History(tuple(entries), tuple(problems))


def what_changed(before: HistoryEntry, now: HistoryEntry) -> str:
    """The first line of the log: config keys, server, device, commit."""
    keys = dict(_flat(before.config)), dict(_flat(now.config))
    names = [name for name in dict.fromkeys([*keys[0], *keys[1]]) if keys[0].get(name) != keys[1].get(name)]
    parts = [f"{name}: {_value(keys[0].get(name))} -> {_value(keys[1].get(name))}" for name in names]
    more = len(parts) - SHOWN_CHANGES
    parts = parts[:SHOWN_CHANGES] + ([f"and {more} more keys"] if more > 0 else [])
    if not parts:
        parts = ["nothing in the config"]
    for name in ("server_version", "device", "baseline"):
        one, other = getattr(before, name), getattr(now, name)
        if one != other:
            parts.append(f"{name.replace('_', ' ')}: {_value(one)} -> {_value(other)}")
    if before.commit and now.commit and before.commit != now.commit:
        parts.append(f"commit {short_commit(before.commit)} -> {short_commit(now.commit)}")
    return "changed: " + "; ".join(parts)


def what_it_did(before: HistoryEntry, now: HistoryEntry) -> str:
    """The second line: verdict, and per metric the cell in which it moved most."""
    if before.baseline != now.baseline:
        return f"did: {now.verdict}; the scored texts are others, so figures do not compare"
    moved: dict[str, tuple[float, str]] = {}
    for name, value in now.figures.items():
        if name not in before.figures:
            continue
        old = before.figures[name]
        share = (value - old) / abs(old) if old else float(value != old)
        metric, _, cell = name.rstrip("]").partition("[")
        group, where = (metric, f", {cell}") if metric in METRICS else (name, "")
        text = f"{group} {figure(old)} -> {figure(value)} ({share:+.1%}{where})"
        if abs(share) >= SAME and abs(share) > abs(moved.get(group, (0.0, ""))[0]):
            moved[group] = (share, text)
    parts = [text for _, text in moved.values()] or ["no figure moved"]
    verdict = now.verdict if now.verdict == before.verdict else f"{before.verdict} -> {now.verdict}"
    return f"did: {verdict}; {'; '.join(parts[: 2 * SHOWN_CHANGES])}"


def short_commit(commit: str) -> str:
    """Ten digits, and whether files differed from it."""
    return commit[:10] + ("-dirty" if commit.endswith("-dirty") else "")


def better(name: str) -> str | None:
    """Which direction of a figure is good; None where that is not known."""
    kind, _, rest = name.rstrip("]").partition("[")
    if kind == "speed":
        return "higher" if rest == "score" else "lower"
    metric = METRICS.get(kind) or GENERATION_METRICS.get(rest.rpartition("-")[2])
    return metric.better if metric is not None else None


def _figures(result: RunResult) -> Iterator[tuple[str, float]]:
    for cell in first_cells(result):
        for metric in METRICS_KEPT:
            if math.isfinite(cell.metrics.get(metric, math.nan)):
                yield f"{metric}[{cell_name(cell)}]", cell.metrics[metric]
    for check in _outside_cells(result):
        if check.value is not None and math.isfinite(check.value):
            yield check.id, check.value


def _outside_cells(result: RunResult) -> list[CheckResult]:
    """Checks whose value is a figure of its own: of speed and of generated answers."""
    return [check for check in result.checks if check.kind in ("speed", "generation")]


def _entry(loaded: object) -> HistoryEntry:
    version = loaded.get("history_version") if isinstance(loaded, dict) else None
    if isinstance(version, int) and version > HISTORY_VERSION:
        raise ValueError(
            f"it has version {version}, this pytest-quantguard reads up to {HISTORY_VERSION}; upgrade with: "
            "pip install -U pytest-quantguard"
        )
    return HistoryEntry.model_validate(loaded)


def _short(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'])) or 'the line'}: {first['msg']}"
    return str(error)


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _value(value: Any) -> str:
    text = "none" if value in (None, [], {}) else str(value)
    return visible(text, longest=LONGEST_VALUE)
