"""Every guard fires on its own defect, names prompt and position, and is silent on good rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from pytest_quantguard.logprobs.arrays import TopLogprobs
from pytest_quantguard.logprobs.belonging import (
    VocabularyMatch,
    check_quantized,
    check_row_identity,
    match_vocabularies,
)
from pytest_quantguard.logprobs.guards import GUARDS, Violation, check_rows

from .distributions import log_softmax, top

PROMPTS = ("qa-1", "mcq-7", "code-3")
CELL = "decode-bs8"


def suite(*, noise: float = 0.0, seed: int = 0, vocab: int = 500, k: int = 40) -> list[TopLogprobs]:
    """Three prompts of 12 positions; the same seed is the same model, `noise` is what a candidate adds."""
    found = []
    for prompt in range(3):
        rng = np.random.default_rng([seed, prompt])
        logits = rng.normal(size=(12, vocab)) * 4
        chosen = logits.argmax(axis=1).astype(np.int32)
        found.append(top(log_softmax(logits + rng.normal(size=logits.shape) * noise), k, chosen))
    return found


def check(rows: list[TopLogprobs]) -> list[Violation]:
    return check_rows(rows, prompt_ids=PROMPTS, reference_ids=[own.chosen_ids for own in suite()], cell=CELL)


def damaged(change: Callable[[TopLogprobs], TopLogprobs]) -> list[TopLogprobs]:
    rows = suite()
    return [rows[0], change(rows[1]), rows[2]]


def with_logprob(value: float, row: int = 5, rank: int = 2) -> Callable[[TopLogprobs], TopLogprobs]:
    def change(rows: TopLogprobs) -> TopLogprobs:
        logprobs = rows.logprobs.copy()
        logprobs[row, rank] = value
        return dataclasses.replace(rows, logprobs=logprobs)

    return change


def with_token(token: int, row: int = 5, rank: int = 2) -> Callable[[TopLogprobs], TopLogprobs]:
    def change(rows: TopLogprobs) -> TopLogprobs:
        ids = rows.token_ids.copy()
        ids[row, rank] = token if token >= 0 else ids[row, 0]
        return dataclasses.replace(rows, token_ids=ids)

    return change


def with_chosen(
    logprob: float | None = None, token: int | None = None
) -> Callable[[TopLogprobs], TopLogprobs]:
    def change(rows: TopLogprobs) -> TopLogprobs:
        ids, values = rows.chosen_ids.copy(), rows.chosen_logprobs.copy()
        if token is not None:
            ids[5] = token
        if logprob is not None:
            values[5] = logprob
        return dataclasses.replace(rows, chosen_ids=ids, chosen_logprobs=values)

    return change


def shorter(rows: TopLogprobs) -> TopLogprobs:
    return TopLogprobs(
        rows.token_ids[:-1],
        rows.logprobs[:-1],
        rows.chosen_ids[:-1],
        rows.vocab_size,
        rows.chosen_logprobs[:-1],
    )


def turned(rows: TopLogprobs) -> TopLogprobs:
    return dataclasses.replace(rows, token_ids=rows.token_ids[:, ::-1], logprobs=rows.logprobs[:, ::-1])


def flat(rows: TopLogprobs) -> TopLogprobs:
    return dataclasses.replace(unstated(rows), logprobs=np.full_like(rows.logprobs, -np.log(50_000)))


def raised(rows: TopLogprobs) -> TopLogprobs:
    return dataclasses.replace(unstated(rows), logprobs=np.minimum(rows.logprobs + 0.5, 0))


def unstated(rows: TopLogprobs) -> TopLogprobs:
    return dataclasses.replace(rows, chosen_logprobs=np.full_like(rows.chosen_logprobs, np.nan))


def test_good_rows_pass() -> None:
    assert check(suite()) == []
    assert check(suite(noise=0.5)) == []
    assert check([unstated(own) for own in suite()]) == []


@pytest.mark.parametrize(
    ("change", "guard", "parts"),
    [
        (
            with_logprob(np.nan),
            "finite",
            ["log-probability nan", "rank 2", "is not finite", "1 of 12 positions"],
        ),
        (with_logprob(np.inf), "finite", ["log-probability inf", "is not finite"]),
        (with_logprob(-np.inf, rank=39), "finite", ["log-probability -inf", "rank 39", "masked a token"]),
        (
            with_logprob(-3.4e38, rank=39),
            "sentinel",
            ["log-probability -3.4e+38", "stands for minus infinity"],
        ),
        (with_logprob(2e-6, rank=0), "at_most_zero", ["log-probability 2e-06", "no probability exceeds 1"]),
        (
            with_chosen(logprob=-np.inf),
            "finite",
            ["log-probability -inf of the scored token", "is not finite"],
        ),
        (with_chosen(logprob=-3.4e38), "sentinel", ["-3.4e+38 of the scored token"]),
        (with_chosen(logprob=0.5), "at_most_zero", ["0.5 of the scored token"]),
        (with_token(500), "token_ids", ["token id 500 lies outside the vocabulary of 500"]),
        (with_token(-1), "unique_ids", ["named twice in one row"]),
        (with_logprob(-9.0, rank=0), "order", ["rank 1 is more probable than rank 0"]),
        (with_chosen(token=499), "reference_tokens", ["scored token 499 where the reference has"]),
        (
            with_chosen(logprob=-0.7),
            "reference_logprob",
            ["has log-probability -0.7 but is", "in the row: the row"],
        ),
        (
            with_chosen(logprob=-1.0, token=499),
            "reference_logprob",
            ["the scored token 499 has log-probability -1 but is not in the row, which ends at"],
        ),
    ],
)
def test_a_single_defect_fires_its_guard(
    change: Callable[[TopLogprobs], TopLogprobs], guard: str, parts: list[str]
) -> None:
    (found,) = [violation for violation in check(damaged(change)) if violation.guard == guard]
    assert (found.prompt, found.position, found.affected, found.cell) == ("mcq-7", 5, 1, CELL)
    for part in ["decode-bs8: prompt 'mcq-7', position 5", *parts]:
        assert part in found.message
    assert guard in GUARDS


@pytest.mark.parametrize(
    ("change", "guard", "message"),
    [
        (turned, "order", "12 of 12 positions"),
        (flat, "captured_mass", "the top 40 tokens hold 0.0008 of the probability, less than 0.05"),
        (raised, "normalized", "the top 40 probabilities sum to"),
    ],
)
def test_a_defect_of_whole_rows_fires_its_guard(
    change: Callable[[TopLogprobs], TopLogprobs], guard: str, message: str
) -> None:
    (found,) = check(damaged(change))
    assert (found.guard, found.prompt, found.position) == (guard, "mcq-7", 0)
    assert message in found.message


def test_a_missing_row_fires() -> None:
    (found,) = check(damaged(shorter))
    assert (found.guard, found.prompt) == ("positions", "mcq-7")
    assert "11 rows of 40 log-probabilities where 12 scored positions are expected" in found.message
    assert found.values == {"found": 11, "expected": 12, "width": 40}


def test_zero_prompts_and_zero_positions_fire() -> None:
    (found,) = check_rows([], prompt_ids=[], reference_ids=[], cell=CELL)
    assert found.guard == "positions"
    assert "a comparison over nothing is not a pass" in found.message
    empty = suite()[0]
    for _ in range(12):
        empty = shorter(empty)
    (found,) = check_rows([empty], prompt_ids=["a"], reference_ids=[empty.chosen_ids], cell=CELL)
    assert found.guard == "positions"


def test_each_prompt_is_named_once_per_guard_with_its_count() -> None:
    def change(rows: TopLogprobs) -> TopLogprobs:
        return dataclasses.replace(
            rows, logprobs=np.where(np.arange(12)[:, None] >= 9, np.nan, rows.logprobs)
        )

    found = check([change(own) for own in suite()])
    assert [(violation.prompt, violation.position, violation.affected) for violation in found] == [
        (prompt, 9, 3) for prompt in PROMPTS
    ]


def test_permuted_answers_are_found() -> None:
    baseline, candidate = suite(), suite(noise=0.5)
    assert check_row_identity(baseline, candidate, prompt_ids=PROMPTS, cell=CELL) == []
    swapped = [candidate[0], candidate[2], candidate[1]]
    found = check_row_identity(baseline, swapped, prompt_ids=PROMPTS, cell=CELL)
    assert [(violation.prompt, violation.values["match"]) for violation in found] == [
        ("mcq-7", "prompt 'code-3'"),
        ("code-3", "prompt 'mcq-7'"),
    ]
    assert "its rows match prompt 'code-3' better than their own place" in found[0].message


@pytest.mark.parametrize(("shift", "match"), [(1, "the previous position's"), (-1, "the next position's")])
def test_shifted_rows_are_found(shift: int, match: str) -> None:
    baseline = suite()
    off = [
        dataclasses.replace(
            own, token_ids=np.roll(own.token_ids, shift, 0), logprobs=np.roll(own.logprobs, shift, 0)
        )
        for own in suite(noise=0.3)
    ]
    found = check_row_identity(baseline, off, prompt_ids=PROMPTS, cell=CELL)
    assert [violation.values["match"] for violation in found] == [match] * 3


@pytest.mark.parametrize("kind", ["flat", "unrelated", "very noisy"])
def test_broken_rows_are_not_taken_for_somebody_elses(kind: str) -> None:
    baseline = suite()
    candidate = {
        "flat": [
            dataclasses.replace(own, logprobs=np.full_like(own.logprobs, -6.2)) for own in suite(seed=1)
        ],
        "unrelated": suite(seed=2),
        "very noisy": suite(noise=6.0),
    }[kind]
    assert check_row_identity(baseline, candidate, prompt_ids=PROMPTS, cell=CELL) == []


def test_permuted_answers_are_found_across_a_padded_vocabulary() -> None:
    candidate = resized(suite(noise=0.5), 512)
    swapped = [candidate[1], candidate[0], candidate[2]]
    found = check_row_identity(suite(), swapped, prompt_ids=PROMPTS, cell=CELL)
    assert [violation.prompt for violation in found] == ["qa-1", "mcq-7"]


def test_identical_prompts_are_no_mixup() -> None:
    same = [suite()[0]] * 3
    noisy = [suite(noise=1.0)[0]] * 3
    assert check_row_identity(same, noisy, prompt_ids=PROMPTS, cell=CELL) == []


def resized(rows: list[TopLogprobs], vocab: int) -> list[TopLogprobs]:
    return [dataclasses.replace(own, vocab_size=vocab) for own in rows]


def test_equal_vocabularies_match_without_a_note() -> None:
    assert match_vocabularies(suite(), suite(), cell=CELL) == VocabularyMatch(500, None)


def test_padding_is_compared_over_the_smaller_with_a_note() -> None:
    for baseline, candidate in ((500, 512), (512, 500)):
        match = match_vocabularies(resized(suite(), baseline), resized(suite(), candidate), cell=CELL)
        assert isinstance(match, VocabularyMatch)
        assert match.size == 500
        assert match.note is not None
        assert "the last 12 of the larger pad it to a multiple of 64 and occur in no row" in match.note


@pytest.mark.parametrize(
    ("vocab", "reason"),
    [(501, "1 more are no padding to a round size"), (64_000, "63500 more are no padding")],
)
def test_other_vocabularies_are_refused(vocab: int, reason: str) -> None:
    found = match_vocabularies(suite(), resized(suite(), vocab), cell=CELL)
    assert isinstance(found, Violation)
    assert found.guard == "vocabulary"
    assert f"has {vocab} entries where the baseline has 500" in found.message
    assert reason in found.message


def test_an_id_in_the_padding_is_refused() -> None:
    used = resized(suite(), 512)
    used[1] = with_token(505)(used[1])
    found = match_vocabularies(suite(), used, cell=CELL)
    assert isinstance(found, Violation)
    assert "token id 505 is used" in found.message


@pytest.mark.parametrize(
    ("kl_mean", "floor", "fires"),
    [(0.0, 0.0, True), (1e-6, 0.0, False), (5e-4, 4e-4, True), (7e-4, 4e-4, False), (0.0, 1e-3, True)],
)
def test_a_candidate_that_equals_the_reference_is_not_quantized(
    kl_mean: float, floor: float, fires: bool
) -> None:
    found = check_quantized(kl_mean=kl_mean, noise_floor=floor, cell=CELL)
    assert (found is not None) == fires
    if found is not None:
        assert found.guard == "quantized"
        assert "may have ignored its quantization flag" in found.message


def test_check_rows_refuses_lists_of_other_lengths() -> None:
    with pytest.raises(ValueError, match="3 rows, 2 names and 3 spans do not match"):
        check_rows(
            suite(), prompt_ids=PROMPTS[:2], reference_ids=[own.chosen_ids for own in suite()], cell=CELL
        )
