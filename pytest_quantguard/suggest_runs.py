"""Proposes bounds for speed and generation from results of whole runs: each with the formula that made it.

Accuracy bounds come from cells that can be measured again and again (`suggest`); times and answers are taken
from runs as they were, of several days if possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from pytest_quantguard.config import Bound, GateConfig
from pytest_quantguard.config_generation import GenerationBounds
from pytest_quantguard.config_speed import SpeedConfig
from pytest_quantguard.gate.message import number
from pytest_quantguard.results import GenerationFigures, RunResult, SpeedResult
from pytest_quantguard.stats.figures import FIGURES, canonical
from pytest_quantguard.stats.speed import MIN_ROUNDS, noise_band
from pytest_quantguard.suggest import SPREADS, KeyBound, rounded_outwards

LEAST_SLOWDOWN = 0.05
NOISES = 2.0
STANDARD_ERRORS = 2.0
SCORES = ("score", "relative_score")


def propose_from_runs(
    results: Sequence[RunResult], config: GateConfig, margin: float
) -> tuple[list[KeyBound], list[str]]:
    """Bounds of `speed` and `generation`, and sentences about those that could not be proposed.

    margin: of absolute figures, a share of the worst value; at least twice what runs of a cell differ by.
    """
    bounds: list[KeyBound] = []
    notes: list[str] = []
    if config.speed is not None:
        bounds += _speed(config.speed, results, margin, notes)
    if config.generation is not None:
        bounds += _generation(config, results, notes)
    return bounds, notes


def _speed(
    speed: SpeedConfig, results: Sequence[RunResult], margin: float, notes: list[str]
) -> Iterator[KeyBound]:
    runs: dict[tuple[str, str], list[SpeedResult]] = {}
    for result in results:
        for check in result.checks:
            if check.speed is not None and not check.speed.errors:
                runs.setdefault((check.speed.scenario, check.speed.level), []).append(check.speed)
    if not runs:
        notes.append("speed: the results hold no times, so no bound of it is proposed")
        return
    slowdown = _slowdown(speed, runs, notes)
    if slowdown is not None:
        yield slowdown
    for name, bound in (speed.__pydantic_extra__ or {}).items():
        yield from _absolute(name, bound, speed, runs, margin)


def _slowdown(
    speed: SpeedConfig, runs: dict[tuple[str, str], list[SpeedResult]], notes: list[str]
) -> KeyBound | None:
    """Twice what the time strays by when nothing changed (`noise_band`), at least 5 %, in whole percent."""
    judged = any(
        verdict.against == "accepted" for cell in runs.values() for one in cell for verdict in one.verdicts
    )
    if speed.max_slowdown is None and not judged:
        notes.append(
            "speed.max_slowdown: judged against an accepted run, and there was none. Accept one first: "
            "quantguard accept CONFIG"
        )
        return None
    noises = {}
    for cell, found in runs.items():
        times = [
            one.by_round[one.compared]
            for one in found
            if len(one.by_round.get(one.compared, ())) >= MIN_ROUNDS
        ]
        if times:
            noises[cell] = noise_band(times)
    if not noises or speed.rounds < MIN_ROUNDS:
        notes.append(f"speed.max_slowdown: needs at least {MIN_ROUNDS} rounds (speed.rounds)")
        return None
    worst = max(noises, key=lambda cell: noises[cell])
    share = math.ceil(round(100 * max(LEAST_SLOWDOWN, NOISES * noises[worst]), 6)) / 100
    count = max(map(len, runs.values()))
    several = "one run" if count == 1 else f"{count} runs"
    reason = f"measured noise {noises[worst]:.1%} ({'-'.join(worst)}, {several}), doubled, at least 5%"
    return KeyBound(
        ("speed", "max_slowdown"),
        "max",
        share,
        speed.max_slowdown,
        reason,
        f"{share * 100:g}%",
        relative=True,
    )


def _absolute(
    name: str,
    bound: Bound,
    speed: SpeedConfig,
    runs: dict[tuple[str, str], list[SpeedResult]],
    margin: float,
) -> Iterator[KeyBound]:
    """A figure that the section bounds, over the scenarios and levels that have no other bound for it."""
    figure = canonical(name)
    values = {
        (scenario, str(level)): [
            one.figures[figure] for one in runs[scenario, str(level)] if figure in one.figures
        ]
        for scenario, level in speed.cells()
        if (scenario, str(level)) in runs and speed.rules_of(scenario, level).bounds.get(figure) == bound
    }
    known = [(value, cell) for cell, found in values.items() for value in found]
    if not known:
        return
    higher = FIGURES[figure].better == "higher"
    worst, cell = min(known) if higher else max(known)
    spread = max(max(found) - min(found) for found in values.values() if found)
    room = max(margin * worst, SPREADS * spread)
    side = "min" if higher else "max"
    new = rounded_outwards(max(0.0, worst - room), down=True) if higher else rounded_outwards(worst + room)
    reason = f"measured {number(worst)} ({'-'.join(cell)}); run to run {number(spread)}"
    if new > 0:
        yield KeyBound(("speed", name, side), side, new, getattr(bound, side), reason, f"{new:.12g}")


def _generation(config: GateConfig, results: Sequence[RunResult], notes: list[str]) -> Iterator[KeyBound]:
    """Floors of scores that the config has: the lowest measured less two standard errors."""
    assert config.generation is not None
    measured = [result.generation for result in results if result.generation is not None]
    if not measured:
        notes.append(
            "generation: the results hold no answers (run with -m slow), so no bound of it is proposed"
        )
        return
    yield from _scores((), config.generation, [one.overall for one in measured], notes)
    for task, bounds in config.generation.tasks.items():
        figures = [one.tasks[task] for one in measured if task in one.tasks]
        if figures:
            yield from _scores(("tasks", task), bounds, figures, notes)


def _scores(
    path: tuple[str, ...], bounds: GenerationBounds, figures: Sequence[GenerationFigures], notes: list[str]
) -> Iterator[KeyBound]:
    errors: dict[str, Callable[[GenerationFigures], float | None]] = {
        "score": score_error,
        "relative_score": relative_error,
    }
    for name in SCORES:
        bound = bounds.bounds.get(name)
        key = ("generation", *path, name)
        if bound is None:
            continue
        known = [(getattr(one, name), errors[name](one), one.prompts) for one in figures]
        usable = [
            (value, error, count) for value, error, count in known if value is not None and error is not None
        ]
        if not usable:
            notes.append(f"{'.'.join(key)}: not measured; the reference may have scored 0")
            continue
        value, error, count = min(usable, key=lambda one: one[0] - STANDARD_ERRORS * one[1])
        floor = rounded_outwards(value - STANDARD_ERRORS * error, down=True)
        if floor <= 0:
            notes.append(f"{'.'.join(key)}: {value:.3f} on {count} questions is too little to be bounded")
            continue
        reason = f"measured {value:.3f} on {count} questions, less two standard errors of {error:.3f}"
        yield KeyBound((*key, "min"), "min", floor, bound.min, reason, f"{floor:.12g}")


def score_error(figures: GenerationFigures) -> float:
    """Largest standard error of a mean of scores between 0 and 1, after Agresti and Coull: two questions are
    added to each side, so that a perfect score is not taken for a certain one.
    """
    count = figures.prompts + 4
    share = (figures.score * figures.prompts + 2) / count
    return math.sqrt(share * (1 - share) / count)


def relative_error(figures: GenerationFigures) -> float | None:
    """Standard error of the score over the reference's, from its 95 % interval, and no less than what one
    question makes: the interval is a point where no question was lost or won.
    """
    if figures.relative_interval is None or figures.reference_score <= 0:
        return None
    low, high = figures.relative_interval
    return max((high - low) / (2 * 1.96), 1 / (figures.prompts * figures.reference_score))
