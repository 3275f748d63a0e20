"""Generated answers as plain models for `result.json`, bounded in size."""

from __future__ import annotations

from pytest_quantguard.gate.generation import generation_config, known_generation
from pytest_quantguard.gate.generation_judge import SIGN_WORDS, generation_figures, worst_first
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.generation.answer import GeneratedAnswer
from pytest_quantguard.generation.figures import AnswerPair, Figures
from pytest_quantguard.generation.metrics import EVERYTHING
from pytest_quantguard.results import GeneratedText, GenerationAnswer, GenerationFigures, GenerationResult

MOST_ANSWERS = 100
MOST_CHARACTERS = 2000


def summarize_generation(trial: Trial) -> GenerationResult | None:
    """What was measured; None if nothing was. Asks nothing and never fails."""
    measured = known_generation(trial)
    if measured is None:
        return None
    config = generation_config(trial)
    tasks = dict.fromkeys(pair.prompt.task for pair in measured.pairs)
    shown = [pair for pair in worst_first(measured.pairs) if pair.signs]
    return GenerationResult(
        route=config.route,
        tasks={task: _figures(generation_figures(trial, task)) for task in tasks},
        overall=_figures(generation_figures(trial, EVERYTHING)),
        answers=[_answer(pair) for pair in shown[:MOST_ANSWERS]],
        left_out=max(0, len(shown) - MOST_ANSWERS),
        skipped=list(measured.skipped),
        resumed=measured.resumed,
        concurrency=config.concurrency,
        seconds=round(measured.seconds, 3),
        notes=list(measured.notes),
    )


def _figures(figures: Figures) -> GenerationFigures:
    metrics, counts, own = figures.metrics, figures.counts, figures.reference_counts
    relative, length = metrics.get("relative_score"), metrics.get("length_ratio")
    interval = relative.interval if relative is not None else None
    return GenerationFigures(
        prompts=figures.prompts,
        score=metrics["score"].value,
        reference_score=figures.reference_score,
        relative_score=relative.value if relative is not None else None,
        relative_interval=None if interval is None else (interval.low, interval.high),
        lost=counts["lost"],
        won=counts["won"],
        mcnemar_p=figures.mcnemar_p,
        runaways=counts["runaway"],
        empty_answers=counts["empty"],
        loops=counts["loop"],
        echoes=counts["echo"],
        reference_runaways=own["runaway"],
        reference_empty=own["empty"],
        reference_loops=own["loop"],
        reference_echoes=own["echo"],
        length_ratio=length.value if length is not None else None,
        text_agreement=metrics["text_agreement"].value,
        first_divergence_median=figures.first_divergence_median,
        output_tokens=figures.output_tokens,
        reference_tokens=figures.reference_tokens,
    )


def _answer(pair: AnswerPair) -> GenerationAnswer:
    before, after = pair.scores
    return GenerationAnswer(
        id=pair.prompt.id,
        task=pair.prompt.task,
        language=pair.prompt.language,
        question=_shortened(pair.prompt.text or ""),
        gold=list(pair.prompt.gold),
        reference=_text(pair.reference, before),
        candidate=_text(pair.candidate, after),
        signs=[sign for sign in SIGN_WORDS if sign in pair.signs],
        first_divergence=pair.first_divergence,
    )


def _text(answer: GeneratedAnswer, score: float) -> GeneratedText:
    return GeneratedText(
        text=answer.text[:MOST_CHARACTERS],
        truncated=len(answer.text) > MOST_CHARACTERS,
        tokens=answer.completion_tokens,
        ending=answer.ending,
        score=score,
        seconds=answer.seconds,
    )


def _shortened(text: str) -> str:
    """Beginning and end: tasks put the question last."""
    half = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half]}\n[...]\n{text[-half:]}"
