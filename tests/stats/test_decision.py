"""Verdicts: what passes, what is near, what is refused, and what the sentence says."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from pytest_quantguard.stats.aggregates import Mean
from pytest_quantguard.stats.bootstrap import Column, Interval
from pytest_quantguard.stats.decision import decide, decide_drift
from pytest_quantguard.stats.paired import PairedChange, paired_change


def between(low: float, high: float, *, note: str | None = None) -> Interval:
    return Interval(low, high, (low + high) / 2, (high - low) / 4, 32, 0.95, "bootstrap-t", note)


WITHIN, STRADDLES, BEYOND = between(0.01, 0.018), between(0.018, 0.024), between(0.022, 0.03)


@pytest.mark.parametrize(
    ("interval", "point", "proven_bad", "proven_good", "near"),
    [
        (WITHIN, True, True, True, False),
        (STRADDLES, False, True, False, True),
        (BEYOND, False, False, False, False),
        (between(0.012, 0.024), True, True, False, True),
    ],
)
@pytest.mark.parametrize("better", ["lower", "higher"])
def test_the_three_decisions(
    interval: Interval, point: bool, proven_bad: bool, proven_good: bool, near: bool, better: str
) -> None:
    """Bound 0.02; the mirrored case holds 1 - x against 1 - 0.02."""
    bound = 0.02
    if better == "higher":
        bound, interval = 1 - bound, between(1 - interval.high, 1 - interval.low)
    for decision, passed in (("point", point), ("proven_bad", proven_bad), ("proven_good", proven_good)):
        verdict = decide(
            metric="m",
            value=interval.value,
            bound=bound,
            better=better,
            decision=decision,
            interval=interval,
        )
        assert verdict.passed == passed, decision
        assert verdict.near_bound == near
        assert verdict.status == ("passed" if passed else "failed")


def test_a_value_at_the_bound_is_within() -> None:
    assert decide(metric="m", value=0.02, bound=0.02, better="lower").passed
    assert decide(metric="m", value=0.97, bound=0.97, better="higher").passed
    assert not decide(metric="m", value=math.nextafter(0.02, 1), bound=0.02, better="lower").passed
    exact = between(0.02, 0.02)
    verdict = decide(
        metric="m", value=0.02, bound=0.02, better="lower", decision="proven_good", interval=exact
    )
    assert verdict.passed
    assert not verdict.near_bound


def test_sentences() -> None:
    failed = decide(
        metric="kl_mean",
        value=0.0231,
        bound=0.02,
        better="lower",
        interval=between(0.0198, 0.0264),
        noise_floor=0.0004,
        smallest_detectable=0.0031,
    )
    assert failed.sentence == (
        "kl_mean 0.0231 exceeds its upper bound 0.02; the interval straddles the bound "
        "(95% interval 0.0198 to 0.0264, noise floor 0.0004, smallest detectable change 0.0031)"
    )
    passed = decide(metric="agreement", value=0.9912, bound=0.97, better="higher")
    assert passed.sentence == "agreement 0.9912 is within its lower bound 0.97"
    unproven = decide(
        metric="kl_mean", value=0.021, bound=0.02, better="lower", decision="proven_bad", interval=STRADDLES
    )
    assert "but that is not proven: the interval reaches within the bound" in unproven.sentence
    unproven = decide(
        metric="kl_mean", value=0.019, bound=0.02, better="lower", decision="proven_good", interval=STRADDLES
    )
    assert "but that is not proven: the interval reaches beyond the bound" in unproven.sentence


@pytest.mark.parametrize(("better", "bound", "floor"), [("lower", 0.0003, 0.0004), ("higher", 0.999, 0.998)])
def test_a_bound_below_the_noise_floor_is_refused(better: str, bound: float, floor: float) -> None:
    verdict = decide(metric="m", value=bound, bound=bound, better=better, noise_floor=floor)
    assert (verdict.status, verdict.passed) == ("refused", False)
    assert "tighter than the reference's own noise floor" in verdict.sentence
    assert "the reference itself would not keep it" in verdict.sentence
    assert decide(metric="m", value=floor, bound=floor, better=better, noise_floor=floor).passed


def test_proof_without_an_interval_is_refused() -> None:
    for decision in ("proven_bad", "proven_good"):
        verdict = decide(metric="m", value=0.1, bound=0.2, better="lower", decision=decision)
        assert verdict.status == "refused"
        assert "needs an interval, and one prompt gives none" in verdict.sentence


def test_proof_by_an_interval_that_only_describes_the_sample_is_refused() -> None:
    described = between(0.1, 0.15, note="an extreme is not bounded by a sample")
    good = decide(
        metric="kl_max", value=0.12, bound=0.2, better="lower", decision="proven_good", interval=described
    )
    assert good.status == "refused"
    assert "cannot be met: an extreme is not bounded by a sample" in good.sentence
    bad = decide(
        metric="kl_max", value=0.12, bound=0.05, better="lower", decision="proven_bad", interval=described
    )
    assert bad.status == "failed"


@pytest.mark.parametrize("name", ["value", "bound", "noise_floor"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_none_are_refused(name: str, number: float) -> None:
    arguments = {"value": 0.1, "bound": 0.2, "noise_floor": 0.01, name: number}
    with pytest.raises(ValueError, match=f"m: {name} must be finite"):
        decide(metric="m", better="lower", **arguments)


def test_verdicts_are_frozen() -> None:
    verdict = decide(metric="m", value=0.1, bound=0.2, better="lower")
    with pytest.raises(dataclasses.FrozenInstanceError):
        verdict.value = 0.3


def change(factor: float, *, base: float = 1.0) -> PairedChange:
    rng = np.random.default_rng(0)
    before = rng.random(320) * base
    after = before * factor * (1 + rng.normal(size=320) * 0.01)
    return paired_change(Column(before, Mean()), Column(after, Mean()), np.repeat(np.arange(32), 10))


def test_drift_is_judged_by_the_relative_worsening() -> None:
    worse = decide_drift(metric="kl_mean", change=change(1.2), better="lower", max_increase=0.1)
    assert not worse.passed
    assert worse.value == pytest.approx(0.2, abs=0.01)
    assert worse.metric == "relative increase of kl_mean"
    assert decide_drift(metric="kl_mean", change=change(1.05), better="lower", max_increase=0.1).passed
    assert decide_drift(metric="kl_mean", change=change(0.5), better="lower", max_increase=0.1).passed
    proven = decide_drift(
        metric="kl_mean", change=change(1.2), better="lower", max_increase=0.1, decision="proven_bad"
    )
    assert not proven.passed


def test_drift_where_higher_is_better_is_the_decrease() -> None:
    down = decide_drift(metric="cosine_mean", change=change(0.8), better="higher", max_increase=0.1)
    assert not down.passed
    assert down.metric == "relative decrease of cosine_mean"
    assert down.value == pytest.approx(0.2, abs=0.01)
    assert down.interval is not None
    assert down.interval.low < down.value < down.interval.high
    assert decide_drift(metric="cosine_mean", change=change(1.2), better="higher", max_increase=0.1).passed


def test_drift_in_absolute_units() -> None:
    verdict = decide_drift(
        metric="kl_mean", change=change(1.2), better="lower", max_increase=0.05, relative=False
    )
    assert verdict.value == pytest.approx(0.1, abs=0.02)
    assert not verdict.passed
    assert verdict.metric == "increase of kl_mean"


def test_a_relative_change_of_nothing_is_refused() -> None:
    verdict = decide_drift(metric="kl_mean", change=change(1.2, base=0.0), better="lower", max_increase=0.1)
    assert verdict.status == "refused"
    assert "the accepted run's value is 0, and a relative change of that is not defined" in verdict.sentence
