"""The table of what was timed, as lines of text: a row per scenario and level. Knows nothing of terminals."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_quantguard.results import CheckResult, SpeedResult, SpeedVerdict

TITLES = (
    "speed",
    "level",
    "time",
    "accepted",
    "reference",
    "record",
    "out tok/s",
    "TTFT p99",
    "ITL p99",
    "scatter",
)
WORDS = {"failed": "!", "warned": "*", "error": "?", "skipped": "-", "passed": " "}


def speed_lines(checks: Sequence[CheckResult], width: int) -> list[str]:
    """One row per scenario and level; narrower terminals lose the figures on the right.

    Columns in which nothing stands are left out.
    """
    timed = [(check, check.speed) for check in checks if check.speed is not None]
    if not timed:
        return []
    found = [_row(speed) for _, speed in timed]
    known = [column for column in range(len(TITLES)) if any(row[column] for row in found)]
    rows = [[row[column] for column in known] for row in (TITLES, *found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shown = _fitting(widths, width)
    lines = [""]
    for row, check in zip(rows, (None, *(check for check, _ in timed)), strict=True):
        cells = [row[0].ljust(widths[0]), *(row[column].rjust(widths[column]) for column in shown if column)]
        mark = "" if check is None else f"  {WORDS[check.outcome]}"
        lines.append(f"  {'  '.join(cells)}{mark}".rstrip())
    return [*lines, ""]


def _fitting(widths: Sequence[int], width: int) -> list[int]:
    """The columns that fit, from the left."""
    used, columns = 4, []
    for column, needed in enumerate(widths):
        used += needed + 2
        if used > width:
            break
        columns.append(column)
    return columns


def _row(speed: SpeedResult) -> tuple[str, ...]:
    figures, unit = speed.figures, "s" if speed.compared == "duration" else "ms"
    time = figures.get(speed.compared)
    return (
        speed.scenario,
        speed.shown_level,
        "failed" if time is None else f"{time:.3g} {unit}",
        _against(speed, "accepted"),
        _against(speed, "reference"),
        _record(_verdict(speed, "accepted")),
        _figure(figures.get("output_throughput"), ""),
        _figure(figures.get("p99_ttft_ms"), " ms"),
        _figure(figures.get("p99_itl_ms"), " ms"),
        f"{speed.scatter:.1%}",
    )


def _verdict(speed: SpeedResult, what: str) -> SpeedVerdict | None:
    return next((verdict for verdict in speed.verdicts if verdict.against == what), None)


def _record(verdict: SpeedVerdict | None) -> str:
    """Number of runs that the record holds, and their standard deviation."""
    if verdict is None or verdict.runs is None:
        return ""
    return "1 run" if verdict.spread is None else f"{verdict.runs} runs, {verdict.spread:.1%}"


def _against(speed: SpeedResult, what: str) -> str:
    verdict = _verdict(speed, what)
    if verdict is None:
        return ""
    if verdict.value is None:
        return verdict.status
    change = f"{verdict.value - 1:+.1%}" if what == "accepted" else f"{verdict.value:.2f}x"
    return f"{change} {verdict.status}"


def _figure(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.3g}{unit}" if value < 1000 else f"{value:.0f}{unit}"
