"""Verdicts about time: slower than the accepted record, fast enough against the reference, composite score.

Pure functions over the durations of rounds. A change is judged by the interval of a ratio of medians, and "no
change" is said as plainly as "regressed"; what the rounds cannot tell is called inconclusive and never
passes for unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Change = Literal["improved", "unchanged", "regressed", "inconclusive"]
Reached = Literal["reached", "missed", "inconclusive"]

CONFIDENCE = 0.95
RESAMPLES = 4000
MIN_ROUNDS = 5
"""With fewer rounds even the whole range covers their median in less than 90 of 100 cases (1 - 2 / 2^n)."""
MIN_NOISE = 0.01
"""No machine repeats itself better than this from day to day."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of one set of rounds over the median of another, with a 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, slots=True)
class SlowdownVerdict:
    """Against the accepted record. ratio: measured over accepted, above 1 is slower.

    noise: what two sets of the record's own rounds differ by, as a share. reasons: why nothing could be said.
    """

    status: Change
    ratio: Ratio
    limit: float
    noise: float
    reasons: tuple[str, ...]
    sentence: str


@dataclass(frozen=True, slots=True)
class SpeedupVerdict:
    """Against the reference. ratio: the reference's time over the candidate's, above 1 is faster."""

    status: Reached
    ratio: Ratio
    minimum: float
    reasons: tuple[str, ...]
    sentence: str


def ratio_of_medians(
    over: Sequence[float], under: Sequence[float], *, paired: bool = False, seed: int = 0
) -> Ratio:
    """median(over) / median(under) with a percentile bootstrap over rounds (Efron and Tibshirani 1993,
    section 13.3).

    paired: round i of both was measured side by side, so that both are drawn together and what slowed both
    cancels. Raises ValueError for empty input, times that are not positive, or pairs of unequal number.
    """
    top, bottom = _times(over), _times(under)
    if paired and top.size != bottom.size:
        raise ValueError(f"{top.size} rounds cannot be paired with {bottom.size}")
    rng = np.random.default_rng([seed, top.size, bottom.size])
    picks = rng.integers(0, top.size, (RESAMPLES, top.size))
    others = picks if paired else rng.integers(0, bottom.size, (RESAMPLES, bottom.size))
    drawn = np.median(top[picks], axis=1) / np.median(bottom[others], axis=1)
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Ratio(float(np.median(top) / np.median(bottom)), float(low), float(high))


