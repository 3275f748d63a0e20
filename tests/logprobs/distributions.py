"""Makes pairs of full distributions and their top-K, for tests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pytest_quantguard.logprobs.arrays import TopLogprobs

Float64 = npt.NDArray[np.float64]


def log_softmax(logits: Float64) -> Float64:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def top(logprobs: Float64, k: int, chosen: npt.NDArray[np.int32] | None = None) -> TopLogprobs:
    """The top-K rows a server would return for full log-probabilities [T, V] (float32, as on the wire)."""
    positions, vocab = logprobs.shape
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, :k]
    chosen = order[:, 0].astype(np.int32) if chosen is None else chosen
    return TopLogprobs(
        token_ids=order.astype(np.int32),
        logprobs=np.take_along_axis(logprobs, order, axis=1).astype(np.float32),
        chosen_ids=chosen,
        vocab_size=vocab,
        chosen_logprobs=logprobs[np.arange(positions), chosen].astype(np.float32),
    )


def true_kl(p: Float64, q: Float64) -> Float64:
    """KL of full log-probabilities [T, V]."""
    return (np.exp(p) * (p - q)).sum(axis=1)


def true_js(p: Float64, q: Float64) -> Float64:
    middle = np.logaddexp(p, q) - np.log(2)
    return 0.5 * (true_kl(p, middle) + true_kl(q, middle))


def as_dict(rows: TopLogprobs, position: int) -> dict[int, float]:
    pairs = zip(rows.token_ids[position], rows.logprobs[position], strict=True)
    return {int(token): float(value) for token, value in pairs}
