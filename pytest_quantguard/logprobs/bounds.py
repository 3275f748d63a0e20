"""Divergences of distributions of which only the top-K and the reference token are known.

Notation as in `overlap.py`; c is the reference token, whose probability a server states even where it lies
outside the top-K. Every function takes and returns arrays over T positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pytest_quantguard.logprobs.arrays import TopLogprobs
from pytest_quantguard.logprobs.overlap import Overlap, js_term

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

MASS_ROUNDING = 1e-6
"""How far an unseen mass may be off: a float32 log-softmax sums to 1 within about this."""


@dataclass(frozen=True, slots=True)
class ReferenceToken:
    """What one side says of c: float64 [T] log-probability, NaN where unknown; bool [T] in the top-K."""

    logprob: Float64
    in_top: Bool


def reference_token(rows: TopLogprobs) -> ReferenceToken:
    """From the top-K where c is in it, else as the server stated it."""
    hits = rows.token_ids == rows.chosen_ids[:, None]
    in_top = np.asarray(hits.any(axis=1), bool)
    listed = np.take_along_axis(rows.logprobs, hits.argmax(axis=1)[:, None], axis=1)[:, 0]
    return ReferenceToken(np.where(in_top, listed, rows.chosen_logprobs).astype(np.float64), in_top)


def kl_bucket(sums: Overlap, vocab_size: int) -> Float64:
    """sum over S of p ln(p/q) + P' ln(P'/Q'), P' = 1 - P(S), Q' = 1 - Q(S): all outside S in one bucket.

    Never negative, never above the true KL (data-processing inequality), and blind where S is small.
    """
    hidden = vocab_size - sums.shared
    rest_p, rest_q = _unseen(sums.shared_p, hidden), _unseen(sums.shared_q, hidden)
    bound: Float64 = np.maximum(sums.shared_sum + _lump(rest_p, rest_q), 0.0)
    return bound


def kl_bound(
    sums: Overlap, p: ReferenceToken, q: ReferenceToken, *, vocab_size: int, widths: tuple[int, int]
) -> Float64:
    """The larger of two lower bounds of KL(P || Q); S and A include c wherever both sides know it.

    - the bucket, as in `kl_bucket`;
    - the price: sum over S of p ln(p/q) + sum over A - B of p ln(p/m_Q) + e_P ln(e_P / (1 - Q(S))),
      e_P = 1 - P(A): an id outside B has at most m_Q, and all outside A together at most 1 - Q(S).

    Taking c into S refines the partition and so can only raise both, and c is often the token that matters
    most.
    """
    added = ~np.isnan(p.logprob) & ~np.isnan(q.logprob) & ~(p.in_top & q.in_top)
    # A token outside a top-K has at most the smallest entry, whatever rounding says.
    log_p = np.where(p.in_top, p.logprob, np.minimum(p.logprob, sums.least_log_p))
    log_q = np.where(q.in_top, q.logprob, np.minimum(q.logprob, sums.least_log_q))
    log_p, log_q = np.where(added, log_p, 0.0), np.where(added, log_q, 0.0)
    p_added, q_added = np.where(added, np.exp(log_p), 0.0), np.where(added, np.exp(log_q), 0.0)
    gain = p_added * (log_p - log_q)
    already_priced = np.where(p.in_top, p_added * (log_p - sums.least_log_q), 0.0)

    hidden = vocab_size - sums.shared - added
    rest_p = _unseen(sums.shared_p + p_added, hidden)
    rest_q = _unseen(sums.shared_q + q_added, hidden)
    new_in_a = added & ~p.in_top
    unseen_p = _unseen(sums.mass_p + np.where(new_in_a, p_added, 0.0), vocab_size - widths[0] - new_in_a)
    bucket = sums.shared_sum + gain + _lump(rest_p, rest_q)
    priced = sums.priced_sum + gain - already_priced + _lump(unseen_p, rest_q)
    bound: Float64 = np.maximum(np.maximum(bucket, priced), 0.0)
    return bound


def kl_uniform(sums: Overlap, *, vocab_size: int, widths: tuple[int, int]) -> Float64:
    """KL of the two distributions whose unseen mass is spread evenly over their unseen ids.

    The published recipe for truncated log-probabilities; no bound in either direction.
    """
    hidden_p, hidden_q = vocab_size - widths[0], vocab_size - widths[1]
    each_p = np.maximum(_unseen(sums.mass_p, hidden_p), MASS_ROUNDING) / max(hidden_p, 1)
    each_q = np.maximum(_unseen(sums.mass_q, hidden_q), MASS_ROUNDING) / max(hidden_q, 1)
    log_each_p, log_each_q = np.log(each_p), np.log(each_q)
    only_q = widths[1] - sums.shared
    total = (
        sums.priced_sum
        + sums.missing * (sums.least_log_q - log_each_q)
        + each_p * (only_q * log_each_p - sums.log_q_only)
        + each_p * (hidden_p - only_q) * (log_each_p - log_each_q)
    )
    clamped: Float64 = np.maximum(total, 0.0)
    return clamped


def js_bound(sums: Overlap, vocab_size: int) -> Float64:
    """Lower bound of Jensen-Shannon's: the larger of one bucket outside S, and absent ids priced."""
    hidden = vocab_size - sums.shared
    lumps = [np.maximum(_unseen(mass, hidden), MASS_ROUNDING) for mass in (sums.shared_p, sums.shared_q)]
    bucket = sums.js_shared + js_term(np.log(lumps[0]), lumps[0], np.log(lumps[1]), lumps[1])
    bound: Float64 = np.clip(np.maximum(sums.js_priced, bucket), 0.0, np.log(2.0))
    return bound


def _unseen(mass: Float64, tokens: int | Int64) -> Float64:
    """1 - mass, never negative, and zero where no token is left to hold it."""
    unseen: Float64 = np.where(np.asarray(tokens) > 0, np.maximum(1.0 - mass, 0.0), 0.0)
    return unseen


def _lump(p: Float64, q: Float64) -> Float64:
    """p ln(p / q) of two lumps of mass; q at the most it may be, so that rounding cannot raise the result."""
    term: Float64 = p * np.log(np.maximum(p, np.finfo(np.float64).tiny) / (q + MASS_ROUNDING))
    return term
