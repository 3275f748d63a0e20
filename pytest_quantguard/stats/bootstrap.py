"""Confidence intervals for aggregates of values that come in clusters: a prompt is drawn whole or not at all.

The plain percentile bootstrap covers too little with few, skewed clusters, so each kind of aggregate gets
the correction that simulations with clustered data favoured (the table is in docs/metrics.md):

- mean, root mean square: bootstrap-t, studentised by the linearised clustered standard error of each
resample;
- share: Wilson's interval with the effective number of positions and Student's t (no resampling needed);
- quantiles and extremes: BCa, its levels widened for the number of clusters.

Nothing here knows what the values mean, or whether a value is good.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pytest_quantguard.stats.aggregates import Aggregate, Extreme, Mean, Quantile, RootMeanSquare, Share
from pytest_quantguard.stats.clusters import ClusteredValues
from pytest_quantguard.stats.student import NORMAL, student_quantile

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

RESAMPLES = 2000
CONFIDENCE = 0.95
MIN_STUDENTISED_CLUSTERS = 6
"""Below this, too many resamples repeat one cluster and have no spread of their own to be studentised by."""

MIN_BEYOND = 5
"""With fewer values beyond a quantile the sample says little about where it lies."""


@dataclass(frozen=True, slots=True)
class Column:
    """What an interval is wanted for.

    values: float64 [T], NaN where unknown. limits: values that the aggregate cannot exceed.
    """

    values: Float64
    aggregate: Aggregate
    limits: tuple[float, float] = (-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided confidence interval.

    standard_error: of the value, by clusters. clusters: how many had values. method: how it was made.
    note: why it only describes this sample, where that is so.
    """

    low: float
    high: float
    value: float
    standard_error: float
    clusters: int
    confidence: float
    method: str
    note: str | None = None

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


class Resampler:
    """Draws of clusters with replacement, the same ones for all columns with as many clusters."""

    def __init__(self, *, resamples: int = RESAMPLES, seed: int = 0) -> None:
        if resamples < 100:
            raise ValueError(f"at least 100 resamples are needed for an interval, not {resamples}")
        self._resamples = resamples
        self._seed = seed
        self._draws: dict[int, Float64] = {}
        self._left_out: dict[int, Float64] = {}

    def draws(self, clusters: int) -> Float64:
        """float64 [resamples, clusters]: how often each cluster was drawn; each row sums to `clusters`."""
        if clusters not in self._draws:
            rng = np.random.default_rng([self._seed, clusters])
            picks = rng.integers(0, clusters, (self._resamples, clusters))
            flat = picks + np.arange(self._resamples)[:, None] * clusters
            counts = np.bincount(flat.ravel(), minlength=self._resamples * clusters)
            self._draws[clusters] = counts.reshape(self._resamples, clusters).astype(np.float64)
        return self._draws[clusters]

    def left_out(self, clusters: int) -> Float64:
        """float64 [clusters, clusters]: reweightings that each leave one cluster out."""
        return self._left_out.setdefault(clusters, 1.0 - np.eye(clusters))


