"""Aggregates under reweighting equal those of the resampled array, built the slow way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_quantguard.stats.aggregates import Aggregate, Extreme, Mean, Quantile, RootMeanSquare, Share
from pytest_quantguard.stats.clusters import ClusteredValues

AGGREGATES: list[Aggregate] = [
    Mean(),
    Share(),
    RootMeanSquare(),
    Quantile(0.0, "p0"),
    Quantile(0.01, "p1"),
    Quantile(0.5, "median"),
    Quantile(0.99, "p99"),
    Quantile(1.0, "p100"),
    Extreme("max"),
    Extreme("min"),
]


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=7),
    seed=st.integers(0, 2**32 - 1),
    ties=st.booleans(),
)
def test_reweighting_equals_resampling(sizes: list[int], seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    clusters = np.repeat(np.arange(len(sizes)) * 10, sizes)
    values = rng.normal(size=clusters.size)
    if ties:
        values = np.round(values)
    data = ClusteredValues(values, clusters)
    picks = rng.integers(0, len(sizes), (5, len(sizes)))
    weights = np.stack([np.bincount(row, minlength=len(sizes)) for row in picks]).astype(float)
    for aggregate in AGGREGATES:
        resampled = [np.concatenate([values[clusters == 10 * pick] for pick in row]) for row in picks]
        expected = [aggregate.evaluate(sample) for sample in resampled]
        assert aggregate.reweighted(data, weights) == pytest.approx(expected, abs=1e-12), aggregate.label


def test_unknown_values_are_left_out() -> None:
    values = np.array([1.0, np.nan, 3.0, np.nan, 5.0])
    data = ClusteredValues(values, np.array([0, 0, 1, 2, 3]))
    assert data.values.tolist() == [1, 3, 5]
    assert data.count == 3
    assert data.sizes.tolist() == [1, 1, 1]


def test_infinite_and_unequal_input_is_refused() -> None:
    with pytest.raises(ValueError, match="values must be finite, or NaN where unknown"):
        ClusteredValues(np.array([1.0, np.inf]), np.array([0, 1]))
    with pytest.raises(ValueError, match="must be equal and flat"):
        ClusteredValues(np.ones(3), np.zeros(2, np.int64))
