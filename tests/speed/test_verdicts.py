"""Verdicts about time: closed forms, simulations of error rates, and what may never be called unchanged."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest

from pytest_quantguard.stats.speed import (
    MIN_NOISE,
    SlowdownVerdict,
    SpeedupVerdict,
    composite_score,
    correctness_coefficient,
    decide_slowdown,
    decide_speedup,
    median_interval,
    noise_band,
    ratio_of_medians,
    scatter,
)

STEADY = [1.0, 1.001, 0.999, 1.002, 0.998, 1.0, 1.001]


def slowdown(
    factor: float, accepted: list[float] = STEADY, spread: float = 1.0, limit: float = 0.05
) -> SlowdownVerdict:
    measured = [factor * (1 + spread * (time - 1)) for time in STEADY]
    return decide_slowdown(accepted=accepted, measured=measured, max_slowdown=limit, max_scatter=0.1)


def test_the_interval_of_few_rounds_is_that_of_all_resamples() -> None:
    """Of three rounds all 27 x 27 pairs of resamples can be listed."""
    over, under = [1.0, 2.0, 4.0], [1.0, 1.5, 2.5]
    medians = [[float(np.median(picked)) for picked in product(times, repeat=3)] for times in (over, under)]
    ratios = [top / bottom for top in medians[0] for bottom in medians[1]]
    found = ratio_of_medians(over, under)
    assert found.value == 2.0 / 1.5
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(ratios, [0.025, 0.975])))


def test_pairs_cancel_what_slowed_both() -> None:
    load = np.array([1.0, 2.0, 1.5, 3.0, 1.2, 2.5])
    paired = ratio_of_medians((2 * load).tolist(), load.tolist(), paired=True)
    assert (paired.low, paired.value, paired.high) == (2.0, 2.0, 2.0)
    free = ratio_of_medians((2 * load).tolist(), load.tolist())
    assert free.low < 1.5 < 2.5 < free.high


def test_the_median_of_an_interval_lies_within() -> None:
    low, high = median_interval([3.0, 1.0, 2.0, 5.0, 4.0])
    assert 1.0 <= low <= 3.0 <= high <= 5.0
    assert median_interval([2.0]) == (2.0, 2.0)


@pytest.mark.parametrize(
    ("factor", "status"),
    [(1.0, "unchanged"), (1.03, "unchanged"), (1.2, "regressed"), (0.9, "improved"), (1.05, "inconclusive")],
)
def test_statuses(factor: float, status: str) -> None:
    verdict = slowdown(factor)
    assert verdict.status == status
    assert verdict.ratio.value == pytest.approx(factor)
    assert verdict.sentence.startswith({"unchanged": "no slowdown"}.get(status, status))
    assert verdict.noise == MIN_NOISE


def test_within_the_noise_of_the_record_nothing_has_regressed() -> None:
    noisy = [1.0, 1.1, 0.9, 1.08, 0.92, 1.0, 1.05]
    noise = noise_band(noisy)
    assert noise > 0.05
    verdict = slowdown(1.0 + noise * 0.9, accepted=noisy, limit=0.01)
    assert verdict.status == "inconclusive"
    assert verdict.noise == noise
    assert slowdown(1.6, accepted=noisy, limit=0.01).status == "regressed"


@pytest.mark.parametrize(
    ("accepted", "measured", "reason"),
    [
        (STEADY, [1.0, 1.5, 0.7, 1.3, 0.8], "the rounds of this run scatter by"),
        ([1.0, 1.5, 0.7, 1.3, 0.8], STEADY, "the rounds of the accepted record scatter by"),
        (STEADY, [1.0] * 4, "this run has 4 rounds; 5 are needed"),
        ([1.0], STEADY, "the accepted record has 1 rounds"),
    ],
)
def test_doubtful_rounds_are_inconclusive(accepted: list[float], measured: list[float], reason: str) -> None:
    verdict = decide_slowdown(accepted=accepted, measured=measured, max_slowdown=0.05, max_scatter=0.1)
    assert verdict.status == "inconclusive"
    assert reason in verdict.reasons[0]


def test_disturbances_are_inconclusive() -> None:
    verdict = decide_slowdown(
        accepted=STEADY,
        measured=STEADY,
        max_slowdown=0.05,
        max_scatter=0.1,
        disturbances=["GPU 0 was slowed down"],
    )
    assert (verdict.status, verdict.reasons) == ("inconclusive", ("GPU 0 was slowed down",))


@pytest.mark.parametrize("noise", [0.01, 0.06])
def test_error_rates(noise: float) -> None:
    """Of 120 simulated runs that did not change at most 2 % regress; of those 10 % slower at most 2.5 %, the
    one-sided level, pass for unchanged, whatever the noise.
    """
    rng = np.random.default_rng(5)
    counts: dict[float, Counter[str]] = {}
    for factor in (1.0, 1.1):
        counts[factor] = Counter(
            decide_slowdown(
                accepted=np.exp(rng.normal(0, noise, 7)).tolist(),
                measured=(factor * np.exp(rng.normal(0, noise, 7))).tolist(),
                max_slowdown=0.05,
                max_scatter=0.1,
            ).status
            for _ in range(120)
        )
    assert counts[1.0]["regressed"] <= 2
    assert counts[1.1]["unchanged"] + counts[1.1]["improved"] <= 3
    if noise == 0.01:
        assert counts[1.0]["unchanged"] >= 114
        assert counts[1.1]["regressed"] >= 114


def speedup(reference: float, minimum: float, paired: bool = False) -> SpeedupVerdict:
    times = [reference * time for time in STEADY]
    return decide_speedup(reference=times, measured=STEADY, minimum=minimum, max_scatter=0.1, paired=paired)


def test_speedups() -> None:
    assert speedup(2.0, 1.9).status == "reached"
    assert speedup(2.0, 2.1).status == "missed"
    assert speedup(2.0, 2.0).status == "inconclusive"
    assert speedup(2.0, 2.0, paired=True).status == "reached", "pairs agree exactly"
    assert "2.000" in speedup(2.0, 1.9).sentence


def test_interleaved_rounds_may_scatter_together() -> None:
    load = [1.0, 2.0, 1.5, 3.0, 1.2]
    rules = {"reference": [2 * time for time in load], "measured": load, "minimum": 1.5, "max_scatter": 0.1}
    assert decide_speedup(**rules, paired=True).status == "reached"  # type: ignore[arg-type]
    assert decide_speedup(**rules, paired=False).status == "inconclusive"  # type: ignore[arg-type]


def test_scatter() -> None:
    assert scatter([1.0, 2.0, 3.0]) == pytest.approx(0.5)
    assert scatter([2.0]) == 0.0


@pytest.mark.parametrize("times", [[], [1.0, 0.0], [1.0, float("nan")], [-1.0]])
def test_impossible_times(times: list[float]) -> None:
    with pytest.raises(ValueError, match="positive, finite"):
        ratio_of_medians(times, STEADY)


@pytest.mark.parametrize(
    ("relative", "coefficient"),
    [(0.5, 0.0), (0.9699, 0.0), (0.97, 0.0), (0.98, 0.5), (0.985, 0.75), (0.99, 1.0), (1.2, 1.0)],
)
def test_the_default_coefficient(relative: float, coefficient: float) -> None:
    assert correctness_coefficient(relative, [(0.97, 0.0), (0.99, 1.0)]) == pytest.approx(coefficient)


@pytest.mark.parametrize(("relative", "coefficient"), [(0.89, 0.0), (0.9, 0.5), (0.94, 0.5), (0.95, 1.0)])
def test_steps(relative: float, coefficient: float) -> None:
    steps = [(0.9, 0.0), (0.9, 0.5), (0.95, 0.5), (0.95, 1.0)]
    assert correctness_coefficient(relative, steps) == coefficient


def test_composite_score() -> None:
    speedups = {"1": 1.5, "8": 2.0, "max": 3.0}
    weights = {"1": 0.4, "8": 0.3, "max": 0.3}
    assert composite_score(speedups, weights, 0.5) == pytest.approx(0.5 * (0.6 + 0.6 + 0.9))
    with pytest.raises(ValueError, match=r"no speed.up at level max"):
        composite_score({"1": 1.5, "8": 2.0}, weights)
    with pytest.raises(ValueError, match=r"sum to 0\.7"):
        composite_score(speedups, {"1": 0.4, "8": 0.3})
    with pytest.raises(ValueError, match="rising"):
        correctness_coefficient(1.0, [(0.99, 1.0), (0.97, 0.0)])
