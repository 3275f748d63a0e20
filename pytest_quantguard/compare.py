"""Compares two results, or two recordings, without a server.

Two *results* of runs: figures side by side, verdicts that changed, and what differs in config, server and
machine. Two *recordings* (baselines, accepted runs) of the same texts: divergence of the second from the
first, position by position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_quantguard.baseline.compatibility import Difference, environment_differences
from pytest_quantguard.baseline.recording import Recording
from pytest_quantguard.baseline.store import MANIFEST
from pytest_quantguard.errors import BaselineError, QuantguardError
from pytest_quantguard.logprobs.identity import compare_bits
from pytest_quantguard.logprobs.metrics import METRICS
from pytest_quantguard.measure.comparison import compare_cells
from pytest_quantguard.measure.drift import require_same_texts
from pytest_quantguard.results import RESULT_FILE, RunResult

DEFAULT_METRICS = ("kl_mean", "kl_p99", "cosine_mean", "agreement")
BETWEEN_METRICS = ("kl_mean", "kl_max", "agreement")


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of both sides, None where a side has none; worse is None where nothing says it."""

    name: str
    cell: str
    first: float | None
    second: float | None
    worse: bool | None

    @property
    def change(self) -> float | None:
        """As a share of the first."""
        if self.first is None or self.second is None or self.first == 0:
            return None
        return self.second / self.first - 1


@dataclass(frozen=True, slots=True)
class ResultComparison:
    """Two runs. verdicts: (check, outcome in the first, in the second) where they differ."""

    figures: tuple[Figure, ...]
    verdicts: tuple[tuple[str, str, str], ...]
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class CellBetween:
    """One cell of two recordings: metrics of the second against the first, and the share of equal rows."""

    cell: str
    metrics: Mapping[str, float]
    identical_share: float


