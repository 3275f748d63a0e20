"""The composite score of serving competitions: speed-ups at several levels, weighted, times correctness."""

from __future__ import annotations

import numpy as np

from pytest_quantguard.config_speed import Level, Score, name_of
from pytest_quantguard.errors import BaselineError, QuantguardError
from pytest_quantguard.gate.generation import known_generation
from pytest_quantguard.gate.message import bullets, describe_place, labelled
from pytest_quantguard.gate.plan import Check
from pytest_quantguard.gate.speed_times import Timed, cell_name, speed_config
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.generation.figures import figures_of
from pytest_quantguard.results import CheckResult, Outcome
from pytest_quantguard.stats.speed import composite_score, correctness_coefficient, scatter


def judge_score(trial: Trial, check: Check) -> CheckResult:
    """The score from what was timed in this session.

    Raises `QuantguardError` where a cell was not timed, had errors, or the task score is not known.
    """
    speed = speed_config(trial)
    assert speed.score is not None
    score = speed.score
    names = score.scenarios or [name_of(scenario) for scenario in speed.scenarios]
    cells = {level: [_timed(trial, name, level) for name in names] for level in score.weights}
    speedups = {
        level: _total(timed, "reference") / _total(timed, "candidate") for level, timed in cells.items()
    }
    relative = _relative_task_score(trial)
    coefficient = 1.0 if relative is None else correctness_coefficient(relative, score.correctness)
    value = composite_score(speedups, score.weights, coefficient)
    doubts = _doubts([one for timed in cells.values() for one in timed], speed.max_scatter)
    below = score.min is not None and value < score.min
    outcome: Outcome = "failed" if below else "passed"
    if score.min is not None and doubts:
        outcome = "failed" if speed.on_inconclusive == "fail" else "warned"
    result = CheckResult(
        id=check.name,
        kind=check.kind,
        metric="score",
        value=value,
        bound=score.min,
        bound_side=None if score.min is None else "min",
        outcome=outcome,
        extra={
            "speedups": speedups,
            "weights": score.weights,
            "coefficient": coefficient,
            "relative_task_score": relative,
            "doubts": doubts,
        },
    )
    return result.model_copy(update={"message": _message(trial, result, score)})


def _timed(trial: Trial, name: str, level: str) -> Timed:
    """The cell as it was timed, with the reference's times. Raises QuantguardError where it is no use."""
    wanted: Level = "max" if level == "max" else int(level)
    timed: Timed | None = trial.known("speed").get(("speed", name, wanted))
    test = f"speed[{cell_name(name, wanted)}]"
    if timed is None:
        raise QuantguardError(
            f"The score needs the times of {test}, which was not timed in this session: select it too."
        )
    loads = [timed.load, *([timed.reference] if timed.reference is not None else [])]
    if timed.reference is None or any(load.broken(speed_config(trial).allowed_errors) for load in loads):
        raise QuantguardError(f"The score needs the times of {test}, in which requests failed.")
    return timed


def _total(cells: list[Timed], side: str) -> float:
    """Sum of the median times of the scenarios."""
    loads = [timed.load if side == "candidate" else timed.reference for timed in cells]
    return sum(float(np.median(load.times)) for load in loads if load is not None)


def _relative_task_score(trial: Trial) -> float | None:
    """The candidate's task score over the reference's; None for a config without generation."""
    if trial.config.generation is None:
        return None
    known = known_generation(trial)
    if known is None:
        raise BaselineError(
            "The score's correctness is the task score over the reference's, and no generated answers were "
            "scored in this session: run the generation checks too (they are marked slow)."
        )
    figure = figures_of(known.pairs).metrics.get("relative_score")
    if figure is None:
        raise BaselineError(
            "The score's correctness is the task score over the reference's, and the reference scores 0, a "
            "share of which is not defined. Ask something that it can do: shorter or easier prompts "
            "(generation.tasks)."
        )
    return figure.value


def _doubts(cells: list[Timed], max_scatter: float) -> list[str]:
    found = []
    for timed in cells:
        assert timed.reference is not None
        times = timed.load.times
        if timed.paired:
            times = (np.asarray(timed.reference.times) / np.asarray(times)).tolist()
        if scatter(times) > max_scatter:
            found.append(
                f"the rounds of {timed.load.workload.scenario} at {timed.load.concurrency} requests scatter "
                "by "
                f"{scatter(times):.1%}"
            )
        found += timed.state.throttling if timed.paired else timed.state.disturbances
        found += timed.alone.disturbances if timed.alone else []
    return list(dict.fromkeys(found))


def _message(trial: Trial, result: CheckResult, score: Score) -> str:
    extra = result.extra
    parts = [
        f"{weight:g} x {extra['speedups'][level]:.3f} at {level}" for level, weight in score.weights.items()
    ]
    relative = extra["relative_task_score"]
    correctness = (
        "no task score: the config has no `generation`, so correctness is not part of it"
        if relative is None
        else f"coefficient {extra['coefficient']:.3f} for {relative:.1%} of the reference's task score"
    )
    sentence = (
        f"score {result.value:.3f} = ({' + '.join(parts)}) times as fast as the reference; {correctness}"
    )
    if result.outcome == "passed":
        return sentence
    verdict = "inconclusive" if extra["doubts"] else "below its bound"
    lines = [f"The composite score is {verdict}: {result.value:.3f}; at least {score.min:g} is asked for."]
    lines += labelled("score", sentence)
    lines += bullets("doubts", extra["doubts"])
    lines += labelled("bound", f"speed.score.min in {trial.config_path}")
    return "\n".join([*lines, *describe_place(trial)])
