"""Turns a value, a bound and an interval into a verdict, and says it in a sentence.

Pure functions: no measurement, no config, no pytest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pytest_quantguard.stats.bootstrap import Interval
from pytest_quantguard.stats.paired import PairedChange

Better = Literal["lower", "higher"]
Decision = Literal["point", "proven_bad", "proven_good"]
Status = Literal["passed", "failed", "refused"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided, on what grounds.

    status: "refused" means that the question has no answer (and did not pass).
    near_bound: the interval straddles the bound, so a repetition with other prompts could end differently.
    sentence: complete, for a log.
    """

    metric: str
    value: float
    bound: float
    better: Better
    decision: Decision
    status: Status
    near_bound: bool
    interval: Interval | None
    noise_floor: float | None
    smallest_detectable: float | None
    sentence: str

    @property
    def passed(self) -> bool:
        """True only for status "passed"."""
        return self.status == "passed"


def decide(
    *,
    metric: str,
    value: float,
    bound: float,
    better: Better,
    decision: Decision = "point",
    interval: Interval | None = None,
    noise_floor: float | None = None,
    smallest_detectable: float | None = None,
) -> Verdict:
    """Hold `value` against `bound`, an upper one where lower is better, else a lower one.

    - point: passes when value is at or within the bound;
    - proven_bad: fails only when the whole interval lies beyond the bound;
    - proven_good: passes only when the whole interval lies at or within the bound.

    Refused: a bound tighter than `noise_floor` (the metric between two recordings of the same reference: not
    even the reference would keep it); proven_* without an interval; proven_good where the interval only
    describes the sample. ValueError: a value, bound or floor that is not finite.
    """
    for name, number in (("value", value), ("bound", bound), ("noise_floor", noise_floor)):
        if number is not None and not math.isfinite(number):
            raise ValueError(f"{metric}: {name} must be finite, not {number}")
    reason = _refusal(metric, bound, better, decision, interval, noise_floor)
    status: Status
    if reason is not None:
        status, near = "refused", False
        text = f"{metric} {_number(value)} was not judged: {reason}"
    else:
        near = interval is not None and _straddles(interval, bound, better)
        good = _holds(value, bound, better, decision, interval)
        status = "passed" if good else "failed"
        text = f"{metric} {_number(value)} {_relation(value, bound, better)} {_number(bound)}"
        text += _grounds(good, near, decision, value, bound, better)
    text += _context(interval, noise_floor, smallest_detectable)
    return Verdict(
        metric, value, bound, better, decision, status, near, interval, noise_floor, smallest_detectable, text
    )


def decide_drift(
    *,
    metric: str,
    change: PairedChange,
    better: Better,
    max_increase: float,
    relative: bool = True,
    decision: Decision = "point",
) -> Verdict:
    """Hold the worsening since the accepted run against `max_increase` (0.1 is 10 %, or absolute units).

    Where higher is better the worsening is the decrease. Refused as `decide` does, and where a relative
    change of nothing (an accepted value of zero) is asked for.
    """
    name = f"{'relative ' if relative else ''}{'increase' if better == 'lower' else 'decrease'} of {metric}"
    value, interval = change.change, change.interval
    detectable = change.smallest_detectable
    if relative:
        if change.relative is None:
            return _undefined(name, change, max_increase, decision)
        value, interval = change.relative, change.relative_interval
        detectable = None if detectable is None else detectable / change.before
    if better == "higher":
        value, interval = -value, _mirrored(interval)
    return decide(
        metric=name,
        value=value,
        bound=max_increase,
        better="lower",
        decision=decision,
        interval=interval,
        smallest_detectable=detectable,
    )


def _undefined(name: str, change: PairedChange, bound: float, decision: Decision) -> Verdict:
    text = (
        f"{name} was not judged: the accepted run's value is {_number(change.before)}, and a relative change "
        f"of that is not defined; it is now {_number(change.after)} (give an absolute max_increase)"
    )
    return Verdict(
        name,
        change.change,
        bound,
        "lower",
        decision,
        "refused",
        False,
        change.interval,
        None,
        change.smallest_detectable,
        text,
    )


def _mirrored(interval: Interval | None) -> Interval | None:
    if interval is None:
        return None
    return Interval(
        -interval.high,
        -interval.low,
        -interval.value,
        interval.standard_error,
        interval.clusters,
        interval.confidence,
        interval.method,
        interval.note,
    )


def _refusal(
    metric: str,
    bound: float,
    better: Better,
    decision: Decision,
    interval: Interval | None,
    noise_floor: float | None,
) -> str | None:
    if noise_floor is not None and (bound < noise_floor if better == "lower" else bound > noise_floor):
        return (
            f"the bound {_number(bound)} is tighter than the reference's own noise floor "
            f"{_number(noise_floor)}, so the reference itself would not keep it; set {metric} no "
            "tighter than that"
        )
    if decision != "point" and interval is None:
        return (
            f"decision {decision} needs an interval, and one prompt gives none; use more prompts or 'point'"
        )
    if decision == "proven_good" and interval is not None and interval.note is not None:
        return f"decision proven_good cannot be met: {interval.note}"
    return None


def _straddles(interval: Interval, bound: float, better: Better) -> bool:
    """The bound lies inside, so that part of the interval is good and part is not."""
    if better == "lower":
        return interval.low <= bound < interval.high
    return interval.low < bound <= interval.high


def _holds(value: float, bound: float, better: Better, decision: Decision, interval: Interval | None) -> bool:
    if decision != "point" and interval is not None:
        worst, best = (interval.high, interval.low) if better == "lower" else (interval.low, interval.high)
        value = worst if decision == "proven_good" else best
    return value <= bound if better == "lower" else value >= bound


def _relation(value: float, bound: float, better: Better) -> str:
    within = value <= bound if better == "lower" else value >= bound
    if better == "lower":
        return "is within its upper bound" if within else "exceeds its upper bound"
    return "is within its lower bound" if within else "falls short of its lower bound"


def _grounds(good: bool, near: bool, decision: Decision, value: float, bound: float, better: Better) -> str:
    within = value <= bound if better == "lower" else value >= bound
    if decision == "proven_good" and within and not good:
        return ", but that is not proven: the interval reaches beyond the bound"
    if decision == "proven_bad" and not within and good:
        return ", but that is not proven: the interval reaches within the bound"
    return "; the interval straddles the bound" if near else ""


def _context(interval: Interval | None, noise_floor: float | None, detectable: float | None) -> str:
    parts = []
    if interval is not None:
        parts.append(
            f"{interval.confidence:.0%} interval {_number(interval.low)} to {_number(interval.high)}"
        )
    if noise_floor is not None:
        parts.append(f"noise floor {_number(noise_floor)}")
    if detectable is not None:
        parts.append(f"smallest detectable change {_number(detectable)}")
    return f" ({', '.join(parts)})" if parts else ""


def _number(value: float) -> str:
    """Four significant digits; enough more to tell a number close to one from it."""
    return f"{value:.6f}".rstrip("0").rstrip(".") if 0.9 <= abs(value) < 1 else f"{value:.4g}"
