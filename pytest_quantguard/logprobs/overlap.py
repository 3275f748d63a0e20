"""Reduces two top-K lists per position to the few sums that every divergence is made of.

P is the baseline, Q the candidate, A and B their top-K ids, S = A & B, m_Q the smallest probability in B.
Here is everything that touches all K entries; what the sums mean is in `bounds.py` and `divergence.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from pytest_quantguard.logprobs.arrays import Float32, Int32, TopLogprobs
from pytest_quantguard.logprobs.lookup import Lookup

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Block = tuple[Int32, Float32]

_BLOCK_ROWS = 64
"""Rows per pass, so that the float64 working arrays stay in the processor's cache."""

_LN2 = float(np.log(2.0))


@dataclass(frozen=True, slots=True)
class Overlap:
    """Arrays over T positions; float64 unless said otherwise.

    shared: int64, |S|. mass_p, mass_q: P(A), Q(B). shared_p, shared_q: P(S), Q(S). missing: P(A - B).
    shared_sum: sum over S of p ln(p/q). priced_sum: the same over A, with m_Q for an absent q.
    log_q_only: sum over B - A of ln q. least_log_p, least_log_q: ln m_P, ln m_Q.
    js_shared: terms of JS over S. js_priced: terms over A | B, an absent probability being the most it can
    be.
    cosine: of the probability vectors, absent as zero. lead: P's first minus its second probability.
    agreement: bool, a first token of P is a first token of Q.
    """

    shared: Int64
    mass_p: Float64
    mass_q: Float64
    shared_p: Float64
    shared_q: Float64
    missing: Float64
    shared_sum: Float64
    priced_sum: Float64
    log_q_only: Float64
    least_log_p: Float64
    least_log_q: Float64
    js_shared: Float64
    js_priced: Float64
    cosine: Float64
    lead: Float64
    agreement: Bool


def overlap(baseline: TopLogprobs, candidate: TopLogprobs) -> Overlap:
    """Both [T, K] with T >= 1, of one vocabulary, finite; K may differ and rows may be in any order."""
    p_ids, p_logprobs = _best_first(baseline)
    q_ids, q_logprobs = _best_first(candidate)
    lookup = Lookup(baseline.vocab_size)
    spans = (slice(start, start + _BLOCK_ROWS) for start in range(0, baseline.positions, _BLOCK_ROWS))
    blocks = [
        _reduce((p_ids[span], p_logprobs[span]), (q_ids[span], q_logprobs[span]), lookup) for span in spans
    ]
    names = [field.name for field in fields(Overlap)]
    return Overlap(*(np.concatenate([getattr(block, name) for block in blocks]) for name in names))


def _reduce(baseline: Block, candidate: Block, lookup: Lookup) -> Overlap:
    """The sums of some rows; ids and log-probabilities are [rows, K], best first."""
    (p_ids, p_logprobs), (q_ids, q_logprobs) = baseline, candidate
    log_p, log_q = p_logprobs.astype(np.float64), q_logprobs.astype(np.float64)
    p, q = np.exp(log_p), np.exp(log_q)
    place = lookup.find(p_ids, q_ids)
    shared = place >= 0
    # An absent id has place -1 and so takes the last, smallest entry: m_Q, the most it can have.
    log_q_at, q_at = np.take_along_axis(log_q, place, axis=1), np.take_along_axis(q, place, axis=1)
    p_shared, q_shared = np.where(shared, p, 0.0), np.where(shared, q_at, 0.0)
    log_ratio = log_p - log_q_at
    js_shared, js_priced = _js_sums((log_p, p), (log_q, q), (log_q_at, q_at), place)
    return Overlap(
        shared=shared.sum(axis=1),
        mass_p=p.sum(axis=1),
        mass_q=q.sum(axis=1),
        shared_p=p_shared.sum(axis=1),
        shared_q=q_shared.sum(axis=1),
        missing=np.where(shared, 0.0, p).sum(axis=1),
        shared_sum=_row_dot(p_shared, log_ratio),
        priced_sum=_row_dot(p, log_ratio),
        log_q_only=log_q.sum(axis=1) - np.where(shared, log_q_at, 0.0).sum(axis=1),
        least_log_p=log_p[:, -1],
        least_log_q=log_q[:, -1],
        js_shared=js_shared,
        js_priced=js_priced,
        cosine=_row_dot(p, q_shared) / np.sqrt(_row_dot(p, p) * _row_dot(q, q)),
        lead=p[:, 0] - p[:, 1] if p.shape[1] > 1 else p[:, 0],
        agreement=(shared & (log_p == log_p[:, :1]) & (log_q_at == log_q[:, :1])).any(axis=1),
    )


def _js_sums(
    p: tuple[Float64, Float64], q: tuple[Float64, Float64], q_at: tuple[Float64, Float64], place: Int64
) -> tuple[Float64, Float64]:
    """Terms of JS, float64 [rows]: over S, and over A | B with absent probabilities priced.

    p, q: (logarithms, probabilities) of each side's top-K; q_at: those of Q at the ids of A. A term grows as
    the smaller of its two probabilities shrinks, so an id outside the other top-K counts at the most it can
    have there (or as equal, term zero, where that most is larger).
    """
    shared = place >= 0
    log_cap, cap = (np.where(shared, at, np.minimum(at, own)) for at, own in zip(q_at, p, strict=True))
    term = js_term(p[0], p[1], log_cap, cap)
    in_both = np.zeros(q[0].shape, bool)
    row, column = np.nonzero(shared)
    in_both[row, place[row, column]] = True
    row, column = np.nonzero(~in_both)
    log_q_only, q_only = q[0][row, column], q[1][row, column]
    log_most, most = np.minimum(p[0][row, -1], log_q_only), np.minimum(p[1][row, -1], q_only)
    only_q = js_term(log_q_only, q_only, log_most, most)
    priced = term.sum(axis=1) + np.bincount(row, weights=only_q, minlength=q[0].shape[0])
    return np.where(shared, term, 0.0).sum(axis=1), priced


def js_term(log_a: Float64, a: Float64, log_b: Float64, b: Float64) -> Float64:
    """(a ln(a/m) + b ln(b/m)) / 2 with m = (a + b)/2, zero for a = b and stable for tiny values."""
    gap = np.abs(log_a - log_b)
    term: Float64 = 0.5 * ((a + b) * (_LN2 - np.log1p(np.exp(-gap))) - np.minimum(a, b) * gap)
    return term


def _row_dot(x: Float64, y: Float64) -> Float64:
    """float64 [rows]: inner product of each row of x with the same row of y."""
    products: Float64 = np.einsum("ij,ij->i", x, y)
    return products


def _best_first(rows: TopLogprobs) -> tuple[Int32, Float32]:
    """Ids and log-probabilities with every row in non-increasing order."""
    if bool((rows.logprobs[:, 1:] <= rows.logprobs[:, :-1]).all()):
        return rows.token_ids, rows.logprobs
    order = np.argsort(-rows.logprobs, axis=1, kind="stable")
    return np.take_along_axis(rows.token_ids, order, axis=1), np.take_along_axis(rows.logprobs, order, axis=1)
