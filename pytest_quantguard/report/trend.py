"""What a series of runs shows: sparklines, and the first run after which a figure had shifted.

The rule is simple on purpose, so that it can be checked by eye: a shift is a split of the series where the
medians before and after differ by more than four times the runs' own scatter, and by more than 2 %. Of series
that only scatter (normally, 6 to 40 runs) fewer than one in a hundred is said to shift.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEVELS = "▁▂▃▄▅▆▇█"
ASCII_LEVELS = "_.-=+*#@"
LEAST_BEFORE, LEAST_AFTER = 3, 2
SCATTERS = 4.0
LEAST_SHARE = 0.02
TO_SIGMA = 1.2533
"""Mean absolute deviation to standard deviation, for normal scatter."""


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
    """One character for each run, between the smallest and the largest value; a space where there is none."""
    levels = ASCII_LEVELS if ascii_only else LEVELS
    known = [value for value in values if value is not None]
    if not known:
        return " " * len(values)
    low, high = min(known), max(known)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else levels[round((value - low) * scale)] for value in values)


def shifts(values: Sequence[float]) -> list[Shift]:
    """All shifts of a series, in order.

    A split needs LEAST_BEFORE runs before and LEAST_AFTER after it. Of all splits the one that lowers the sum
    of absolute deviations from the medians most is tried (one outlier hardly moves a median); where it is a
    shift, both parts are searched again.
    """
    found = _search(list(values), 0)
    return sorted(found, key=lambda shift: shift.index)


def _search(values: list[float], offset: int) -> list[Shift]:
    split = _best_split(values)
    if split is None:
        return []
    before, after = values[:split], values[split:]
    levels = statistics.median(before), statistics.median(after)
    scatter = _scatter([*_off(before), *_off(after)])
    apart = abs(levels[1] - levels[0])
    if apart <= SCATTERS * scatter or apart <= LEAST_SHARE * abs(levels[0]):
        return []
    return [
        *_search(before, offset),
        Shift(offset + split, *levels),
        *_search(after, offset + split),
    ]


def _best_split(values: list[float]) -> int | None:
    splits = range(LEAST_BEFORE, len(values) - LEAST_AFTER + 1)
    costs = {split: _cost(values[:split]) + _cost(values[split:]) for split in splits}
    return min(costs, key=lambda split: costs[split]) if costs else None


def _cost(values: list[float]) -> float:
    return sum(map(abs, _off(values)))


def _off(values: list[float]) -> list[float]:
    middle = statistics.median(values)
    return [value - middle for value in values]


def _scatter(deviations: list[float]) -> float:
    """Standard deviation around two fitted levels."""
    return TO_SIGMA * sum(map(abs, deviations)) / (len(deviations) - 2)
