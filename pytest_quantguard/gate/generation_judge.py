"""From generated answers to a verdict, and to the text of a failure with the answers side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from pytest_quantguard.errors import ConfigError
from pytest_quantguard.gate.generation import generation_config, measured_generation
from pytest_quantguard.gate.message import describe_failure, labelled, number
from pytest_quantguard.gate.plan import Check
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.gate.verdicts import detectable_change, require_judged, result_of
from pytest_quantguard.generation.answer import GeneratedAnswer
from pytest_quantguard.generation.figures import SHARES, AnswerPair, Figures, Sign, figures_of
from pytest_quantguard.generation.metrics import EVERYTHING, GENERATION_METRICS
from pytest_quantguard.report.wrapping import text_width
from pytest_quantguard.results import CheckResult
from pytest_quantguard.stats.decision import decide

SHOWN_PAIRS = 3
TAIL = 90
"""Characters of a question or an answer that a message shows."""
SIGN_WORDS: dict[Sign, str] = {
    "lost": "lost",
    "won": "won",
    "runaway": "runaway",
    "empty": "empty",
    "loop": "loop",
    "echo": "repeats the question",
}


def judge_generation(trial: Trial, check: Check) -> CheckResult:
    """One metric of one task, or of all prompts, within its bound."""
    assert check.metric is not None
    assert check.bound is not None
    assert check.task is not None
    config, metric, measured = (
        generation_config(trial),
        GENERATION_METRICS[check.metric],
        measured_generation(trial),
    )
    figures = generation_figures(trial, check.task)
    key = (
        f"generation.{metric.name}"
        if check.task == EVERYTHING
        else f"generation.tasks.{check.task}.{metric.name}"
    )
    figure = figures.metrics.get(metric.name)
    if figure is None:
        raise ConfigError(_explain_undefined(metric.name, check.task, key, trial.config_path))
    interval = figure.interval
    verdict = decide(
        metric=metric.name,
        value=figure.value,
        bound=check.bound.limit,
        better=metric.better,
        decision="point" if metric.name == "loss_p" else check.bound.decision or config.decision,
        interval=interval,
        noise_floor=measured.noise.get(check.task, {}).get(metric.name),
        smallest_detectable=detectable_change(interval),
    )
    require_judged(trial, verdict, key)
    counts = {"lost": figures.counts["lost"], "won": figures.counts["won"]}
    extra = {"task": check.task, "prompts": figures.prompts, **counts}
    result = result_of(check, verdict, metric.unit, extra)
    if verdict.passed:
        return result
    allowed = "at most" if metric.better == "lower" else "at least"
    where = "all tasks" if check.task == EVERYTHING else f"task {check.task}"
    headline = (
        f"generation, {where}: {metric.name} is {number(verdict.value)}; {allowed} {check.bound.limit:g} is "
        f"allowed. {metric.description}"
    )
    details = [
        *labelled("prompts", _counted(figures)),
        *describe_pairs(measured.of(check.task), metric.name),
    ]
    return result.model_copy(update={"message": describe_failure(trial, result, headline, details)})


def generation_figures(trial: Trial, task: str) -> Figures:
    """The figures of a task, or of all; raises ConfigError where no prompt of it was asked."""
    return trial.once(("generation figures", task), lambda: _figures(trial, task))


def _figures(trial: Trial, task: str) -> Figures:
    pairs = measured_generation(trial).of(task)
    if not pairs:
        raise ConfigError(
            f"generation.tasks.{task}: none of its prompts was asked, since the context has no room for "
            "them. Make them shorter (tokens), lower max_new_tokens, or take the task out."
        )
    return figures_of(pairs)


def _explain_undefined(metric: str, task: str, key: str, path: Path) -> str:
    what = "all tasks" if task == EVERYTHING else f"task {task}"
    if metric == "length_ratio":
        why = "the reference wrote nothing at all"
    else:
        why = "the reference scores 0 there, and a share of nothing is not defined"
    return (
        f"{metric} of {what} was not judged: {why}. Ask something that the reference can do (shorter or "
        f"easier prompts), or bound something else. The key is {key} in {path}."
    )


def _counted(figures: Figures) -> str:
    counts, own = figures.counts, figures.reference_counts
    parts = [
        f"{figures.prompts} asked, score {figures.metrics['score'].value:.3f} (reference "
        f"{figures.reference_score:.3f}), {counts['lost']} lost, {counts['won']} won (exact McNemar p = "
        f"{figures.mcnemar_p:.3g})"
    ]
    names = {"runaway": "runaways", "empty": "empty", "loop": "loops", "echo": "echoes"}
    parts += [
        f"{counts[sign]} new {name} (reference {own[sign]})"  # type: ignore[index]
        for sign, name in names.items()
        if counts[sign] or own[sign]  # type: ignore[index]
    ]
    return "; ".join(parts)


def describe_pairs(pairs: Sequence[AnswerPair], metric: str) -> list[str]:
    """The answers that speak most for a metric's failure, both sides as text."""
    shown = speaking_for(pairs, metric)[:SHOWN_PAIRS]
    lines = labelled("worst answers", "both sides, control characters escaped") if shown else []
    for pair in shown:
        signs = [SIGN_WORDS[sign] for sign in SIGN_WORDS if sign in pair.signs]
        lengths = f"{pair.reference.completion_tokens} and {pair.candidate.completion_tokens} tokens"
        lines.append(f"    prompt {pair.prompt.id}: {', '.join([*signs, lengths])}"[: text_width()])
        lines += _text("asked", _end(pair.prompt.text or ""))
        lines += _text("accepted", ", ".join(pair.prompt.gold))
        lines += _text("reference", _answer(pair.reference))
        lines += _text("candidate", _answer(pair.candidate))
    return lines


def speaking_for(pairs: Sequence[AnswerPair], metric: str) -> list[AnswerPair]:
    """The pairs that make a metric bad, the worst first."""
    if metric == "length_ratio":
        longer = [pair for pair in pairs if _growth(pair) > 0]
        return sorted(longer, key=_growth, reverse=True)
    if metric == "text_agreement":
        return [pair for pair in worst_first(pairs) if pair.reference.text != pair.candidate.text]
    sign = SHARES.get(metric, "lost")
    return [pair for pair in worst_first(pairs) if sign in pair.signs]


def worst_first(pairs: Sequence[AnswerPair]) -> list[AnswerPair]:
    """Lost answers first, then other signs, then by how much longer the answer is than the reference's."""

    def badness(pair: AnswerPair) -> tuple[float, int, int]:
        return pair.scores[0] - pair.scores[1], len(pair.signs - {"won"}), _growth(pair)

    return sorted(pairs, key=badness, reverse=True)


def _growth(pair: AnswerPair) -> int:
    return pair.candidate.completion_tokens - pair.reference.completion_tokens


def _answer(answer: GeneratedAnswer) -> str:
    ending = "" if answer.ending == "stop" else f" [{answer.ending} after {answer.completion_tokens} tokens]"
    return f"{_start(answer.text)}{ending}"


def _start(text: str) -> str:
    return repr(text if len(text) <= TAIL else f"{text[:TAIL]}...")


def _end(text: str) -> str:
    return repr(text if len(text) <= TAIL else f"...{text[-TAIL:]}")


def _text(label: str, text: str) -> list[str]:
    indent = " " * 6
    return textwrap.wrap(
        text,
        text_width(),
        initial_indent=f"{indent}{label:<11}",
        subsequent_indent=" " * 17,
        break_on_hyphens=False,
    )