@dataclass(frozen=True, slots=True)
class RecordingComparison:
    """Two recordings. only_first, only_second: cells that the other has not."""

    cells: tuple[CellBetween, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    differences: tuple[Difference, ...]


def kind_of(path: Path) -> str:
    """Whether it is a "result" or a "recording". Raises `QuantguardError` for anything else."""
    if path.is_dir() and (path / MANIFEST).exists():
        return "recording"
    if path.is_file() or (path / RESULT_FILE).exists():
        return "result"
    raise QuantguardError(
        f"There is nothing to compare at {path}: expected is a {RESULT_FILE}, a folder with one, or the "
        "folder "
        f"of a baseline or accepted run (with a {MANIFEST})."
    )


def compare_results(first: RunResult, second: RunResult, metrics: Sequence[str] = ()) -> ResultComparison:
    """Figures of every cell that either has, timed figures, verdicts, and what differs around them.

    metrics: which; without, those that either config bounds.
    """
    chosen = metrics or _bounded(first, second)
    return ResultComparison(
        (*_accuracy(first, second, chosen), *_timed(first, second)),
        tuple(_verdicts(first, second)),
        tuple(_differences(_around(first), _around(second))),
    )


def compare_recordings(first: Recording, second: Recording) -> RecordingComparison:
    """The second against the first, in every common cell.

    Raises `BaselineError` where they are about different texts, or have no cell in common.
    """
    try:
        require_same_texts(second, first)
    except BaselineError as error:
        counts = len(first.prompts), len(second.prompts)
        reason = str(error).split(": ", 1)[-1].split(". ", 1)[0]
        if counts[0] != counts[1]:
            reason = f"A has {counts[0]} prompts, B {counts[1]}"
        raise BaselineError(
            f"The two recordings cannot be compared position by position: {reason}. They must come from the "
            "same reference and suite."
        ) from error
    common = [key for key in first.cells if key in second.cells]
    if not common:
        raise BaselineError("The two recordings have no phase and batch size in common.")
    cells = []
    for key in common:
        divergence = compare_cells(first.cells[key], second.cells[key]).divergence
        metrics = {name: divergence.aggregate(name) for name in BETWEEN_METRICS}
        share = compare_bits(first.cells[key].rows, second.cells[key].rows).share
        cells.append(CellBetween(str(key), metrics, share))
    models = _differences(first.manifest.model.model_dump(), second.manifest.model.model_dump())
    return RecordingComparison(
        tuple(cells),
        tuple(str(key) for key in first.cells if key not in second.cells),
        tuple(str(key) for key in second.cells if key not in first.cells),
        (*models, *environment_differences(first.manifest, second.manifest)),
    )


def _bounded(*results: RunResult) -> list[str]:
    found = [check.metric for result in results for check in result.checks if check.kind == "accuracy"]
    known = [name for name in METRICS if name in found]
    return known or list(DEFAULT_METRICS)


def _accuracy(first: RunResult, second: RunResult, metrics: Sequence[str]) -> list[Figure]:
    sides = [
        {
            (f"{cell.phase}-bs{cell.batch_size}", name): value
            for cell in result.cells
            if not cell.warm and cell.repeat == 0
            for name, value in cell.metrics.items()
        }
        for result in (first, second)
    ]
    cells = list(dict.fromkeys(cell for side in sides for cell, _ in side))
    return [
        _figure(name, cell, sides[0].get((cell, name)), sides[1].get((cell, name)), METRICS[name].better)
        for name in metrics
        for cell in cells
        if any((cell, name) in side for side in sides)
    ]


def _timed(first: RunResult, second: RunResult) -> list[Figure]:
    """Figures of speed and generation checks, by the checks' own names."""
    sides = [
        {check.id: check for check in result.checks if check.kind in ("speed", "generation")}
        for result in (first, second)
    ]
    figures = []
    for name in dict.fromkeys(name for side in sides for name in side):
        checks = [side.get(name) for side in sides]
        if any(check is not None and check.value is not None for check in checks):
            bound = next((check.bound_side for check in checks if check and check.bound_side), None)
            better = {"max": "lower", "min": "higher", None: None}[bound]
            values = [None if check is None else check.value for check in checks]
            figures.append(_figure(name, "", values[0], values[1], better))
    return figures


def _figure(name: str, cell: str, first: float | None, second: float | None, better: str | None) -> Figure:
    worse = None
    if better is not None and first is not None and second is not None and first != second:
        worse = (second > first) == (better == "lower")
    return Figure(name, cell, first, second, worse)


def _verdicts(first: RunResult, second: RunResult) -> list[tuple[str, str, str]]:
    sides = [{check.id: check.outcome for check in result.checks} for result in (first, second)]
    names = dict.fromkeys(name for side in sides for name in side)
    pairs = [(name, sides[0].get(name, "not run"), sides[1].get(name, "not run")) for name in names]
    return [(name, before, now) for name, before, now in pairs if before != now]


def _around(result: RunResult) -> dict[str, Any]:
    """What a run was made of, as nested plain data."""
    candidate = result.candidate.model_dump(mode="json") if result.candidate is not None else {}
    said = candidate.get("capabilities", {})
    return {
        "config": result.config,
        "server": {name: said.get(name) for name in ("kind", "version", "model_path", "quantization")},
        "baseline": {name: (result.baseline or {}).get(name) for name in ("created", "package_version")},
        "environment": result.environment,
    }


def _differences(first: Mapping[str, Any], second: Mapping[str, Any], prefix: str = "") -> list[Difference]:
    """(dotted key, before, after) of every leaf that differs."""
    rows: list[Difference] = []
    for key in dict.fromkeys((*first, *second)):
        before, after = first.get(key), second.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            rows += _differences(before, after, f"{prefix}{key}.")
        elif before != after:
            rows.append((f"{prefix}{key}", _shown(before), _shown(after)))
    return rows


def _shown(value: object) -> str:
    return "not stated" if value is None else str(value)
