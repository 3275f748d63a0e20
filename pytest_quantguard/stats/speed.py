"""Verdicts about time: slower than the accepted record, fast enough against the reference, composite score.

Pure functions over the durations of rounds. A *run* is the rounds that one start of a server took; a record
holds one run or several. A change is judged by the interval of a ratio of medians, and "no change" is said as
plainly as "regressed"; what the rounds cannot tell is called inconclusive and never passes for unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from pytest_quantguard.stats.student import student_quantile

Float64 = npt.NDArray[np.float64]
Change = Literal["improved", "unchanged", "regressed", "inconclusive"]
Reached = Literal["reached", "missed", "inconclusive"]

CONFIDENCE = 0.95
RESAMPLES = 4000
MIN_ROUNDS = 5
"""With fewer rounds even the whole range covers their median in less than 90 of 100 cases (1 - 2 / 2^n)."""
MIN_RUNS = 3
"""With fewer runs nothing is concluded from how they differ: Student's quantile of two is 12.7."""
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

    noise: what the time may differ by when nothing changed, as a share. runs: how many the record holds;
    spread: their standard deviation as a share, None of a single run. reasons: why nothing could be said.
    """

    status: Change
    ratio: Ratio
    limit: float
    noise: float
    runs: int
    spread: float | None
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
    low, high = np.quantile(_resampled_medians(known, rng), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def ratio_to_record(measured: Sequence[float], runs: Sequence[Sequence[float]], *, seed: int = 0) -> Ratio:
    """median(measured) over the geometric mean of the medians of a record's runs.

    The interval is that of the bootstrap over the rounds, each run's drawn from its own. From `MIN_RUNS` runs
    on it reaches at least as far as `run_to_run` of the logarithm, which is what one more run may differ from
    them by: the bootstrap over rounds knows nothing of that, and one over so few runs would be too narrow.
    Raises ValueError for no runs, empty ones, or times that are not positive.
    """
    top, bottoms = _times(measured), [_times(run) for run in runs]
    if not bottoms:
        raise ValueError("a record needs a run")
    rng = np.random.default_rng([seed, top.size, *(run.size for run in bottoms)])
    drawn = np.log(_resampled_medians(top, rng))
    drawn -= np.mean([np.log(_resampled_medians(run, rng)) for run in bottoms], axis=0)
    value = float(np.log(np.median(top)) - _log_medians(runs).mean())
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    if len(runs) >= MIN_RUNS:
        reach = run_to_run(runs)
        low, high = min(low, value - reach), max(high, value + reach)
    return Ratio(math.exp(value), math.exp(low), math.exp(high))


def run_to_run(runs: Sequence[Sequence[float]]) -> float:
    """How far the log median of one more run lies from the mean of these runs' in 95 % of cases.

    Student's prediction interval for one future observation, t(0.975, n - 1) x s x sqrt(1 + 1/n), where s is
    the standard deviation of the n log medians (Hahn and Meeker, Statistical Intervals, 1991, chapter 4). It
    holds for runs that are drawn alike: not where all of them come from one phase of a machine that has
    several. Raises ValueError for fewer than two runs.
    """
    deviation, count = _deviation(runs), len(runs)
    return student_quantile((1 + CONFIDENCE) / 2, count - 1) * deviation * math.sqrt(1 + 1 / count)


def run_spread(runs: Sequence[Sequence[float]]) -> float | None:
    """Standard deviation of the runs' log medians, as a share; None of a single run."""
    return math.expm1(_deviation(runs)) if len(runs) > 1 else None


def noise_band(runs: Sequence[Sequence[float]], *, seed: int = 0) -> float:
    """How far the time strays from that of the record when nothing changed, as a share.

    The 95th percentile of max(ratio, 1/ratio) - 1 over pairs of medians of as many rounds as the last run
    has, drawn from the rounds of all runs, each over its run's median; from `MIN_RUNS` runs on no less than
    `run_to_run`; at least `MIN_NOISE`.
    """
    rounds = np.concatenate([_times(run) / np.median(run) for run in runs])
    rng = np.random.default_rng([seed, rounds.size])
    one, other = (_resampled_medians(rounds, rng, len(runs[-1])) for _ in range(2))
    within = float(np.quantile(np.maximum(one / other, other / one) - 1, CONFIDENCE))
    between = math.expm1(run_to_run(runs)) if len(runs) >= MIN_RUNS else 0.0
    return max(MIN_NOISE, within, between)


