"""The table at the end of a run, as lines of text with markup; knows nothing of terminals.

Words and symbols carry the meaning, colour only repeats it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pytest_quantguard.paths import with_short_paths
from pytest_quantguard.report.generation import generation_lines
from pytest_quantguard.report.headline import failed_groups, label, verdict_line
from pytest_quantguard.report.speed import speed_lines
from pytest_quantguard.report.visible import visible
from pytest_quantguard.results import RELATIVE, CheckResult, RunResult

NARROWEST = 60
WIDEST = 120
SHOWN_GROUPS = 8
LONGEST_TEXT = 600
MARKS = {"failed": "!", "error": "?", "warned": "*", "skipped": "-", "passed": " "}
LEGEND = {
    "!": "failed",
    "?": "could not run",
    "*": "warning",
    "~": "interval reaches the bound",
    "-": "not run",
}

Column = tuple[str, int]
"""Phase and batch size."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line, and how pytest's terminal writer should show it."""

    text: str
    markup: Mapping[str, bool] = field(default_factory=dict)


def render(
    result: RunResult, *, width: int = 80, verbosity: int = 0, report: str | None = None
) -> list[Line]:
    """Verdict first, then what failed and what it may be, then where the report is, then the tables.

    verbosity: below 0 without tables, above 0 with the grounds of every verdict that held. report: its path.
    """
    width = max(NARROWEST, min(width, WIDEST))
    colour = {"passed": "green", "failed": "red", "incomplete": "yellow"}[result.verdict]
    first, *rest = textwrap.wrap(visible(verdict_line(result)), width, subsequent_indent="  ")
    lines = [Line(line, {colour: True, "bold": True}) for line in (first, *rest)]
    groups = failed_groups(result)
    for group in groups[:SHOWN_GROUPS]:
        lines += _wrapped(f"{group.outcome:<10} {group.sentence}", width, red=True)
    if len(groups) > SHOWN_GROUPS:
        lines += _wrapped(f"{'':<10} and {len(groups) - SHOWN_GROUPS} more, see the report", width, red=True)
    for sentence in result.diagnosis:
        lines += _wrapped(f"diagnosis  {sentence}", width, bold=True)
    if report is not None:
        lines += _wrapped(f"report     {report}", width, bold=True)
    if verbosity < 0:
        return lines
    if result.candidate is not None:
        lines += _wrapped(f"candidate  {result.candidate.title}", width)
    lines += _wrapped(f"baseline   {result.baseline_path}{_baseline_size(result)}", width)
    lines += _tables(result, width)
    if result.generation is not None:
        lines += [*map(Line, generation_lines(result.generation, width)), Line("")]
    lines += [Line(line) for line in speed_lines(result.checks, width)]
    if verbosity > 0:
        held = [check for check in result.checks if check.passed and check.message]
        lines += [line for check in held for line in _wrapped(f"{check.id}: {check.message}", width)]
    lines += [line for note in result.notes for line in _wrapped(f"note       {note}", width)]
    return [line for line, after in pairwise([*lines, Line("")]) if line.text or after.text]


def _baseline_size(result: RunResult) -> str:
    suite = (result.baseline or {}).get("suite")
    if not suite:
        return ""
    return f" ({suite['prompt_count']} prompts x {suite['score_tokens']} positions, K = {suite['width']})"