def bootstrap_intervals(
    columns: Mapping[str, Column],
    clusters: Int64,
    *,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> dict[str, Interval | None]:
    """Intervals of all columns over the same positions.

    clusters: int64 [T], the prompt of each position. None for a column with values in fewer than two prompts:
    one prompt says nothing about how prompts differ. The same seed gives the same intervals.
    """
    _check_confidence(confidence)
    resampler = Resampler(resamples=resamples, seed=seed)
    prepared: dict[int, ClusteredValues] = {}
    intervals: dict[str, Interval | None] = {}
    for name, column in columns.items():
        key = id(column.values)  # metrics of one array share its sorting
        if key not in prepared:
            prepared[key] = ClusteredValues(column.values, clusters)
        intervals[name] = _interval(column, prepared[key], resampler, confidence)
    return intervals


def _interval(
    column: Column, data: ClusteredValues, resampler: Resampler, confidence: float
) -> Interval | None:
    if data.count < 2:
        return None
    value, aggregate = column.aggregate.evaluate(data.values), column.aggregate
    note = None
    if isinstance(aggregate, Share):
        low, high, error, method = share_interval(data.sums(data.values), data.sizes, confidence)
    elif isinstance(aggregate, Mean):
        found = ratio_interval(data.sums(data.values), data.sizes, resampler, confidence)
        low, high, error, method = found
    elif isinstance(aggregate, RootMeanSquare):
        squares = data.sums(np.square(data.values))
        low, high, error, method = ratio_interval(squares, data.sizes, resampler, confidence)
        low, high = math.sqrt(max(low, 0.0)), math.sqrt(max(high, 0.0))
        error = error / (2 * value) if value > 0 else 0.0
    else:
        drawn = aggregate.reweighted(data, resampler.draws(data.count))
        left_out = aggregate.reweighted(data, resampler.left_out(data.count))
        low, high, error, method = bca_interval(value, drawn, left_out, confidence)
        note = _tail_note(aggregate, data.values.size)
    low, high = max(low, column.limits[0]), min(high, column.limits[1])
    return Interval(low, high, value, error, data.count, confidence, method, note)


def share_interval(ones: Float64, sizes: Float64, confidence: float) -> tuple[float, float, float, str]:
    """Wilson's score interval for a share of clustered zeros and ones.

    ones, sizes: float64 [clusters]. The number of positions is replaced by the effective number p(1-p)/SE^2,
    at most the true one, and the normal quantile by Student's with clusters - 1 degrees (the form of survey
    statistics; Korn and Graubard 1998, with Wilson 1927 in place of Clopper and Pearson). Where all positions
    agree no clustering can be seen and the number of positions is taken as it is.
    """
    positions = float(sizes.sum())
    share = float(ones.sum()) / positions
    error = clustered_standard_error(ones, sizes)
    effective = min(share * (1 - share) / error**2, positions) if error > 0 else positions
    t = student_quantile((1 + confidence) / 2, sizes.size - 1)
    centre = (share + t * t / (2 * effective)) / (1 + t * t / effective)
    half = (
        t / (1 + t * t / effective) * math.sqrt(share * (1 - share) / effective + (t / (2 * effective)) ** 2)
    )
    # The interval holds the share; at 0 and 1 rounding could say otherwise.
    return max(min(centre - half, share), 0.0), min(max(centre + half, share), 1.0), error, "Wilson"


def ratio_interval(
    numerators: Float64, denominators: Float64, resampler: Resampler, confidence: float
) -> tuple[float, float, float, str]:
    """Bootstrap-t interval of sum(numerators) / sum(denominators), both float64 [clusters].

    (Efron and Tibshirani 1993, section 12.5; the standard error by linearisation, as for a ratio in survey
    sampling.) Student's interval where resamples without spread make studentising impossible.
    """
    clusters = numerators.size
    value = float(numerators.sum() / denominators.sum())
    error = clustered_standard_error(numerators, denominators)
    if error == 0:
        return value, value, 0.0, "no spread"
    upper = (1 + confidence) / 2
    weights = resampler.draws(clusters)
    totals = weights @ denominators
    ratios = (weights @ numerators) / totals
    squares = (
        weights @ np.square(numerators)
        - 2 * ratios * (weights @ (numerators * denominators))
        + np.square(ratios) * (weights @ np.square(denominators))
    )
    errors = np.sqrt(np.maximum(squares, 0.0) * clusters / (clusters - 1)) / totals
    flat = errors < 1e-6 * error
    if clusters < MIN_STUDENTISED_CLUSTERS or flat.mean() > (1 - confidence) / 10:
        return student_interval(value, error, clusters, confidence)
    studentised = (ratios - value)[~flat] / errors[~flat]
    low_t, high_t = np.quantile(studentised, [1 - upper, upper])
    return value - float(high_t) * error, value - float(low_t) * error, error, "bootstrap-t"


def clustered_standard_error(numerators: Float64, denominators: Float64) -> float:
    """Standard error of sum(numerators) / sum(denominators), linearised (Cochran 1977, section 6.3)."""
    clusters = numerators.size
    ratio = numerators.sum() / denominators.sum()
    residuals = numerators - ratio * denominators
    scale = float(np.abs(numerators).sum())
    if np.abs(residuals).max() <= 1e-12 * scale:
        return 0.0
    spread = np.square(residuals).sum() * clusters / (clusters - 1)
    return float(np.sqrt(spread) / denominators.sum())


def bca_interval(
    value: float, drawn: Float64, left_out: Float64, confidence: float
) -> tuple[float, float, float, str]:
    """Bias-corrected and accelerated interval (Efron 1987) with levels widened for few clusters.

    drawn: float64 [R], the statistic of each resample. left_out: float64 [clusters], without each cluster.
    The levels are those of Student's t stretched by sqrt(n / (n - 1)) (Hesterberg 2015, "expanded
    percentile").
    """
    clusters = left_out.size
    error = resampled_standard_error(drawn, clusters)
    if error == 0:
        return value, value, 0.0, "no spread"
    below = float((drawn < value).mean() + 0.5 * (drawn == value).mean())
    bias = NORMAL.inv_cdf(min(max(below, 1 / drawn.size), 1 - 1 / drawn.size))
    deviations = left_out.mean() - left_out
    spread = float(np.square(deviations).sum()) ** 1.5
    acceleration = float((deviations**3).sum()) / (6 * spread) if spread > 0 else 0.0
    reach = math.sqrt(clusters / (clusters - 1)) * student_quantile((1 + confidence) / 2, clusters - 1)
    levels = []
    for z in (-reach, reach):
        shrink = 1 - acceleration * (bias + z)
        levels.append(NORMAL.cdf(bias + (bias + z) / shrink) if shrink > 0 else (0.0 if z < 0 else 1.0))
    low, high = np.quantile(drawn, levels)
    return min(float(low), value), max(float(high), value), error, "BCa"


def student_interval(
    value: float, error: float, clusters: int, confidence: float
) -> tuple[float, float, float, str]:
    """value -+ t * error, with clusters - 1 degrees of freedom."""
    t = student_quantile((1 + confidence) / 2, clusters - 1)
    return value - t * error, value + t * error, error, "Student" if error > 0 else "no spread"


def resampled_standard_error(drawn: Float64, clusters: int) -> float:
    """The spread of `drawn`, float64 [R], the statistic of each resample, corrected for few clusters."""
    if drawn.min() == drawn.max():
        return 0.0
    return float(drawn.std() * math.sqrt(clusters / (clusters - 1)))


def _tail_note(aggregate: Aggregate, positions: int) -> str | None:
    if isinstance(aggregate, Extreme):
        return "an extreme is not bounded by a sample: the interval describes the observed positions only"
    if isinstance(aggregate, Quantile):
        beyond = positions * min(aggregate.probability, 1 - aggregate.probability)
        if round(beyond, 6) < MIN_BEYOND:
            return (
                f"only {beyond:.1f} of {positions} positions lie beyond this quantile: the interval "
                "describes the observed positions only"
            )
    return None


def _check_confidence(confidence: float) -> None:
    if not 0.5 <= confidence < 1:
        raise ValueError(f"confidence must lie in [0.5, 1), not {confidence}")
