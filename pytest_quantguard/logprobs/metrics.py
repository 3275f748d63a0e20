"""The named metrics of configs, results and tables: which per-position array each aggregates, and how."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from pytest_quantguard.errors import InvalidAnswerError
from pytest_quantguard.logprobs.divergence import Divergence, Float64
from pytest_quantguard.stats.aggregates import Aggregate, Extreme, Mean, Quantile, RootMeanSquare, Share
from pytest_quantguard.stats.bootstrap import CONFIDENCE, RESAMPLES, Column, Interval, bootstrap_intervals
from pytest_quantguard.stats.paired import PairedChange, paired_change

Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One number about a candidate.

    better: "lower" metrics take an upper bound (`max`), "higher" metrics a lower one (`min`).
    unit: "nats", "share", "probability" or "1" (dimensionless).
    array: the field of Divergence that is aggregated.
    aggregate: how.
    limits: the values that it can take.
    """

    name: str
    better: Better
    unit: str
    description: str
    array: str
    aggregate: Aggregate
    limits: tuple[float, float]

    def values(self, divergence: Divergence) -> Float64:
        """float64 [T]: the array that is aggregated, NaN where it is unknown."""
        values: Float64 = getattr(divergence, self.array).astype(np.float64, copy=False)
        return values

    def column(self, divergence: Divergence) -> Column:
        """The values and their aggregate, for intervals."""
        return Column(self.values(divergence), self.aggregate, self.limits)

    def known(self, divergence: Divergence) -> int:
        """Number of positions that have a value."""
        return int(np.count_nonzero(~np.isnan(self.values(divergence))))

    def of(self, divergence: Divergence) -> float:
        """The metric over the positions that have a value; InvalidAnswerError if none has."""
        values = self.values(divergence)
        known = values[~np.isnan(values)]
        if known.size == 0:
            raise InvalidAnswerError(f"{self.name}: none of {values.size} positions has a value to aggregate")
        return self.aggregate.evaluate(known)


def metric_intervals(
    divergence: Divergence,
    names: Iterable[str] | None = None,
    *,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> dict[str, Interval | None]:
    """Confidence intervals, by prompt, of the named metrics (default: all); None for a single prompt."""
    columns = {name: METRICS[name].column(divergence) for name in (METRICS if names is None else names)}
    return bootstrap_intervals(
        columns, divergence.prompt, resamples=resamples, confidence=confidence, seed=seed
    )


def metric_change(
    accepted: Divergence,
    candidate: Divergence,
    name: str,
    *,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> PairedChange:
    """How the metric `name` against one baseline moved from `accepted` to `candidate`, paired by position.

    Both are comparisons with the same baseline over the same positions; InvalidAnswerError otherwise, or
    where no position has a value on both sides.
    """
    same = accepted.positions == candidate.positions and bool(
        (accepted.prompt == candidate.prompt).all() and (accepted.position == candidate.position).all()
    )
    if not same:
        raise InvalidAnswerError(
            f"the accepted run ({accepted.positions} positions) and the candidate ({candidate.positions}) do "
            "not cover the same positions of the same prompts"
        )
    before, after = METRICS[name].column(accepted), METRICS[name].column(candidate)
    if bool((np.isnan(before.values) | np.isnan(after.values)).all()):
        raise InvalidAnswerError(
            f"{name}: no position has a value in both the accepted run and the candidate"
        )
    return paired_change(
        before, after, accepted.prompt, resamples=resamples, confidence=confidence, seed=seed
    )


_UPPER_TAIL: tuple[tuple[str, Aggregate], ...] = (
    ("mean", Mean()),
    ("median", Quantile(0.5, "median")),
    ("p90", Quantile(0.90, "p90")),
    ("p95", Quantile(0.95, "p95")),
    ("p99", Quantile(0.99, "p99")),
    ("p999", Quantile(0.999, "p99.9")),
    ("max", Extreme("max")),
)
_LOWER_TAIL: tuple[tuple[str, Aggregate], ...] = (
    ("mean", Mean()),
    ("median", Quantile(0.5, "median")),
    ("p10", Quantile(0.10, "p10")),
    ("p05", Quantile(0.05, "p5")),
    ("p01", Quantile(0.01, "p1")),
    ("p001", Quantile(0.001, "p0.1")),
    ("min", Extreme("min")),
)


def _limits(name: str, array: str) -> tuple[float, float]:
    if array == "log_probability_drop":
        return -math.inf, math.inf
    if name == "probability_shift_mean":
        return -1.0, 1.0
    if array == "js":
        return 0.0, math.log(2)
    return 0.0, math.inf if array.startswith("kl") else 1.0


def _build() -> dict[str, Metric]:
    metrics: list[Metric] = []

    def add(name: str, better: Better, unit: str, description: str, array: str, aggregate: Aggregate) -> None:
        metrics.append(Metric(name, better, unit, description, array, aggregate, _limits(name, array)))

    def family(array: str, better: Better, unit: str, description: str) -> None:
        for suffix, aggregate in _UPPER_TAIL if better == "lower" else _LOWER_TAIL:
            add(f"{array}_{suffix}", better, unit, f"{description}, {aggregate.label}", array, aggregate)

    family("kl", "lower", "nats", "lower bound of KL(baseline || candidate)")
    family("kl_uniform", "lower", "nats", "KL with the unseen mass spread evenly (the published recipe)")
    family("js", "lower", "nats", "lower bound of the Jensen-Shannon divergence")
    family("cosine", "higher", "1", "cosine of the probability vectors over both top-K")
    add("agreement", "higher", "share", "positions with the same most likely token", "agreement", Share())
    add(
        "confident_flips",
        "lower",
        "share",
        "positions where the baseline's most likely token led by more than 0.2 and the candidate has another",
        "confident_flip",
        Share(),
    )
    shift = "change of the reference token's probability"
    add("probability_shift_mean", "higher", "probability", f"{shift}, mean", "probability_shift", Mean())
    add(
        "probability_shift_rms",
        "lower",
        "probability",
        f"{shift}, RMS",
        "probability_shift",
        RootMeanSquare(),
    )
    add(
        "log_perplexity_ratio",
        "lower",
        "nats",
        "ln(perplexity of the candidate / perplexity of the baseline) on the reference tokens",
        "log_probability_drop",
        Mean(),
    )
    for side in ("baseline", "candidate"):
        array, text = f"captured_mass_{side}", f"probability inside the {side}'s top-K"
        add(f"{array}_mean", "higher", "probability", f"{text}, mean", array, Mean())
        add(f"{array}_min", "higher", "probability", f"{text}, min", array, Extreme("min"))
    missing = "the baseline's probability on ids outside the candidate's top-K"
    add("missing_mass_mean", "lower", "probability", f"{missing}, mean", "missing_mass", Mean())
    add("missing_mass_max", "lower", "probability", f"{missing}, max", "missing_mass", Extreme("max"))
    return {metric.name: metric for metric in metrics}


METRICS: Mapping[str, Metric] = MappingProxyType(_build())
"""Every aggregate by its name, in the order of tables."""
