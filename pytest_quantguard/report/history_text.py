"""A history as text: the last runs, sparklines with shifts, the experiment log; and the same for machines."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_quantguard.report.headline import figure
from pytest_quantguard.report.history import HistoryEntry, better, short_commit
from pytest_quantguard.report.trend import Shift, shifts, sparkline
from pytest_quantguard.report.visible import visible

NARROWEST, WIDEST = 60, 120
SHOWN_RUNS = 10


@dataclass(frozen=True, slots=True)
class Trend:
    """One figure over the runs that scored the same texts. values: None where a run did not measure it.

    index: of the first run of `values` among all runs that were read.
    """

    name: str
    values: tuple[float | None, ...]
    index: int

    @property
    def known(self) -> list[tuple[int, float]]:
        """Number of the run and value, where there is one."""
        return [(self.index + at, value) for at, value in enumerate(self.values) if value is not None]

    def shifts(self) -> list[tuple[int, Shift]]:
        """Each shift with the number of the first run of its new level."""
        known = self.known
        return [(known[shift.index][0], shift) for shift in shifts([value for _, value in known])]


def with_unicode() -> bool:
    """Whether the output can show block characters."""
    try:
        "▁█".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def trends(entries: Sequence[HistoryEntry], wanted: Sequence[str] = ()) -> list[Trend]:
    """The series of the newest texts: a run that scored other texts ends it."""
    if not entries:
        return []
    start = len(entries)
    newest = next((entry.baseline for entry in reversed(entries) if entry.baseline), None)
    while start > 0 and entries[start - 1].baseline in (newest, None):
        start -= 1
    runs = entries[start:]
    names = dict.fromkeys(name for entry in runs for name in entry.figures)
    return [
        Trend(name, tuple(entry.figures.get(name) for entry in runs), start)
        for name in names
        if not wanted or any(text in name for text in wanted)
    ]


def trend_lines(
    entries: Sequence[HistoryEntry], last: int, wanted: Sequence[str], *, unicode: bool
) -> list[str]:
    """The last runs, then a line for each figure, then its shifts."""
    if not entries:
        return ["no runs"]
    width = max(NARROWEST, min(shutil.get_terminal_size().columns, WIDEST))
    lines = [*_runs(entries[-min(last, SHOWN_RUNS) :], width), ""]
    found = trends(entries, wanted)
    labels = max((len(trend.name) for trend in found), default=0)
    room = max(8, width - labels - 34)
    moved: list[str] = []
    for trend in found:
        values = trend.values[-last:]
        known = [value for value in values if value is not None]
        if not known:
            continue
        drawn = sparkline(values[-room:], ascii_only=not unicode)
        low, high, now = (figure(value) for value in (min(known), max(known), known[-1]))
        lines.append(f"{visible(trend.name):<{labels}}  {drawn}  {low} to {high}, now {now}")
        moved += list(_shift_lines(trend, entries, width))
    lines += ["", *(moved or ["no shift found"])]
    return lines


def log_lines(entries: Sequence[HistoryEntry]) -> list[str]:
    """A title and two lines for each run: what changed, what it did."""
    lines = []
    for entry in entries:
        commit = f", commit {short_commit(entry.commit)}" if entry.commit else ""
        lines.append(f"{entry.finished} {entry.name}: {entry.verdict}{commit}")
        said = [entry.changed, entry.effect] if entry.changed else [f"first run: {entry.reason}"]
        lines += [f"  {visible(line)}" for line in said]
    return lines


def as_json(entries: Sequence[HistoryEntry], last: int, wanted: Sequence[str]) -> dict[str, Any]:
    """Runs without their configs, series, shifts."""
    found = trends(entries, wanted)
    return {
        "runs": [entry.model_dump(mode="json", exclude={"config"}) for entry in entries[-last:]],
        "series": {trend.name: list(trend.values[-last:]) for trend in found},
        "shifts": [
            {
                "figure": trend.name,
                "finished": entries[index].finished,
                "commit": entries[index].commit,
                "before": shift.before,
                "after": shift.after,
                "relative": shift.share,
            }
            for trend in found
            for index, shift in trend.shifts()
        ],
    }


def _runs(entries: Sequence[HistoryEntry], width: int) -> Iterator[str]:
    """In columns; commits where any run has one, and as much of the reason as fits."""
    commits = [short_commit(entry.commit) if entry.commit else "" for entry in entries]
    wide = max(map(len, commits), default=0)
    for entry, commit in zip(entries, commits, strict=True):
        columns = [entry.finished[:16], f"{entry.verdict:<10}", *([f"{commit:<{wide}}"] if wide else [])]
        before = "  ".join([*columns, ""])
        reason = visible(entry.reason)
        if len(before) + len(reason) > width:
            reason = textwrap.shorten(reason, width - len(before), placeholder=" ...")
        yield f"{before}{reason}".rstrip()


def _shift_lines(trend: Trend, entries: Sequence[HistoryEntry], width: int) -> Iterator[str]:
    for index, shift in trend.shifts():
        entry = entries[index]
        share = "" if shift.share is None else f" ({shift.share:+.1%})"
        direction = better(trend.name)
        worse = (shift.after > shift.before) == (direction == "lower")
        judged = "" if direction is None else ", worse" if worse else ", better"
        at = f"commit {short_commit(entry.commit)}" if entry.commit else entry.finished
        text = (
            f"{visible(trend.name)} shifted from {figure(shift.before)} to "
            f"{figure(shift.after)}{share}{judged}; first in the run of {entry.finished[:16]}, {at}"
        )
        yield from textwrap.wrap(text, width, subsequent_indent="    ")
        if entry.changed:
            yield from textwrap.wrap(
                visible(entry.changed), width, initial_indent="    ", subsequent_indent="    "
            )