def _tables(result: RunResult, width: int) -> list[Line]:
    """One table with all columns if it fits, else one per phase, else as many columns as fit."""
    rows = _rows(result.checks)
    columns = _columns(result.checks)
    if all(cell.outcome == "error" for cells in rows.values() for cell in cells.values()):
        return []
    labels = max(map(len, rows)) + 2
    bounds = max((len(_bound(cells.values())) for cells in rows.values()), default=0)
    cell_width = max(9, *(len(_cell(cell)) + 1 for cells in rows.values() for cell in cells.values()))
    lines: list[Line] = []
    for group in _groups(columns, (width - labels - bounds - 2) // cell_width):
        lines += [Line(""), *_table(rows, group, labels, cell_width)]
    used = {_mark(check) for check in result.checks}
    legend = [f"{mark} {text}" for mark, text in LEGEND.items() if mark in used]
    if legend:
        lines.append(Line("  " + ", ".join(legend)))
    return [*lines, Line("")]


def _rows(checks: Iterable[CheckResult]) -> dict[str, dict[Column, CheckResult]]:
    rows: dict[str, dict[Column, CheckResult]] = {}
    for check in checks:
        if check.phase is not None and check.batch_size is not None:
            rows.setdefault(label(check), {})[(check.phase, check.batch_size)] = check
    return rows


def _columns(checks: Iterable[CheckResult]) -> list[Column]:
    found = {
        (check.phase, check.batch_size)
        for check in checks
        if check.phase is not None and check.batch_size is not None
    }
    return sorted(found, key=lambda column: (column[0] != "prefill", column[1]))


def _groups(columns: Sequence[Column], fit: int) -> list[list[Column]]:
    if len(columns) <= fit:
        return [list(columns)]
    groups = []
    for phase in dict.fromkeys(phase for phase, _ in columns):
        of_phase = [column for column in columns if column[0] == phase]
        step = max(1, fit)
        groups += [of_phase[start : start + step] for start in range(0, len(of_phase), step)]
    return groups


def _table(
    rows: Mapping[str, Mapping[Column, CheckResult]], columns: Sequence[Column], labels: int, cell_width: int
) -> list[Line]:
    phases, sizes = " " * labels, " " * labels
    previous = None
    for phase, batch_size in columns:
        phases += (phase if phase != previous else "").rjust(cell_width)
        sizes += f"bs{batch_size} ".rjust(cell_width)
        previous = phase
    lines = [Line(phases.rstrip()), Line(sizes.rstrip() + "   bound")]
    for name, cells in rows.items():
        shown = [cells.get(column) for column in columns]
        if not any(shown):
            continue
        text = f"  {name}".ljust(labels) + "".join(_cell(cell).rjust(cell_width) for cell in shown)
        bad = any(cell is not None and cell.outcome in ("failed", "error") for cell in shown)
        bound = _bound(cell for cell in shown if cell is not None)
        lines.append(Line(f"{text}  {bound}".rstrip(), {"red": True} if bad else {}))
    return lines


def _mark(check: CheckResult) -> str:
    return "~" if check.outcome == "passed" and check.near_bound else MARKS[check.outcome]


def _cell(check: CheckResult | None) -> str:
    """The value with its mark; a word where there is no value."""
    if check is None:
        return ""
    if check.value is None:
        return {"passed": "ok ", "failed": "FAIL!", "error": "ERROR?", "skipped": "-"}.get(
            check.outcome, check.outcome
        )
    if check.unit == RELATIVE:
        return f"{check.value * 100:+.1f}%{_mark(check)}"
    value = f"{check.value:.0f}" if check.kind == "speed" else _short(check.value)
    return f"{value}{_mark(check)}"


def _short(value: float) -> str:
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}" if abs(value) < 10 else f"{value:.3g}"


def _bound(checks: Iterable[CheckResult | None]) -> str:
    """The row's bound; the range of them where cells differ."""
    known = [check for check in checks if check is not None and check.bound is not None]
    limits = sorted({check.bound for check in known if check.bound is not None})
    if not limits:
        return ""
    side = "<=" if known[0].bound_side == "max" else ">="
    if known[0].unit == RELATIVE:
        return f"{side} {limits[-1] * 100:+.3g}%"
    return f"{side} {limits[0]:g}" if len(limits) == 1 else f"{side} {limits[0]:.3g}..{limits[-1]:.3g}"


def _wrapped(text: str, width: int, **markup: bool) -> list[Line]:
    """Foreign text in it can neither command the terminal nor reach beyond the width."""
    return [
        Line(line, markup)
        for line in textwrap.wrap(
            visible(with_short_paths(text), longest=LONGEST_TEXT),
            width,
            initial_indent="  ",
            subsequent_indent=" " * 13,
            break_on_hyphens=False,
        )
    ]