def median_interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the median over rounds."""
    known = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng([seed, known.size])
    medians = np.median(known[rng.integers(0, known.size, (RESAMPLES, known.size))], axis=1)
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def noise_band(rounds: Sequence[float], *, seed: int = 0) -> float:
    """How far the ratio of two medians strays from 1 when both come from these rounds, as a share.

    The 95th percentile of max(ratio, 1/ratio) - 1 over pairs of resamples; at least `MIN_NOISE`.
    """
    times = _times(rounds)
    rng = np.random.default_rng([seed, times.size])
    one, other = (
        np.median(times[rng.integers(0, times.size, (RESAMPLES, times.size))], axis=1) for _ in range(2)
    )
    return max(MIN_NOISE, float(np.quantile(np.maximum(one / other, other / one) - 1, CONFIDENCE)))


def scatter(rounds: Sequence[float]) -> float:
    """Standard deviation of the rounds over their mean; 0 for a single round."""
    times = _times(rounds)
    return float(times.std(ddof=1) / times.mean()) if times.size > 1 else 0.0


def decide_slowdown(
    *,
    accepted: Sequence[float],
    measured: Sequence[float],
    max_slowdown: float,
    max_scatter: float,
    disturbances: Sequence[str] = (),
) -> SlowdownVerdict:
    """Hold the measured rounds (seconds) against the accepted ones.

    - regressed: the interval of the ratio lies wholly beyond both 1 + max_slowdown and the noise band;
    - improved: it lies wholly below the noise band;
    - unchanged: it lies wholly within 1 + max_slowdown;
    - inconclusive: none of these, or too few rounds, rounds that scatter more than `max_scatter` (a share),
      or `disturbances` (sentences) during them.

    Raises ValueError for empty or impossible input.
    """
    if max_slowdown < 0 or max_scatter <= 0:
        raise ValueError(
            f"max_slowdown {max_slowdown} and max_scatter {max_scatter} must not be negative or 0"
        )
    ratio, noise = ratio_of_medians(measured, accepted), noise_band(accepted)
    limit = 1 + max_slowdown
    reasons = [
        *_doubts("the accepted record", accepted, max_scatter),
        *_doubts("this run", measured, max_scatter),
        *disturbances,
    ]
    status: Change
    if reasons:
        status = "inconclusive"
    elif ratio.high < 1 - noise:
        status = "improved"
    elif ratio.high <= limit:
        status = "unchanged"
    elif ratio.low > 1 + max(max_slowdown, noise):
        status = "regressed"
    else:
        status = "inconclusive"
        reasons.append(_between(ratio, limit, noise))
    return SlowdownVerdict(status, ratio, limit, noise, tuple(reasons), _told(status, ratio, limit, noise))


def decide_speedup(
    *,
    reference: Sequence[float],
    measured: Sequence[float],
    minimum: float,
    max_scatter: float,
    paired: bool,
    disturbances: Sequence[str] = (),
) -> SpeedupVerdict:
    """Hold the reference's time over the candidate's against `minimum`.

    missed: the whole interval lies below it; reached: the whole interval lies at or above it; otherwise
    inconclusive. paired: the rounds were interleaved; then only the ratio of each pair must not scatter.
    """
    if not minimum > 0:
        raise ValueError(f"a speed-up of {minimum} cannot be asked for")
    ratio = ratio_of_medians(reference, measured, paired=paired)
    if paired:
        pairs = (_times(reference) / _times(measured)).tolist()
        reasons = [*_doubts("the ratio of the two", pairs, max_scatter), *disturbances]
    else:
        reasons = [
            *_doubts("the reference", reference, max_scatter),
            *_doubts("this run", measured, max_scatter),
            *disturbances,
        ]
    status: Reached
    if reasons:
        status = "inconclusive"
    elif ratio.high < minimum:
        status = "missed"
    elif ratio.low >= minimum:
        status = "reached"
    else:
        status = "inconclusive"
        reasons.append(f"the interval {ratio.low:.3f} to {ratio.high:.3f} contains the bound {minimum:g}")
    words = {
        "missed": f"below the {minimum:g} that is asked for",
        "reached": f"at least the {minimum:g} that is asked for",
        "inconclusive": f"inconclusive against the {minimum:g} that is asked for",
    }
    sentence = f"{ratio} times as fast as the reference: {words[status]}"
    return SpeedupVerdict(status, ratio, minimum, tuple(reasons), sentence)


def correctness_coefficient(relative: float, steps: Sequence[tuple[float, float]]) -> float:
    """The coefficient for a task score of `relative` times the reference's.

    steps: (relative score, coefficient), by rising score; linear between them, the first coefficient below
    the first, the last from the last on. Two entries of one score are a step: from there on the second holds.
    Raises ValueError for an empty or unordered table.
    """
    scores = [score for score, _ in steps]
    if not steps or scores != sorted(scores):
        raise ValueError("the table of coefficients must hold entries of rising score")
    if relative < scores[0]:
        return steps[0][1]
    for (low, before), (high, after) in pairwise(steps):
        if low <= relative < high:
            return before + (after - before) * (relative - low) / (high - low)
    return steps[-1][1]


def composite_score(
    speedups: Mapping[str, float], weights: Mapping[str, float], coefficient: float = 1.0
) -> float:
    """coefficient x sum of weight x speed-up over the levels.

    speedups: level -> the reference's duration over the candidate's. Raises ValueError where a weighted level
    was not measured or the weights do not sum to 1.
    """
    missing = [level for level in weights if level not in speedups]
    if missing:
        raise ValueError(f"no speed-up at level {', '.join(missing)}")
    if abs(sum(weights.values()) - 1) > 1e-6:
        raise ValueError(f"the weights sum to {sum(weights.values()):g}, not to 1")
    return coefficient * sum(weight * speedups[level] for level, weight in weights.items())


def _times(rounds: Sequence[float]) -> Float64:
    times = np.asarray(rounds, dtype=np.float64)
    if times.ndim != 1 or times.size == 0 or not np.isfinite(times).all() or (times <= 0).any():
        raise ValueError("rounds must be a list of positive, finite times")
    return times


def _doubts(whose: str, rounds: Sequence[float], max_scatter: float) -> list[str]:
    if len(rounds) < MIN_ROUNDS:
        return [f"{whose} has {len(rounds)} rounds; {MIN_ROUNDS} are needed for an interval"]
    found = scatter(rounds)
    if found > max_scatter:
        return [f"the rounds of {whose} scatter by {found:.1%}; at most {max_scatter:.0%} is allowed"]
    return []


def _between(ratio: Ratio, limit: float, noise: float) -> str:
    if ratio.low > limit:
        return f"the interval begins within the noise of the record's own rounds ({noise:.1%})"
    return f"the interval {ratio.low:.3f} to {ratio.high:.3f} contains the bound {limit:.3f}"


def _told(status: Change, ratio: Ratio, limit: float, noise: float) -> str:
    words = {
        "regressed": f"regressed: takes {ratio} times as long as accepted, wholly beyond {limit:.3f}",
        "improved": f"improved: takes {ratio} times as long as accepted",
        "unchanged": f"no slowdown: takes {ratio} times as long as accepted, wholly within {limit:.3f}",
        "inconclusive": f"inconclusive: takes {ratio} times as long as accepted; {limit:.3f} is allowed",
    }
    return f"{words[status]}; noise of the record {noise:.1%}"
