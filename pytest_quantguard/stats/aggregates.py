"""How a column of per-position values becomes one number: mean, share, root mean square, quantile, extreme.

Each aggregate can be taken plainly, or under many reweightings of whole clusters (prompts) at once, which is
what the bootstrap needs. Nothing here knows what the values mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from pytest_quantguard.stats.clusters import ClusteredValues

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


class Aggregate(Protocol):
    """One number from a column of values."""

    @property
    def label(self) -> str:
        """A word for tables: mean, p99, max."""

    def evaluate(self, values: Float64) -> float:
        """values: float64 [T], finite, T >= 1."""

    def reweighted(self, data: ClusteredValues, weights: Float64) -> Float64:
        """float64 [R]: the number under each reweighting float64 [R, clusters] (how often each was drawn)."""


@dataclass(frozen=True, slots=True)
class Mean:
    """The arithmetic mean."""

    label: str = "mean"

    def evaluate(self, values: Float64) -> float:
        """values: float64 [T]."""
        return float(values.mean())

    def reweighted(self, data: ClusteredValues, weights: Float64) -> Float64:
        """float64 [R]."""
        means: Float64 = (weights @ data.sums(data.values)) / (weights @ data.sizes)
        return means


@dataclass(frozen=True, slots=True)
class Share(Mean):
    """The mean of zeros and ones; a type of its own because its interval is."""

    label: str = "share"


@dataclass(frozen=True, slots=True)
class RootMeanSquare:
    """The square root of the mean square."""

    label: str = "rms"

    def evaluate(self, values: Float64) -> float:
        """values: float64 [T]."""
        return float(np.sqrt(np.square(values).mean()))

    def reweighted(self, data: ClusteredValues, weights: Float64) -> Float64:
        """float64 [R]."""
        squares: Float64 = (weights @ data.sums(np.square(data.values))) / (weights @ data.sizes)
        return np.sqrt(squares)


@dataclass(frozen=True, slots=True)
class Quantile:
    """The quantile, interpolated between order statistics (numpy's default; Hyndman and Fan, type 7)."""

    probability: float
    label: str

    def evaluate(self, values: Float64) -> float:
        """values: float64 [T]."""
        return float(np.quantile(values, self.probability))

    def reweighted(self, data: ClusteredValues, weights: Float64) -> Float64:
        """float64 [R]."""
        drawn = weights @ data.sizes
        place = (drawn - 1) * self.probability
        below = np.floor(place).astype(np.int64)
        above = np.minimum(below + 1, drawn.astype(np.int64) - 1)
        low, high = data.order_statistics(weights, below), data.order_statistics(weights, above)
        return low + (high - low) * (place - below)


@dataclass(frozen=True, slots=True)
class Extreme:
    """The largest or smallest value."""

    label: Literal["max", "min"]

    def evaluate(self, values: Float64) -> float:
        """values: float64 [T]."""
        return float(values.max() if self.label == "max" else values.min())

    def reweighted(self, data: ClusteredValues, weights: Float64) -> Float64:
        """float64 [R]."""
        last = (weights @ data.sizes).astype(np.int64) - 1
        return data.order_statistics(weights, last if self.label == "max" else np.zeros_like(last))
