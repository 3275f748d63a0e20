"""Figures of answer pairs against counts and formulas done by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pytest_quantguard.generation.answer import Ending, GeneratedAnswer
from pytest_quantguard.generation.figures import AnswerPair, figures_of
from pytest_quantguard.prompts.prompt import Prompt

QUESTION = (
    "Which colour has the sea at night in the north, when nobody looks at it and no ship is near it at all?"
)


def answer(text: str, ending: Ending = "stop", tokens: int | None = None) -> GeneratedAnswer:
    ids = tuple(text.encode())
    return GeneratedAnswer(
        id="x",
        text=text,
        output_ids=ids,
        ending=ending,
        prompt_tokens=5,
        completion_tokens=len(ids) if tokens is None else tokens,
        seconds=0.1,
    )


def pair(
    reference: str | GeneratedAnswer,
    candidate: str | GeneratedAnswer,
    *,
    task: str = "qa",
    gold: str = "blue",
) -> AnswerPair:
    sides = [side if isinstance(side, GeneratedAnswer) else answer(side) for side in (reference, candidate)]
    return AnswerPair(Prompt("x", task, QUESTION, gold=tuple(gold.split())), *sides)


def test_flips_both_ways_and_the_exact_test() -> None:
    pairs = [pair("blue", "red")] * 7 + [pair("red", "blue")] + [pair("blue", "blue")] * 12
    figures = figures_of(pairs)
    assert (figures.counts["lost"], figures.counts["won"]) == (7, 1)
    # Two-sided: twice the probability of at most 1 head in 8 throws.
    exact = 2 * (1 + 8) / 2**8
    assert figures.mcnemar_p == pytest.approx(exact)
    assert figures.metrics["loss_p"].value == pytest.approx(exact)
    assert figures.reference_score == pytest.approx(19 / 20)
    assert figures.metrics["score"].value == pytest.approx(13 / 20)
    assert figures.metrics["relative_score"].value == pytest.approx(13 / 19)


def test_more_won_than_lost_is_no_loss() -> None:
    figures = figures_of([pair("red", "blue")] * 9 + [pair("blue", "red")])
    assert figures.metrics["loss_p"].value == 1.0
    assert figures.mcnemar_p < 0.05


def test_shares_flip_by_more_and_less() -> None:
    pairs = [
        pair("red green", "red", task="cwe", gold="red green blue"),
        pair("red", "red blue", task="cwe", gold="red green blue"),
        pair("red", "green", task="cwe", gold="red green blue"),
    ]
    figures = figures_of(pairs)
    assert (figures.counts["lost"], figures.counts["won"]) == (1, 1)
    assert figures.metrics["score"].value == pytest.approx((1 / 3 + 2 / 3 + 1 / 3) / 3)


def test_signs_count_only_where_the_reference_does_not_show_them() -> None:
    looping = answer("ha " * 40)
    pairs = [
        pair("blue", answer("blue", "length")),
        pair(answer("blue", "length"), answer("blue", "length")),
        pair("blue", answer("", "deadline")),
        pair("blue", looping),
        pair(looping, looping),
        pair("blue", QUESTION),
    ]
    figures = figures_of(pairs)
    assert figures.counts == {"lost": 3, "won": 0, "runaway": 2, "empty": 1, "loop": 1, "echo": 1}
    assert figures.reference_counts == {
        "lost": 0, "won": 0, "runaway": 1, "empty": 0, "loop": 1, "echo": 0
    }  # fmt: skip
    assert figures.metrics["runaways"].value == pytest.approx(2 / 6)
    assert figures.metrics["empty_answers"].value == pytest.approx(1 / 6)
    assert figures.metrics["text_agreement"].value == pytest.approx(3 / 6)


def test_lengths_and_divergence() -> None:
    pairs = [pair("blue", "blue"), pair("blue sea", "blue sky and more"), pair("ab", "xy")]
    figures = figures_of(pairs)
    assert figures.metrics["length_ratio"].value == pytest.approx((4 + 17 + 2) / (4 + 8 + 2))
    assert figures.first_divergence_median == np.median([6, 0])
    assert pairs[0].first_divergence is None


def test_without_token_ids_divergence_is_in_characters() -> None:
    left = answer("日本語です").model_copy(update={"output_ids": None})
    assert pair(left, "日本人です").first_divergence == 2


def test_intervals_are_by_prompt() -> None:
    pairs = [pair("blue", "blue")] * 30 + [pair("blue", "red")] * 10
    interval = figures_of(pairs).metrics["score"].interval
    assert interval is not None
    assert interval.method == "Wilson"
    assert interval.clusters == 40
    # Wilson's interval of 30 in 40 (with the normal quantile) is 0.598 to 0.858.
    assert interval.low == pytest.approx(0.598, abs=0.01)
    assert interval.high == pytest.approx(0.858, abs=0.01)
    relative = figures_of(pairs).metrics["relative_score"].interval
    assert relative is not None
    error = math.sqrt(0.75 * 0.25 / 39)
    assert relative.low == pytest.approx(0.75 - 2.02 * error, abs=0.003)


def test_a_ratio_is_never_negative() -> None:
    interval = (
        figures_of([pair("blue", "red")] * 4 + [pair("blue", "blue")]).metrics["relative_score"].interval
    )
    assert interval is not None
    assert interval.low == 0.0


def test_what_is_undefined_is_absent() -> None:
    figures = figures_of([pair("red", "blue")])
    assert "relative_score" not in figures.metrics
    assert figures.metrics["score"].interval is None
    assert "length_ratio" not in figures_of([pair(answer(""), "x")]).metrics


def test_nothing_is_said_of_nothing() -> None:
    with pytest.raises(ValueError, match="no answers"):
        figures_of([])
