"""Intervals: coverage on data of known mean, degenerate input, agreement with a bootstrap spelled out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pytest_quantguard.stats.aggregates import Extreme, Mean, Quantile, RootMeanSquare, Share
from pytest_quantguard.stats.bootstrap import (
    Column,
    Interval,
    Resampler,
    bootstrap_intervals,
    clustered_standard_error,
    share_interval,
)

from .simulation import CASES, skewed


def interval(
    values: np.ndarray, aggregate: object = None, clusters: np.ndarray | None = None, **options: object
) -> Interval:
    labels = np.repeat(np.arange(values.shape[0]), values.shape[1]) if clusters is None else clusters
    column = Column(values.ravel(), Mean() if aggregate is None else aggregate)
    found = bootstrap_intervals({"x": column}, labels, **options)["x"]
    assert found is not None
    return found


@pytest.mark.parametrize(
    "name", ["mean, normal, 32 prompts", "mean, skewed, 32 prompts", "share 0.03, 32 prompts"]
)
def test_intervals_cover_the_truth(name: str) -> None:
    """95 % +- 3 %; 600 repetitions leave a sampling error of 0.9 %."""
    coverage, _, _ = CASES[name].coverage(600, resamples=600)
    assert 0.92 <= coverage <= 0.98


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "mean, skewed, 8 prompts"])
def test_intervals_cover_the_truth_in_every_case(name: str) -> None:
    coverage, above, below = CASES[name].coverage(1000)
    print(f"{name}: {coverage:.1%} (above {above:.1%}, below {below:.1%})")
    assert 0.92 <= coverage <= 0.98


def test_positions_of_a_prompt_are_not_independent() -> None:
    """Copies of one value per prompt add nothing: the interval is that of the prompts alone."""
    means = np.random.default_rng(0).normal(size=(20, 1))
    once, copied = interval(means), interval(np.repeat(means, 50, axis=1))
    assert copied.standard_error == pytest.approx(once.standard_error)
    assert (copied.low, copied.high) == pytest.approx((once.low, once.high))
    assert once.standard_error == pytest.approx(means.std(ddof=1) / math.sqrt(20))


def test_the_seed_decides_the_draws() -> None:
    values = skewed(np.random.default_rng(1), 16, 10)
    assert interval(values, seed=5) == interval(values, seed=5)
    assert interval(values, seed=5) != interval(values, seed=6)
    wide = interval(values, confidence=0.99)
    assert wide.low < interval(values).low < interval(values).high < wide.high


def test_every_draw_holds_as_many_prompts_as_there_are() -> None:
    draws = Resampler(resamples=500, seed=3).draws(7)
    assert draws.shape == (500, 7)
    assert (draws.sum(axis=1) == 7).all()
    assert draws.mean(axis=0) == pytest.approx(np.ones(7), abs=0.2)


def test_standard_error_is_the_spread_of_resampled_means() -> None:
    rng = np.random.default_rng(2)
    sizes = rng.integers(5, 60, 40)
    labels = np.repeat(np.arange(40), sizes)
    values = rng.normal(size=labels.size) + rng.normal(size=40)[labels]
    found = interval(values, clusters=labels)
    per_prompt = [values[labels == prompt] for prompt in range(40)]
    means = [
        np.concatenate([per_prompt[pick] for pick in rng.integers(0, 40, 40)]).mean() for _ in range(3000)
    ]
    assert found.standard_error == pytest.approx(np.std(means), rel=0.1)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.06)
    assert found.method == "bootstrap-t"


def test_quantile_intervals_are_near_the_plain_bootstraps() -> None:
    rng = np.random.default_rng(3)
    values = skewed(rng, 64, 64)
    found = interval(values, Quantile(0.95, "p95"))
    plain = [np.quantile(values[rng.integers(0, 64, 64)], 0.95) for _ in range(2000)]
    low, high = np.quantile(plain, [0.025, 0.975])
    assert found.low == pytest.approx(low, rel=0.05)
    assert found.high == pytest.approx(high, rel=0.08)
    assert found.method == "BCa"
    assert found.note is None


def test_root_mean_square_is_the_root_of_the_mean_of_squares() -> None:
    values = np.random.default_rng(4).normal(size=(30, 20))
    squares, root = interval(np.square(values)), interval(values, RootMeanSquare())
    assert root.low == pytest.approx(math.sqrt(squares.low))
    assert root.high == pytest.approx(math.sqrt(squares.high))
    assert root.standard_error == pytest.approx(squares.standard_error / (2 * root.value))


def test_a_share_of_independent_positions_is_wilsons_interval() -> None:
    """One position per prompt: effective number = number (n - 1), Student's t close to normal."""
    ones = np.zeros(400)
    ones[:20] = 1
    low, high, error, _ = share_interval(ones, np.ones(400), 0.95)
    assert error == pytest.approx(math.sqrt(0.05 * 0.95 / 399))
    assert (low, high) == pytest.approx((0.0326, 0.0760), abs=5e-4)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_share_without_exceptions_is_not_certain(value: float) -> None:
    found = interval(np.full((32, 32), value), Share())
    assert found.value == value
    assert found.high - found.low == pytest.approx(0.004, abs=0.0005)
    assert value in (found.low, found.high)


