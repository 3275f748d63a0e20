"""Clustered data with known truth, shaped like per-position divergences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pytest_quantguard.stats.aggregates import Aggregate, Mean, Quantile, Share
from pytest_quantguard.stats.bootstrap import Column, bootstrap_intervals

Float64 = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, int, int], Float64]


def skewed(rng: np.random.Generator, clusters: int, size: int) -> Float64:
    """Log-normal within and between clusters, mean exp(1/8): like KL per position."""
    between = np.exp(rng.normal(size=(clusters, 1)) * 0.5)
    return between * np.exp(rng.normal(size=(clusters, size)) * 1.5 - 1.125)


def normal(rng: np.random.Generator, clusters: int, size: int) -> Float64:
    """Normal within and between clusters, intraclass correlation 1/2, mean 0."""
    return rng.normal(size=(clusters, 1)) + rng.normal(size=(clusters, size))


def rare(rng: np.random.Generator, clusters: int, size: int) -> Float64:
    """Zeros and ones, share 0.03, overdispersed between clusters (correlation 0.02)."""
    chance = rng.beta(0.03 * 49, 0.97 * 49, size=(clusters, 1))
    return (rng.random((clusters, size)) < chance).astype(np.float64)


@dataclass(frozen=True)
class Case:
    name: str
    draw: Draw
    aggregate: Aggregate
    truth: float | None
    clusters: int = 32
    size: int = 32

    def true_value(self) -> float:
        if self.truth is not None:
            return self.truth
        return self.aggregate.evaluate(self.draw(np.random.default_rng(99), 200_000, 4).ravel())

    def coverage(self, repetitions: int, *, resamples: int = 1000) -> tuple[float, float, float]:
        """Share of 95 % intervals that hold the truth, lie above it, lie below it."""
        truth, above, below = self.true_value(), 0, 0
        labels = np.repeat(np.arange(self.clusters), self.size)
        for repetition in range(repetitions):
            rng = np.random.default_rng([7, repetition])
            values = self.draw(rng, self.clusters, self.size).ravel()
            column = {"x": Column(values, self.aggregate)}
            interval = bootstrap_intervals(column, labels, resamples=resamples, seed=repetition)["x"]
            assert interval is not None
            above += interval.low > truth
            below += interval.high < truth
        return 1 - (above + below) / repetitions, above / repetitions, below / repetitions


CASES = {
    case.name: case
    for case in (
        Case("mean, normal, 8 prompts", normal, Mean(), 0.0, clusters=8),
        Case("mean, normal, 32 prompts", normal, Mean(), 0.0),
        Case("mean, skewed, 8 prompts", skewed, Mean(), math.exp(1 / 8), clusters=8),
        Case("mean, skewed, 32 prompts", skewed, Mean(), math.exp(1 / 8)),
        Case("mean, skewed, 64 prompts of 128", skewed, Mean(), math.exp(1 / 8), clusters=64, size=128),
        Case("share 0.03, 32 prompts", rare, Share(), 0.03),
        Case("share 0.03, 64 prompts of 128", rare, Share(), 0.03, clusters=64, size=128),
        Case("median, skewed, 32 prompts", skewed, Quantile(0.5, "median"), None),
        Case("p95, skewed, 32 prompts", skewed, Quantile(0.95, "p95"), None),
        Case("p95, skewed, 64 prompts of 128", skewed, Quantile(0.95, "p95"), None, clusters=64, size=128),
        Case("p99, skewed, 32 prompts", skewed, Quantile(0.99, "p99"), None),
        Case("p99, skewed, 64 prompts of 128", skewed, Quantile(0.99, "p99"), None, clusters=64, size=128),
    )
}