def scatter(rounds: Sequence[float]) -> float:
    """Standard deviation of the rounds over their mean; 0 for a single round."""
    times = _times(rounds)
    return float(times.std(ddof=1) / times.mean()) if times.size > 1 else 0.0


def decide_slowdown(
    *,
    accepted: Sequence[Sequence[float]],
    measured: Sequence[float],
    max_slowdown: float,
    max_scatter: float,
    disturbances: Sequence[str] = (),
) -> SlowdownVerdict:
    """Hold the measured rounds (seconds) against those of the accepted runs, oldest first.

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
    ratio, noise, spread = ratio_to_record(measured, accepted), noise_band(accepted), run_spread(accepted)
    limit = 1 + max_slowdown
    reasons = [
        *(
            doubt
            for number, run in enumerate(accepted, start=1)
            for doubt in _doubts(
                f"run {number} of the accepted record" if len(accepted) > 1 else "the accepted record",
                run,
                max_scatter,
            )
        ),
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
        reasons += _between(ratio, limit, noise, accepted)
    sentence = _told(status, ratio, limit, noise, record_text(len(accepted), spread))
    return SlowdownVerdict(status, ratio, limit, noise, len(accepted), spread, tuple(reasons), sentence)


def record_text(runs: int, spread: float | None) -> str:
    """A record in words: its number of runs, and by how much they differ (`run_spread`)."""
    return "record of 1 run" if spread is None else f"record of {runs} runs, which differ by {spread:.1%}"


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


def _resampled_medians(times: Float64, rng: np.random.Generator, size: int | None = None) -> Float64:
    """Medians of `RESAMPLES` draws of `size` times (None: as many as there are) with replacement."""
    picks = rng.integers(0, times.size, (RESAMPLES, size or times.size))
    return np.median(times[picks], axis=1)


def _log_medians(runs: Sequence[Sequence[float]]) -> Float64:
    return np.log([np.median(run) for run in runs])


def _deviation(runs: Sequence[Sequence[float]]) -> float:
    """Standard deviation of the log medians of two or more runs."""
    if len(runs) < 2:
        raise ValueError("how runs differ can only be told from two or more")
    return float(_log_medians(runs).std(ddof=1))


def _doubts(whose: str, rounds: Sequence[float], max_scatter: float) -> list[str]:
    if len(rounds) < MIN_ROUNDS:
        return [f"{whose} has {len(rounds)} rounds; {MIN_ROUNDS} are needed for an interval"]
    found = scatter(rounds)
    if found > max_scatter:
        return [f"the rounds of {whose} scatter by {found:.1%}; at most {max_scatter:.0%} is allowed"]
    return []


def _between(ratio: Ratio, limit: float, noise: float, runs: Sequence[Sequence[float]]) -> list[str]:
    """Why the interval alone decides nothing."""
    if ratio.low > limit:
        return [f"the interval begins within the noise of the record ({noise:.1%})"]
    reasons = [f"the interval {ratio.low:.3f} to {ratio.high:.3f} contains the bound {limit:.3f}"]
    if len(runs) >= MIN_RUNS and (reach := math.exp(run_to_run(runs))) > limit:
        reasons.append(
            f"one more run like those of the record may take up to {reach:.3f} times as long, so that even "
            f"the same time cannot be told to be within {limit:.3f}: allow more, or hold the time against "
            "the reference (speed.min_speedup_vs_reference)"
        )
    return reasons


def _told(status: Change, ratio: Ratio, limit: float, noise: float, record: str) -> str:
    words = {
        "regressed": f"regressed: takes {ratio} times as long as accepted, wholly beyond {limit:.3f}",
        "improved": f"improved: takes {ratio} times as long as accepted",
        "unchanged": f"no slowdown: takes {ratio} times as long as accepted, wholly within {limit:.3f}",
        "inconclusive": f"inconclusive: takes {ratio} times as long as accepted; {limit:.3f} is allowed",
    }
    return f"{words[status]}; {record}; its noise {noise:.1%}"
