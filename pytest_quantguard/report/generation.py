"""Generated answers as a table of text: a row for each task, one for all. Knows nothing of terminals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pytest_quantguard.report.visible import visible
from pytest_quantguard.results import GenerationFigures, GenerationResult

Column = tuple[str, str, Callable[[GenerationFigures], str]]
"""Two lines of title, and the cell of a row."""

NOTHING = "-"


def generation_lines(result: GenerationResult, width: int) -> list[str]:
    """One table where it fits, else one of scores and one of what the answers look like."""
    asked = f"{result.overall.prompts} prompts, {result.concurrency} at a time, {result.seconds:.0f} s"
    skipped = f", {len(result.skipped)} skipped (too long)" if result.skipped else ""
    resumed = f", {result.resumed} of an interrupted run" if result.resumed else ""
    lines = ["", f"  generated answers ({asked}{skipped}{resumed})"]
    rows = {**result.tasks, "all": result.overall} if len(result.tasks) != 1 else dict(result.tasks)
    looks = _table(rows, LOOKS)
    legend = ["  n+m: m that the reference shows too"] if any("+" in line for line in looks) else []
    whole = _table(rows, (*SCORES, *LOOKS))
    if max(map(len, whole)) <= width:
        return [*lines, *whole, *legend]
    return [*lines, *_table(rows, SCORES), "", *looks, *legend]


def _table(rows: dict[str, GenerationFigures], columns: Sequence[Column]) -> list[str]:
    cells = {visible(name): [cell(figures) for _, _, cell in columns] for name, figures in rows.items()}
    labels = max(map(len, cells)) + 2
    titles = [upper for upper, _, _ in columns], [lower for _, lower, _ in columns]
    widths = [max(len(row[place]) for row in (*titles, *cells.values())) + 2 for place in range(len(columns))]
    lines = []
    for name, row in (("", titles[0]), ("", titles[1]), *cells.items()):
        padded = (text.rjust(size) for text, size in zip(row, widths, strict=True))
        lines.append(f"  {name:<{labels}}{''.join(padded)}".rstrip())
    return lines


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def _new(count: int, own: int) -> str:
    """Signs that the reference's answers do not show; those that it shows itself behind a plus."""
    return f"{count}+{own}" if own else str(count)


SCORES: tuple[Column, ...] = (
    ("", "prompts", lambda figures: str(figures.prompts)),
    ("", "score", lambda figures: f"{figures.score:.3f}"),
    ("", "bf16", lambda figures: f"{figures.reference_score:.3f}"),
    ("", "ratio", lambda figures: _ratio(figures.relative_score)),
    ("", "lost", lambda figures: str(figures.lost)),
    ("", "won", lambda figures: str(figures.won)),
    ("McNemar", "p", lambda figures: f"{figures.mcnemar_p:.2g}"),
)
LOOKS: tuple[Column, ...] = (
    ("run-", "away", lambda figures: _new(figures.runaways, figures.reference_runaways)),
    ("", "empty", lambda figures: _new(figures.empty_answers, figures.reference_empty)),
    ("", "loop", lambda figures: _new(figures.loops, figures.reference_loops)),
    ("", "echo", lambda figures: _new(figures.echoes, figures.reference_echoes)),
    ("", "length", lambda figures: _ratio(figures.length_ratio)),
    ("same", "text", lambda figures: f"{figures.text_agreement:.0%}"),
)
