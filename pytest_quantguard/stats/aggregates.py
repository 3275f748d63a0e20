"""How a column of per-position values becomes one number: mean, root mean square, quantile, extreme.

Each aggregate can be taken plainly, or over many reweightings of whole clusters (prompts) at once, which is
what the bootstrap needs. Nothing here knows what the values mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


class Aggregate(Protocol):
    """One number from a column of values."""

    @property
    def label(self) -> str:
        """A word for tables: mean, p99, max."""

    def evaluate(self, values: Float64) -> float:
        """values: float64 [T], finite, T >= 1."""


@dataclass(frozen=True, slots=True)
class Mean:
    """The arithmetic mean; of a boolean column, the share."""

    label: str = "mean"

    def evaluate(self, values: Float64) -> float:
        """values: float64 [T]."""
        return float(values.mean())


@dataclass(frozen=True, slots=True)
class RootMeanSquare:
    """The square root of the mean square."""

    label: str = "rms"

    def evaluate(self, values: Float64) -> float:
        """values: float64 [T]."""
        return float(np.sqrt(np.square(values).mean()))


@dataclass(frozen=True, slots=True)
class Quantile:
    """The quantile, interpolated between order statistics (numpy's default; Hyndman and Fan, type 7)."""

    probability: float
    label: str

    def evaluate(self, values: Float64) -> float:
        """values: float64 [T]."""
        return float(np.quantile(values, self.probability))


@dataclass(frozen=True, slots=True)
class Extreme:
    """The largest or smallest value."""

    label: Literal["max", "min"]

    def evaluate(self, values: Float64) -> float:
        """values: float64 [T]."""
        return float(values.max() if self.label == "max" else values.min())
