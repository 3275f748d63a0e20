"""From pairs of answers, the reference's and the candidate's to the same question, to figures with intervals.

Pure: what the figures must hold is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from pytest_quantguard.generation.answer import GeneratedAnswer
from pytest_quantguard.generation.signs import echoes, first_difference, is_empty, loops
from pytest_quantguard.prompts.prompt import Prompt
from pytest_quantguard.prompts.scoring import score
from pytest_quantguard.stats.aggregates import Aggregate, Mean, Share
from pytest_quantguard.stats.bootstrap import (
    CONFIDENCE,
    Column,
    Interval,
    Resampler,
    bootstrap_intervals,
    ratio_interval,
)
from pytest_quantguard.stats.paired import paired_change
from pytest_quantguard.stats.power import mcnemar_exact

Sign = Literal["lost", "won", "runaway", "empty", "loop", "echo"]


@dataclass(frozen=True)
class AnswerPair:
    """One question with both answers. What is costly is computed once, when first needed."""

    prompt: Prompt
    reference: GeneratedAnswer
    candidate: GeneratedAnswer

    @cached_property
    def scores(self) -> tuple[float, float]:
        """(reference, candidate), 0 to 1."""
        task, gold = self.prompt.task, self.prompt.gold
        return score(task, self.reference.text, gold), score(task, self.candidate.text, gold)

    @cached_property
    def first_divergence(self) -> int | None:
        """Number of tokens (of characters, where a side has no tokens) that both have in common; None for
        answers that are the same.
        """
        if self.reference.output_ids is None or self.candidate.output_ids is None:
            return first_difference(self.reference.text, self.candidate.text)
        return first_difference(self.reference.output_ids, self.candidate.output_ids)

    @cached_property
    def reference_signs(self) -> frozenset[Sign]:
        """What the reference's answer shows by itself."""
        return self._own_signs(self.reference)

    @cached_property
    def signs(self) -> frozenset[Sign]:
        """What the candidate's answer shows and the reference's does not; lost: it scores less, won: more."""
        found = set(self._own_signs(self.candidate) - self.reference_signs)
        before, after = self.scores
        if before != after:
            found.add("lost" if after < before else "won")
        return frozenset(found)

    def _own_signs(self, answer: GeneratedAnswer) -> frozenset[Sign]:
        question = self.prompt.text or ""
        signs: dict[Sign, bool] = {
            "runaway": answer.ran_on,
            "empty": is_empty(answer.text),
            "loop": loops(answer.text, answer.output_ids),
            "echo": echoes(answer.text, question),
        }
        return frozenset(sign for sign, shown in signs.items() if shown)


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric's value; interval: 95 %, by prompt, None where there is none."""

    value: float
    interval: Interval | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything known of a set of pairs.

    metrics: by the names of `GENERATION_METRICS`; relative_score only where the reference scores at all,
    length_ratio only where it writes at all. counts: new signs of the candidate. reference_counts: signs of
    the reference itself. mcnemar_p: two-sided, for flips in either direction.
    """

    prompts: int
    metrics: dict[str, Figure]
    reference_score: float
    counts: dict[Sign, int]
    reference_counts: dict[Sign, int]
    mcnemar_p: float
    first_divergence_median: float | None
    reference_tokens: int
    output_tokens: int


SHARES: dict[str, Sign] = {
    "runaways": "runaway",
    "empty_answers": "empty",
    "loops": "loop",
    "echoes": "echo",
}
"""Metrics that are the share of pairs with a sign."""


def figures_of(pairs: Sequence[AnswerPair]) -> Figures:
    """Raises ValueError for no pairs: nothing is said of nothing."""
    if not pairs:
        raise ValueError("there are no answers to compare")
    counts = _count([pair.signs for pair in pairs])
    scores = np.array([pair.scores for pair in pairs], dtype=np.float64)
    divergences = [pair.first_divergence for pair in pairs if pair.first_divergence is not None]
    metrics = {**_score_figures(scores, counts), **_text_figures(pairs)}
    return Figures(
        prompts=len(pairs),
        metrics=metrics,
        reference_score=float(scores[:, 0].mean()),
        counts=counts,
        reference_counts=_count([pair.reference_signs for pair in pairs]),
        mcnemar_p=mcnemar_exact(lost=counts["lost"], won=counts["won"]),
        first_divergence_median=float(np.median(divergences)) if divergences else None,
        reference_tokens=sum(pair.reference.completion_tokens for pair in pairs),
        output_tokens=sum(pair.candidate.completion_tokens for pair in pairs),
    )


def _count(signs: Sequence[frozenset[Sign]]) -> dict[Sign, int]:
    known: tuple[Sign, ...] = ("lost", "won", "runaway", "empty", "loop", "echo")
    return {sign: sum(sign in found for found in signs) for sign in known}


def _score_figures(scores: npt.NDArray[np.float64], counts: dict[Sign, int]) -> dict[str, Figure]:
    """scores: float64 [prompts, 2], reference and candidate."""
    prompts = np.arange(len(scores), dtype=np.int64)
    lost, won = counts["lost"], counts["won"]
    found = {
        "score": Figure(
            float(scores[:, 1].mean()),
            bootstrap_intervals({"score": _column(scores[:, 1])}, prompts)["score"],
        ),
        "loss_p": Figure(mcnemar_exact(lost=lost, won=won) if lost > won else 1.0),
    }
    change = paired_change(Column(scores[:, 0], Mean()), Column(scores[:, 1], Mean()), prompts)
    if change.relative is not None:
        interval = change.relative_interval
        found["relative_score"] = Figure(
            1 + change.relative, None if interval is None else _as_ratio(interval)
        )
    return found


def _column(values: npt.NDArray[np.float64]) -> Column:
    yes_no = bool(np.isin(values, (0.0, 1.0)).all())
    aggregate: Aggregate = Share() if yes_no else Mean()
    return Column(values, aggregate, (0.0, 1.0))


def _text_figures(pairs: Sequence[AnswerPair]) -> dict[str, Figure]:
    prompts = np.arange(len(pairs), dtype=np.int64)
    shares = {
        name: np.array([sign in pair.signs for pair in pairs], dtype=np.float64)
        for name, sign in SHARES.items()
    }
    shares["text_agreement"] = np.array(
        [pair.reference.text == pair.candidate.text for pair in pairs], dtype=np.float64
    )
    columns = {name: Column(values, Share(), (0.0, 1.0)) for name, values in shares.items()}
    intervals = bootstrap_intervals(columns, prompts)
    found = {name: Figure(float(values.mean()), intervals[name]) for name, values in shares.items()}
    return {**found, **_length_figure(pairs)}


def _length_figure(pairs: Sequence[AnswerPair]) -> dict[str, Figure]:
    before = np.array([pair.reference.completion_tokens for pair in pairs], dtype=np.float64)
    after = np.array([pair.candidate.completion_tokens for pair in pairs], dtype=np.float64)
    if not before.sum():
        return {}
    value = float(after.sum() / before.sum())
    if len(pairs) < 2:
        return {"length_ratio": Figure(value)}
    low, high, error, method = ratio_interval(after, before, Resampler(), CONFIDENCE)
    interval = Interval(low, high, value, error, len(pairs), CONFIDENCE, method)
    return {"length_ratio": Figure(value, interval)}


def _as_ratio(change: Interval) -> Interval:
    """The interval of after / before, from that of the relative change; a ratio is never negative."""
    return replace(change, low=max(change.low + 1, 0.0), high=change.high + 1, value=change.value + 1)
