"""Proposes bounds from what was measured: the value, plus a margin that is said.

The margin covers what may change between two good runs: kernels, versions, summation order. It is a share of
the measured value, and never less than twice the candidate's own run-to-run spread or the reference's noise
floor. The interval by prompt is no part of it: the next run asks the same prompts.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from pytest_quantguard.baseline.recording import CellKey
from pytest_quantguard.config import GateConfig, Phase
from pytest_quantguard.errors import QuantguardError
from pytest_quantguard.gate.message import number
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.gate.validity import require_valid
from pytest_quantguard.logprobs.metrics import METRICS, Metric
from pytest_quantguard.results import RunResult

DEFAULT_METRICS = ("kl_mean", "kl_p99", "cosine_mean", "agreement")
DEFAULT_MARGIN = 0.25
SPREADS = 2.0
STARTING_POINTS = "# STARTING POINTS, not measurements: quantguard suggest"
"""What `quantguard init` writes beside bounds that nobody measured."""

Observed = Mapping[CellKey, Sequence[Mapping[str, float]]]
"""For each cell, every metric in each repetition."""
NoiseFloors = Mapping[str, Mapping[str, float]]
"""Cell name -> metric -> value between two recordings of the reference."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A bound for one metric, over all cells or those of one phase, and where it comes from.

    worst, best: measured, over cells and repetitions. worst_cell: where. spread: the largest difference of
    two repetitions of a cell; None with one repetition. noise_floor: the largest of the cells; None where it
    is not known. room: from the worst value to the bound, before rounding outwards.
    """

    metric: str
    side: str
    bound: float
    phase: Phase | None
    worst: float
    best: float
    worst_cell: str
    spread: float | None
    noise_floor: float | None
    room: float


@dataclass(frozen=True, slots=True)
class KeyBound:
    """A bound at one key of the config, outside `accuracy`.

    path: the keys from the top. old: what the config has; None for nothing. shown: the new value as the
    config writes it. relative: both are shares, written in percent.
    """

    path: tuple[str, ...]
    side: str
    new: float
    old: float | None
    reason: str
    shown: str
    relative: bool = False


@dataclass(frozen=True, slots=True)
class Proposal:
    """All suggestions for a config; measurements: repetitions of each cell. keys: of other sections.

    notes: why something is not proposed.
    """

    name: str
    margin: float
    measurements: int
    cells: int
    suggestions: tuple[Suggestion, ...]
    keys: tuple[KeyBound, ...] = ()
    notes: tuple[str, ...] = ()


def measure(trial: Trial) -> Observed:
    """Measure every cell of the candidate as often as the trial's options say.

    Raises `QuantguardError`: no server, no baseline, answers that cannot be used.
    """
    observed: dict[CellKey, list[dict[str, float]]] = {}
    for phase, batch_size in trial.config.cells():
        key = CellKey(phase, batch_size)
        for repeat in range(trial.options.repeats):
            require_valid(trial, key, repeat=repeat)
            observed.setdefault(key, []).append(trial.comparison(key, repeat=repeat).divergence.aggregates())
            trial.progress(f"measured {key}, {repeat + 1} of {trial.options.repeats}")
    return observed


def observed_in(results: Sequence[RunResult], config: GateConfig) -> Observed:
    """What stored results of the config measured. Raises `QuantguardError` for results of another config, of
    a run whose candidate was not valid, or without cells.
    """
    observed: dict[CellKey, list[dict[str, float]]] = {}
    for result in results:
        if result.name != config.name:
            raise QuantguardError(
                f"A result is of the config '{result.name}', not of '{config.name}': bounds cannot be taken "
                "from another candidate. Give the results of this config."
            )
        unusable = [check.id for check in result.checks if check.kind == "validity" and not check.passed]
        if unusable:
            raise QuantguardError(
                f"The result of {result.finished} has answers that cannot be used "
                f"({', '.join(unusable[:3])}): "
                "mend the candidate first."
            )
        for cell in result.cells:
            if not cell.warm and cell.metrics:
                observed.setdefault(CellKey(cell.phase, cell.batch_size), []).append(cell.metrics)
    missing = [str(CellKey(*cell)) for cell in config.cells() if CellKey(*cell) not in observed]
    if missing:
        raise QuantguardError(
            f"The results have no measurement of {', '.join(missing)}: run the whole gate, without -k."
        )
    return observed


def propose(
    observed: Observed,
    floors: NoiseFloors,
    *,
    name: str,
    metrics: Sequence[str] = DEFAULT_METRICS,
    margin: float = DEFAULT_MARGIN,
) -> Proposal:
    """Bounds for `metrics`, with an entry of its own for a phase that is worse than the other by more than
    the margin. Raises `QuantguardError` where a metric is not known in a cell.
    """
    suggestions = []
    for metric in (METRICS[chosen] for chosen in metrics):
        by_phase = {
            phase: _suggest(
                metric, {key: value for key, value in observed.items() if key.phase == phase}, floors, margin
            )
            for phase in dict.fromkeys(key.phase for key in observed)
        }
        ordered = sorted(by_phase, key=lambda phase: _badness(metric, by_phase[phase].bound))
        tightest, loosest = by_phase[ordered[0]], by_phase[ordered[-1]]
        if _badness(metric, loosest.bound) > (1 + margin) * _badness(metric, tightest.bound):
            suggestions += [_of_phase(tightest, None), _of_phase(loosest, ordered[-1])]
        else:
            suggestions.append(_suggest(metric, observed, floors, margin))
    repeats = max(len(values) for values in observed.values())
    return Proposal(name, margin, repeats, len(observed), tuple(suggestions))


def _suggest(metric: Metric, observed: Observed, floors: NoiseFloors, margin: float) -> Suggestion:
    values: dict[CellKey, list[float]] = {}
    for key, repetitions in observed.items():
        values[key] = [repetition[metric.name] for repetition in repetitions if metric.name in repetition]
        if not values[key]:
            raise QuantguardError(f"{metric.name} is not known in {key}: choose other --metrics.")
    worst_cell = max(values, key=lambda key: max(_badness(metric, value) for value in values[key]))
    every = sorted((value for cell in values.values() for value in cell), key=lambda v: _badness(metric, v))
    best, worst = every[0], every[-1]
    repeated = [max(cell) - min(cell) for cell in values.values() if len(cell) > 1]
    spread = max(repeated) if repeated else None
    known = [floors[str(key)][metric.name] for key in values if metric.name in floors.get(str(key), {})]
    floor = max(known, key=lambda value: _badness(metric, value)) if known else None
    noise = 0.0 if floor is None else abs(_badness(metric, floor))
    room = max(margin * abs(_badness(metric, worst)), SPREADS * (spread or 0.0), SPREADS * noise)
    bound = rounded_outwards(_badness(metric, worst) + room)
    higher = metric.better == "higher"
    return Suggestion(
        metric=metric.name,
        side="min" if higher else "max",
        bound=round(metric.limits[1] - bound, 12) if higher else bound,
        phase=None,
        worst=worst,
        best=best,
        worst_cell=str(worst_cell),
        spread=spread,
        noise_floor=floor,
        room=room,
    )


def _badness(metric: Metric, value: float) -> float:
    """How far a value is from perfect: itself where lower is better, else what is missing to the highest."""
    return value if metric.better == "lower" else metric.limits[1] - value


def rounded_outwards(value: float, *, down: bool = False) -> float:
    """Two significant digits, never below the value; never above it if `down`."""
    if value <= 0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    rounded = math.floor if down else math.ceil
    return round(rounded(round(value / step, 6)) * step, 12)


def _of_phase(suggestion: Suggestion, phase: Phase | None) -> Suggestion:
    return Suggestion(
        **{name: getattr(suggestion, name) for name in Suggestion.__slots__ if name != "phase"}, phase=phase
    )


def as_yaml(proposal: Proposal, extends: str | Path) -> str:
    """A config that refines the one it `extends` with the proposed bounds, each with its reason."""
    times = "once" if proposal.measurements == 1 else f"{proposal.measurements} times"
    lines = [
        f"# Proposed by quantguard suggest for {proposal.name}:",
        f"# {proposal.cells} cells, measured {times} each. Margin: {proposal.margin:.0%} of the worst "
        "value, at",
        f"# least {SPREADS:g} x the run-to-run spread and {SPREADS:g} x the reference's noise floor.",
        "# Copy the section into the config (--apply does), or use this file as one.",
        f"extends: {yaml.safe_dump(str(extends)).splitlines()[0]}",
        "accuracy:",
    ]
    for item in proposal.suggestions:
        if item.phase is None:
            lines += [f"  # {reason_of(item)}", f"  {entry_of(item)}"]
    special = [item for item in proposal.suggestions if item.phase is not None]
    if special:
        lines.append("  overrides:")
        for item in special:
            entry = f"    - {{phase: {item.phase}, {entry_of(item)}}}"
            lines += [f"    # {reason_of(item)}", entry]
    lines += _key_lines(proposal.keys)
    for note in proposal.notes:
        lines += textwrap.wrap(
            note, 76, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False
        )
    return "\n".join(lines) + "\n"


def _key_lines(keys: Sequence[KeyBound]) -> list[str]:
    """Sections other than accuracy, nested as their paths are."""
    lines: list[str] = []
    at: tuple[str, ...] = ()
    for item in keys:
        *parents, last = item.path
        entry = f"{last}: {item.shown}"
        if last == item.side:  # The bound of a figure is a mapping, and short enough for one line.
            entry = f"{parents.pop()}: {{{entry}}}"
        common = next(
            (i for i, (a, b) in enumerate(zip(parents, at, strict=False)) if a != b),
            min(len(parents), len(at)),
        )
        lines += [f"{'  ' * depth}{parents[depth]}:" for depth in range(common, len(parents))]
        indent = "  " * len(parents)
        lines += [f"{indent}# {item.reason}", f"{indent}{entry}"]
        at = tuple(parents)
    return lines


def entry_of(item: Suggestion) -> str:
    """The bound as a key of the config."""
    return f"{item.metric}: {{{item.side}: {item.bound:.12g}}}"


def reason_of(item: Suggestion) -> str:
    """What was measured, for a comment."""
    spread = "" if item.spread is None else f"; run to run {number(item.spread)}"
    floor = "" if item.noise_floor is None else f"; noise floor {number(item.noise_floor)}"
    return f"worst {number(item.worst)} ({item.worst_cell}), best {number(item.best)}{spread}{floor}"
