"""The report as Markdown: `summary.md`, and the job summary of GitHub Actions.

GitHub renders HTML inside Markdown, so foreign text is made harmless for both: every character that either
could take for markup becomes a character reference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pytest_quantguard.report.headline import (
    PHASES,
    bound_text,
    failed_groups,
    figure,
    first_cells,
    first_line,
    label,
    reason,
    verdict_line,
)
from pytest_quantguard.report.visible import part_of_character, visible, visible_lines
from pytest_quantguard.results import CheckResult, GenerationResult, RunResult, TokenProbability

SYMBOLS = {"passed": "✅", "failed": "❌", "incomplete": "⚠️"}
MARKS = {"failed": " ❌", "error": " ⚠️", "warned": " ⚠️", "skipped": ""}
HARMLESS = re.compile(r"[^\x21-\x7e]|[\w .,+()/=%:;?'-]")
"""Spaces, letters, digits and some marks; everything that Markdown or HTML take for markup is ASCII."""
LONGEST = 60_000
"""GitHub takes a megabyte per step; nobody reads one."""
SHOWN_GROUPS, SHOWN_MESSAGES, SHOWN_WORST, SHOWN_TOKENS, SHOWN_TASKS = 20, 3, 5, 3, 20


def render_markdown(
    result: RunResult, *, changes: tuple[str, str] | None = None, report: str | None = None
) -> str:
    """Verdict, what failed, the tables, the worst positions. report: where the whole report is."""
    lines = [
        f"## {SYMBOLS[result.verdict]} {escaped(verdict_line(result))}",
        "",
        f"**{escaped(reason(result))}**",
        "",
    ]
    if result.partial:
        lines += ["This summary is partial: what is not shown was not measured.", ""]
    groups = failed_groups(result)
    lines += [f"- {escaped(group.sentence)}" for group in groups[:SHOWN_GROUPS]]
    if len(groups) > SHOWN_GROUPS:
        lines.append(f"- and {len(groups) - SHOWN_GROUPS} more")
    lines += [""] if groups else []
    lines += [f"> **Diagnosis** {escaped(sentence)}\n" for sentence in result.diagnosis]
    lines += [*_who(result), ""]
    if changes is not None:
        lines += [*(f"- {escaped(line)}" for line in changes if line), ""]
    lines += _table(result.checks)
    lines += _others(result.checks)
    lines += _by_task(result)
    lines += _messages(result)
    lines += _worst(result)
    if report is not None:
        lines.append(f"Report: {escaped(report)}")
    text = "\n".join(lines) + "\n"
    if len(text) > LONGEST:
        text = text[:LONGEST].rsplit("\n", 1)[0] + "\n\n(cut; everything is in result.json)\n"
    return text


def escaped(text: str, *, longest: int = 1000) -> str:
    """Foreign text on one line of Markdown."""
    return "".join(
        character if HARMLESS.match(character) else f"&#{ord(character)};"
        for character in visible(text, longest=longest)
    )


def fenced(text: str) -> list[str]:
    """Foreign text of several lines as a code block that it cannot end."""
    lines = visible_lines(text).split("\n")
    longest = max((len(run) for line in lines for run in _ticks(line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence, *lines, fence]


def _ticks(line: str) -> list[str]:
    return "".join(character if character == "`" else " " for character in line).split()


def _who(result: RunResult) -> list[str]:
    candidate = "did not start" if result.candidate is None else result.candidate.title
    return [f"Candidate {escaped(candidate)}; baseline {escaped(result.baseline_path)}."]


def _table(checks: Sequence[CheckResult]) -> list[str]:
    """Rows checks, columns phases and batch sizes."""
    columns = sorted(
        {
            (check.phase, check.batch_size)
            for check in checks
            if check.phase is not None and check.batch_size is not None
        },
        key=lambda column: (PHASES.index(column[0]), column[1]),
    )
    rows: dict[str, dict[tuple[object, object], CheckResult]] = {}
    for check in checks:
        if (check.phase, check.batch_size) in columns:
            rows.setdefault(label(check), {})[(check.phase, check.batch_size)] = check
    if all(cell.outcome == "error" for cells in rows.values() for cell in cells.values()):
        return []
    heads = ["check", *(f"{phase} bs {size}" for phase, size in columns), "bound"]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * (len(heads) - 1)]
    for name, cells in rows.items():
        bounds = dict.fromkeys(bound_text(check) for check in cells.values())
        shown = [_cell(cells.get(column)) for column in columns]
        lines.append("| " + " | ".join([escaped(name), *shown, ", ".join(filter(None, bounds))]) + " |")
    return [*lines, ""]


def _cell(check: CheckResult | None) -> str:
    if check is None:
        return ""
    mark = MARKS.get(check.outcome, " ~" if check.near_bound else "")
    words = {"passed": "ok", "error": "could not run", "skipped": "–"}
    value = (
        words.get(check.outcome, check.outcome) if check.value is None else figure(check.value, check.unit)
    )
    return f"{value}{mark}"


def _others(checks: Sequence[CheckResult]) -> list[str]:
    """Checks that belong to no cell and have a value, such as those of scenarios and tasks."""
    found = [check for check in checks if check.phase is None and check.value is not None]
    if not found:
        return []
    lines = ["| check | value | bound |", "|---|--:|--:|"]
    for check in found:
        unit = (
            f" {escaped(check.unit)}" if check.unit and check.unit not in ("share", "relative", "1") else ""
        )
        lines.append(f"| {escaped(check.id)} | {_cell(check)}{unit} | {bound_text(check)} |")
    return [*lines, ""]


def _by_task(result: RunResult) -> list[str]:
    """The figures of each task, folded: mean KL in every cell, and scores. Nothing for a single task."""
    cells = first_cells(result)
    tasks = list(dict.fromkeys(task for cell in cells for task in cell.by_task))[:SHOWN_TASKS]
    lines: list[str] = []
    if len(tasks) > 1:
        heads = ["mean KL by task", *(f"{cell.phase} bs {cell.batch_size}" for cell in cells)]
        lines += ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * len(cells)]
        for task in tasks:
            parts = [cell.by_task.get(task, {}).get("kl_mean") for cell in cells]
            shown = ["" if value is None else figure(value) for value in parts]
            lines.append("| " + " | ".join([escaped(task, longest=60), *shown]) + " |")
        lines.append("")
    if result.generation is not None and len(result.generation.tasks) > 1:
        lines += _scores_by_task(result.generation)
    return ["<details><summary>By task</summary>", "", *lines, "</details>", ""] if lines else []


def _scores_by_task(generation: GenerationResult) -> list[str]:
    lines = ["| score by task | prompts | BF16 | candidate | lost | won | runaways |", "|---|" + "--:|" * 6]
    for task, found in list(generation.tasks.items())[:SHOWN_TASKS]:
        numbers = [str(found.prompts), f"{found.reference_score:.3f}", f"{found.score:.3f}"]
        numbers += map(str, (found.lost, found.won, found.runaways))
        lines.append("| " + " | ".join([escaped(task, longest=60), *numbers]) + " |")
    return [*lines, ""]


def _messages(result: RunResult) -> list[str]:
    """The whole message of the first checks of different groups."""
    lines = []
    for group in failed_groups(result)[:SHOWN_MESSAGES]:
        worst = group.worst
        summary = f"{escaped(worst.id)}: {escaped(first_line(worst.message), longest=200)}"
        lines += [
            f"<details><summary>{summary}</summary>",
            "",
            *fenced(worst.message[:8000]),
            "",
            "</details>",
            "",
        ]
    return lines


def _worst(result: RunResult) -> list[str]:
    places = result.details.worst[:SHOWN_WORST]
    if not places:
        return []
    lines = ["| worst positions | after | BF16 | candidate | KL |", "|---|---|---|---|--:|"]
    for place in places:
        where = (
            f"{escaped(place.prompt, longest=60)}, position {place.position}{', flip' if place.flip else ''}"
        )
        after = escaped(place.before[-60:])
        sides = _best(place.baseline), _best(place.candidate)
        lines.append(f"| {where} | {after} | {sides[0]} | {sides[1]} | {figure(place.kl)} |")
    return [*lines, ""]


def _best(tokens: Sequence[TokenProbability]) -> str:
    return ", ".join(
        f"{escaped(repr(token.text) + part_of_character(token.text, token.id), longest=40)} "
        f"{token.probability:.3f}"
        for token in tokens[:SHOWN_TOKENS]
    )
