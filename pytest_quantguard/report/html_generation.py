"""The section of the HTML report about generated answers: scores by task, and the answers that changed beside
those of the reference.
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_quantguard.report.headline import figure
from pytest_quantguard.report.html_accuracy import scrolled
from pytest_quantguard.report.markup import Child, Html, block, foreign, join, tag
from pytest_quantguard.results import GeneratedText, GenerationAnswer, GenerationFigures, RunResult

OPENED = 3


def cards(result: RunResult) -> Iterator[tuple[str, str, str]]:
    """Score relative to the reference; name, value, remark."""
    if result.generation is None:
        return
    overall = result.generation.overall
    if overall.relative_score is not None:
        yield "task score / BF16", f"{overall.relative_score:.3f}", f"{overall.lost} lost, {overall.won} won"


def generation(result: RunResult) -> Html | None:
    """The table, then questions with both answers."""
    found = result.generation
    if found is None:
        return None
    asked = (
        f"{found.overall.prompts} questions on the {found.route} route, {found.concurrency} at a time, "
        f"{found.seconds:.0f} s."
    )
    parts: list[Child] = [tag("p", asked)]
    if found.skipped:
        parts.append(tag("p", "Too long for the context, left out: ", foreign(", ".join(found.skipped))))
    rows = [_row(name, figures) for name, figures in found.tasks.items()]
    rows.append(_row("all", found.overall))
    names = (
        *("task", "questions", "score", "BF16", "ratio", "95 % interval", "lost", "won", "McNemar p"),
        *("runaway", "empty", "loop", "echo", "length ratio", "same text", "first difference"),
    )
    head = tag("thead", tag("tr", [tag("th", name, scope="col") for name in names]))
    caption = tag("caption", "Signs that the reference's answers do not show; its own behind the plus")
    parts.append(scrolled("Scores by task", caption, head, tag("tbody", rows)))
    parts += [tag("p", note) for note in found.notes]
    if found.answers:
        parts.append(tag("h3", "Answers that changed"))
        parts += [_answer(answer, index < OPENED) for index, answer in enumerate(found.answers)]
    if found.left_out:
        parts.append(tag("p", f"{found.left_out} further answers changed."))
    return join(parts)


def _row(name: str, figures: GenerationFigures) -> Html:
    interval = figures.relative_interval
    cells = (
        figures.prompts,
        figure(figures.score),
        figure(figures.reference_score),
        "" if figures.relative_score is None else f"{figures.relative_score:.3f}",
        "" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}",
        figures.lost,
        figures.won,
        f"{figures.mcnemar_p:.2g}",
        _new(figures.runaways, figures.reference_runaways),
        _new(figures.empty_answers, figures.reference_empty),
        _new(figures.loops, figures.reference_loops),
        _new(figures.echoes, figures.reference_echoes),
        "" if figures.length_ratio is None else f"{figures.length_ratio:.2f}",
        f"{figures.text_agreement:.0%}",
        "" if figures.first_divergence_median is None else f"{figures.first_divergence_median:.0f}",
    )
    return tag("tr", tag("th", foreign(name, longest=60), scope="row"), [tag("td", cell) for cell in cells])


def _new(count: int, own: int) -> str:
    return f"{count} + {own}" if own else str(count)


def _answer(answer: GenerationAnswer, is_open: bool) -> Html:
    signs = ", ".join(answer.signs)
    same = (
        "the same text" if answer.first_divergence is None else f"differs from {answer.first_divergence} on"
    )
    summary = tag("summary", foreign(answer.id, longest=80), f": {signs} ({answer.task}; {same})")
    question = tag(
        "pre", block(answer.question), tabindex=0, role="region", aria_label=f"Question {answer.id}"
    )
    gold = tag("p", "Wanted: ", foreign("; ".join(answer.gold), longest=400)) if answer.gold else None
    sides = tag(
        "div",
        _side("BF16", answer.reference, answer.id),
        _side("Candidate", answer.candidate, answer.id),
        class_="answers",
    )
    return tag("details", summary, question, gold, sides, open=is_open)


def _side(name: str, text: GeneratedText, about: str) -> Html:
    more = ", cut here" if text.truncated else ""
    facts = f"{name}: score {figure(text.score)}, {text.tokens} tokens, ended by {text.ending}{more}"
    body = tag("pre", block(text.text), tabindex=0, role="region", aria_label=f"{name}'s answer to {about}")
    return tag("div", tag("p", facts, class_="soft small"), body)
