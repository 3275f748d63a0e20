"""What a series of runs shows: sparklines, and the first run after which a figure had shifted.

The rule is simple on purpose, so that it can be checked by eye: a shift is a split of the series where the
medians before and after differ by more than four times the runs' own scatter, and by more than 2 %. Scatter
is how much runs differ from the run before, without the largest quarter of these differences, which the
shifts themselves make. Of series that only scatter (simulated, normal) two in a hundred are said to shift
with 5 or 6 runs, fewer than one in a hundred from 8 runs on.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

LEVELS = "▁▂▃▄▅▆▇█"
ASCII_LEVELS = "_.-=+*#@"
LEAST_BEFORE, LEAST_AFTER = 3, 2
SCATTERS = 4.0
LEAST_SHARE = 0.02
LEAST_SPAN = 0.1
TO_SIGMA = 1.3
"""Mean of the smaller three quarters of differences between neighbours to standard deviation, if normal."""


@dataclass(frozen=True, slots=True)
class Shift:
    """index: the first run of the new level. before, after: medians of the levels."""

    index: int
    before: float
    after: float

    @property
    def share(self) -> float | None:
        """The change as a share of what was; None from zero."""
        return (self.after - self.before) / abs(self.before) if self.before else None


def sparkline(values: Sequence[float | None], *, ascii_only: bool = False) -> str:
    """One character for each run, between the smallest and the largest value; a space where there is none.

    The scale spans at least LEAST_SPAN of the median, so that mere scatter looks like it.
    """
    levels = ASCII_LEVELS if ascii_only else LEVELS
    known = [value for value in values if value is not None]
    if not known:
        return " " * len(values)
    low, high = min(known), max(known)
    span = max(high - low, LEAST_SPAN * abs(statistics.median(known)))
    low -= (span - (high - low)) / 2
    scale = (len(levels) - 1) / span if span else 0.0
    heights = [None if value is None else round((value - low) * scale + 1e-6) for value in values]
    return "".join(" " if height is None else levels[height] for height in heights)


def shifts(values: Sequence[float]) -> list[Shift]:
    """All shifts of a series, in order.

    A split needs LEAST_BEFORE runs before and LEAST_AFTER after it. Of all splits the one that lowers the sum
    of absolute deviations from the medians most is tried (one outlier hardly moves a median); where it is a
    shift, both parts are searched again.
    """
    found = _search(list(values), 0, _scatter(values))
    levels = [
        statistics.median(values[begin:end])
        for begin, end in pairwise([0, *found, len(values)])
        if end > begin
    ]
    return [Shift(index, *pair) for index, pair in zip(found, pairwise(levels), strict=True)]


def _search(values: list[float], offset: int, scatter: float) -> list[int]:
    """The first run of each new level, in order."""
    split = _best_split(values)
    if split is None:
        return []
    before, after = values[:split], values[split:]
    level = statistics.median(before)
    apart = abs(statistics.median(after) - level)
    if apart <= SCATTERS * scatter or apart <= LEAST_SHARE * abs(level):
        return []
    return [*_search(before, offset, scatter), offset + split, *_search(after, offset + split, scatter)]


def _best_split(values: list[float]) -> int | None:
    splits = range(LEAST_BEFORE, len(values) - LEAST_AFTER + 1)
    costs = {split: _cost(values[:split]) + _cost(values[split:]) for split in splits}
    return min(costs, key=lambda split: costs[split]) if costs else None


def _cost(values: list[float]) -> float:
    middle = statistics.median(values)
    return sum(abs(value - middle) for value in values)


def _scatter(values: Sequence[float]) -> float:
    """Standard deviation of the runs around whatever level they have."""
    steps = sorted(abs(after - before) for before, after in pairwise(values))
    kept = steps[: len(steps) - max(1, len(steps) // 4)]
    return TO_SIGMA * sum(kept) / len(kept) if kept else 0.0
