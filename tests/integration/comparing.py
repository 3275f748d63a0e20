"""Comparing two sets of rows the slow and obvious way, independent of the package's own divergences."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pytest_quantguard.logprobs.arrays import TopLogprobs
from pytest_quantguard.serving.answers import GenerateRequest

STORIES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    # SmolLM2's ids of a prompt, and of a continuation that it would not choose itself
    ((504, 3575, 282, 4649, 314), (7042, 28, 253, 2240, 282, 5942, 30)),
    ((12615, 36411, 418), (582, 3822, 5027, 11098, 418, 3905, 1268, 30)),
    ((6403, 1980, 253, 655), (665, 436, 253, 2155, 17850, 47, 2034, 282)),
    ((504, 3575, 282, 4649, 314, 7042, 30, 198, 198, 504), (1980, 282, 260, 905, 314, 253, 1123, 3575)),
    ((1780,), (436, 253, 655, 28, 281, 253, 1165, 905, 411, 260, 5353, 28)),
    ((28, 284, 260, 2306), (30, 1094, 5027, 12336)),
    ((6403, 1980, 253, 655, 28, 281, 253, 1165, 905, 411, 260, 2240), (28, 665, 436, 253)),
    ((100, 200, 300, 400, 500, 600), (700, 800, 900, 1000, 1100)),
)


def forced_batch() -> list[GenerateRequest]:
    """Eight prompts of different lengths with tokens to force."""
    return [GenerateRequest(prompt, forced_ids=forced) for prompt, forced in STORIES]


def prefill_of(batch: Sequence[GenerateRequest]) -> list[GenerateRequest]:
    """The same text scored by prefill: rows for exactly the forced tokens."""
    return [
        GenerateRequest(
            (*request.input_ids, *(request.forced_ids or ())), logprob_start_len=len(request.input_ids) - 1
        )
        for request in batch
    ]


def own_differences(one: Sequence[TopLogprobs], other: Sequence[TopLogprobs]) -> np.ndarray:
    """Differences of the chosen tokens' log-probabilities, all prompts in one array."""
    return np.concatenate([a.chosen_logprobs - b.chosen_logprobs for a, b in zip(one, other, strict=True)])


def top_differences(one: TopLogprobs, other: TopLogprobs, ranks: int) -> np.ndarray:
    """Differences of each of the first `ranks` tokens of `one`, where `other` lists it too."""
    found = []
    for row in range(one.positions):
        values = dict(zip(other.token_ids[row].tolist(), other.logprobs[row].tolist(), strict=True))
        for token, value in zip(
            one.token_ids[row, :ranks].tolist(), one.logprobs[row, :ranks].tolist(), strict=True
        ):
            if token in values:
                found.append(value - values[token])
    assert len(found) >= 0.9 * ranks * one.positions
    return np.array(found)


def mean_kl(one: Sequence[TopLogprobs], other: Sequence[TopLogprobs]) -> float:
    """Mean KL(one‖other) over common tokens and one bucket for the rest."""
    values = []
    for p, q in zip(one, other, strict=True):
        for row in range(p.positions):
            a = dict(zip(p.token_ids[row].tolist(), p.logprobs[row].tolist(), strict=True))
            b = dict(zip(q.token_ids[row].tolist(), q.logprobs[row].tolist(), strict=True))
            common = a.keys() & b.keys()
            rest_p = max(1 - sum(math.exp(a[token]) for token in common), 1e-9)
            rest_q = max(1 - sum(math.exp(b[token]) for token in common), 1e-9)
            inside = sum(math.exp(a[token]) * (a[token] - b[token]) for token in common)
            values.append(inside + rest_p * math.log(rest_p / rest_q))
    return float(np.mean(values))
