"""Generated answers as a table of text: a row for each task, one for all. Knows nothing of terminals."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from pytest_quantguard.report.visible import visible
from pytest_quantguard.results import GenerationFigures, GenerationResult

Column = tuple[str, str, Callable[[GenerationFigures], str]]
"""Two lines of title, and the cell of a row."""

NOTHING = "-"
LONGEST_NAME = 16


def generation_lines(result: GenerationResult, width: int) -> list[str]:
    """One table where it fits, else the same rows again for further columns."""
    asked = f"{result.overall.prompts} prompts, {result.concurrency} at a time, {result.seconds:.0f} s"
    skipped = f", {len(result.skipped)} skipped (too long)" if result.skipped else ""
    resumed = f", {result.resumed} of an interrupted run" if result.resumed else ""
    title = f"generated answers ({asked}{skipped}{resumed})"
    lines = ["", *textwrap.wrap(title, width, initial_indent="  ", subsequent_indent="    ")]
    rows = [(_name(task), figures) for task, figures in result.tasks.items()]
    if len(rows) != 1:
        rows.append(("all", result.overall))
    tables = _tables(rows, width)
    legend = ["  n+m: m that the reference shows too"] if any("+" in line for line in tables) else []
    return [*lines, *tables, *legend]


def _name(task: str) -> str:
    name = visible(task)
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."


def _tables(rows: Sequence[tuple[str, GenerationFigures]], width: int) -> list[str]:
    """As many columns side by side as fit."""
    labels = 2 + max(len(name) for name, _ in rows)
    lines: list[str] = []
    empty = [line.ljust(labels) for line in ("", "", *(f"  {name}" for name, _ in rows))]
    block = empty
    for upper, lower, cell in COLUMNS:
        texts = [upper, lower, *(cell(figures) for _, figures in rows)]
        size = max(map(len, texts)) + 2
        if len(block[0]) + size > width:
            lines += [*(line.rstrip() for line in block), ""]
            block = empty
        block = [line + text.rjust(size) for line, text in zip(block, texts, strict=True)]
    return lines + [line.rstrip() for line in block]


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def _place(value: float | None) -> str:
    """How many tokens the answers have in common that are not the same, by their median."""
    return NOTHING if value is None else f"{value:.0f}"


def _new(count: int, own: int) -> str:
    """Signs that the reference's answers do not show; those that it shows itself behind a plus."""
    return f"{count}+{own}" if own else str(count)


COLUMNS: tuple[Column, ...] = (
    ("", "prompts", lambda figures: str(figures.prompts)),
    ("", "score", lambda figures: f"{figures.score:.3f}"),
    ("", "bf16", lambda figures: f"{figures.reference_score:.3f}"),
    ("", "ratio", lambda figures: _ratio(figures.relative_score)),
    ("", "lost", lambda figures: str(figures.lost)),
    ("", "won", lambda figures: str(figures.won)),
    ("McNemar", "p", lambda figures: f"{figures.mcnemar_p:.2g}"),
    ("run-", "away", lambda figures: _new(figures.runaways, figures.reference_runaways)),
    ("", "empty", lambda figures: _new(figures.empty_answers, figures.reference_empty)),
    ("", "loop", lambda figures: _new(figures.loops, figures.reference_loops)),
    ("", "echo", lambda figures: _new(figures.echoes, figures.reference_echoes)),
    ("", "length", lambda figures: _ratio(figures.length_ratio)),
    ("same", "text", lambda figures: f"{figures.text_agreement:.0%}"),
    ("first", "diff", lambda figures: _place(figures.first_divergence_median)),
)
