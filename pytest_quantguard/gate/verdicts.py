"""What every kind of check with a bound does with its verdict. The judging itself is in `*judge.py`."""

from __future__ import annotations

from typing import Any

from pytest_quantguard.errors import ConfigError
from pytest_quantguard.gate.plan import Check
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.results import RELATIVE, CheckResult, Outcome
from pytest_quantguard.stats.bootstrap import Interval
from pytest_quantguard.stats.decision import Verdict
from pytest_quantguard.stats.power import smallest_detectable_change


def detectable_change(interval: Interval | None) -> float | None:
    """The smallest change that this suite could have shown, in the metric's unit; None if unknown."""
    if interval is None:
        return None
    return smallest_detectable_change(standard_error=interval.standard_error, clusters=interval.clusters)


def result_of(check: Check, verdict: Verdict, unit: str, extra: dict[str, Any]) -> CheckResult:
    """The result of a check that was judged. unit: of its metric; a change relative to it has its own."""
    outcome: Outcome = "passed" if verdict.passed else "failed"
    interval = verdict.interval
    return CheckResult(
        id=check.name,
        kind=check.kind,
        phase=check.cell.phase if check.cell else None,
        batch_size=check.cell.batch_size if check.cell else None,
        metric=check.metric,
        unit=RELATIVE if verdict.metric.startswith("relative ") else unit,
        value=verdict.value,
        bound=verdict.bound,
        bound_side="max" if verdict.better == "lower" else "min",
        interval=None if interval is None else (interval.low, interval.high),
        noise_floor=verdict.noise_floor,
        detectable_change=verdict.smallest_detectable,
        near_bound=verdict.near_bound,
        decision=verdict.decision,
        outcome=outcome,
        message=verdict.sentence,
        extra=extra,
    )


def without_figures(check: Check, outcome: Outcome, message: str, extra: dict[str, Any]) -> CheckResult:
    """The result of a check that was not judged: it could not run, or is not to be judged here."""
    return CheckResult(
        id=check.name,
        kind=check.kind,
        phase=check.cell.phase if check.cell else None,
        batch_size=check.cell.batch_size if check.cell else None,
        metric=check.metric,
        outcome=outcome,
        message=message,
        extra=extra,
    )


def require_judged(trial: Trial, verdict: Verdict, key: str) -> None:
    """A verdict that was refused is an error of the config, not of the candidate."""
    if verdict.status == "refused":
        raise ConfigError(f"{verdict.sentence}. The key is {key} in {trial.config_path}.")
