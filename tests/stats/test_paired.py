"""Paired changes: closed forms, cancellation of what is shared, degenerate input."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pytest_quantguard.stats.aggregates import Aggregate, Mean, Quantile, RootMeanSquare, Share
from pytest_quantguard.stats.bootstrap import Column, clustered_standard_error
from pytest_quantguard.stats.paired import paired_change
from pytest_quantguard.stats.power import smallest_detectable_change

CLUSTERS = np.repeat(np.arange(32), 32)


def two_runs(effect: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """KL-like values of two runs that share prompts and positions and differ by 5 % noise and an effect."""
    rng = np.random.default_rng(seed)
    shared = np.exp(rng.normal(size=32) * 0.5)[CLUSTERS] * np.exp(rng.normal(size=1024) * 1.5 - 1.125)
    noise = 1 + rng.normal(size=(2, 1024)) * 0.05
    return shared * noise[0], shared * noise[1] * (1 + effect)


def change(before: np.ndarray, after: np.ndarray, aggregate: Aggregate | None = None):
    kind = Mean() if aggregate is None else aggregate
    return paired_change(Column(before, kind), Column(after, kind), CLUSTERS)


@pytest.mark.parametrize(
    "aggregate", [Mean(), RootMeanSquare(), Quantile(0.5, "median"), Quantile(0.95, "p95")]
)
def test_a_change_of_ten_per_cent_is_found_and_sized(aggregate: Aggregate) -> None:
    before, after = two_runs(0.10)
    found = change(before, after, aggregate)
    assert found.change == pytest.approx(aggregate.evaluate(after) - aggregate.evaluate(before))
    assert found.relative == pytest.approx(found.change / aggregate.evaluate(before))
    assert found.significant
    assert found.relative in found.relative_interval
    assert found.relative_interval.low > 0
    assert found.direction("lower") == "worse"
    assert found.direction("higher") == "better"


def test_the_standard_error_is_that_of_the_differences() -> None:
    before, after = two_runs(0.1)
    found = change(before, after)
    sums = np.bincount(CLUSTERS, after - before)
    error = clustered_standard_error(sums, np.full(32, 32.0))
    assert found.interval.standard_error == pytest.approx(error)
    assert found.smallest_detectable == pytest.approx(
        smallest_detectable_change(standard_error=error, clusters=32)
    )
    alone = clustered_standard_error(np.bincount(CLUSTERS, before), np.full(32, 32.0))
    assert error < alone / 5


def test_no_effect_is_called_unchanged_about_as_often_as_promised() -> None:
    calls = [change(*two_runs(0.0, seed)).significant for seed in range(200)]
    assert np.mean(calls) < 0.1
    assert change(*two_runs(0.0, 3)).direction("lower") == "unchanged"


def test_the_same_run_twice_has_not_changed_at_all() -> None:
    before, _ = two_runs(0.1)
    for aggregate in (Mean(), Quantile(0.9, "p90")):
        found = change(before, before, aggregate)
        assert (found.change, found.relative) == (0, 0)
        assert (found.interval.low, found.interval.high) == (0, 0)
        assert found.smallest_detectable == 0
        assert not found.significant


def test_shares_change_by_flips() -> None:
    rng = np.random.default_rng(1)
    before = (rng.random(1024) < 0.95).astype(float)
    after = before.copy()
    after[rng.permutation(1024)[:60]] = 0
    found = change(before, after, Share())
    assert found.change == pytest.approx(after.mean() - before.mean())
    assert found.direction("higher") == "worse"


def test_positions_unknown_on_either_side_are_left_out_of_both() -> None:
    before, after = two_runs(0.1)
    before[::3], after[1::3] = np.nan, np.nan
    found = change(before, after)
    known = ~np.isnan(before + after)
    assert found.positions == known.sum()
    assert found.change == pytest.approx((after[known] - before[known]).mean())


def test_one_prompt_and_nothing_to_relate_to_have_no_interval() -> None:
    values = Column(np.arange(5.0), Mean())
    found = paired_change(values, values, np.zeros(5, np.int64))
    assert (found.interval, found.relative_interval, found.smallest_detectable) == (None, None, None)
    assert not found.significant
    nothing = change(np.zeros(1024), np.ones(1024))
    assert (nothing.relative, nothing.relative_interval) == (None, None)
    assert nothing.change == 1


def test_columns_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="same positions and the same aggregate"):
        paired_change(Column(np.ones(3), Mean()), Column(np.ones(4), Mean()), np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="same positions and the same aggregate"):
        paired_change(Column(np.ones(3), Mean()), Column(np.ones(3), Share()), np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="no position is known on both sides"):
        paired_change(Column(np.full(3, math.nan), Mean()), Column(np.ones(3), Mean()), np.zeros(3, np.int64))