def test_constant_values_have_no_spread() -> None:
    for aggregate in (Mean(), RootMeanSquare(), Quantile(0.9, "p90"), Extreme("max")):
        found = interval(np.full((10, 5), 0.1), aggregate)
        assert found.low == pytest.approx(0.1, abs=1e-15)
        assert found.high == pytest.approx(0.1, abs=1e-15)
        assert found.standard_error == 0


def test_one_prompt_has_no_interval() -> None:
    columns = {"x": Column(np.arange(50.0), Mean())}
    assert bootstrap_intervals(columns, np.zeros(50, np.int64)) == {"x": None}
    unknown = {"x": Column(np.where(np.arange(50) < 25, np.arange(50.0), np.nan), Mean())}
    assert bootstrap_intervals(unknown, np.arange(50) // 25) == {"x": None}


@pytest.mark.parametrize("prompts", [2, 3, 5])
def test_few_prompts_get_students_interval(prompts: int) -> None:
    found = interval(np.random.default_rng(5).normal(size=(prompts, 8)))
    assert found.method == "Student"
    assert found.high - found.low > 2 * 1.96 * found.standard_error


def test_one_deviating_prompt_gets_students_interval() -> None:
    """A third of the resamples leave it out and have no spread to be studentised by."""
    values = np.zeros((24, 10))
    values[7] = 1.0
    found = interval(values)
    assert found.method == "Student"
    assert found.low < 0 < found.value < found.high


def test_tails_that_the_sample_cannot_know_are_marked() -> None:
    values = skewed(np.random.default_rng(6), 16, 32)
    assert "only 0.5 of 512 positions lie beyond this quantile" in str(
        interval(values, Quantile(0.999, "p99.9")).note
    )
    assert "an extreme is not bounded by a sample" in str(interval(values, Extreme("max")).note)
    assert interval(values, Quantile(0.99, "p99")).note is None


def test_limits_cut_the_interval() -> None:
    values = np.random.default_rng(7).random((6, 3))
    free, cut = (
        bootstrap_intervals({"x": Column(values.ravel(), Mean(), limits)}, np.repeat(np.arange(6), 3))["x"]
        for limits in ((-math.inf, math.inf), (0.45, 0.55))
    )
    assert free is not None
    assert cut is not None
    assert (cut.low, cut.high) == (max(free.low, 0.45), min(free.high, 0.55))


def test_impossible_options_are_refused() -> None:
    values = np.ones((3, 3))
    with pytest.raises(ValueError, match="at least 100 resamples"):
        interval(values, resamples=10)
    with pytest.raises(ValueError, match="confidence must lie in"):
        interval(values, confidence=95.0)


def test_clustered_standard_error_of_equal_ratios_is_zero() -> None:
    sizes = np.array([3.0, 5.0, 7.0])
    assert clustered_standard_error(0.1 * sizes, sizes) == 0.0
