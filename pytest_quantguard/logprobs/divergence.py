"""How far a candidate's next-token distributions are from the baseline's, position by position.

Only the top-K of each distribution is known; what lies outside is unknown, not zero. P is the baseline, Q the
candidate, A and B their top-K ids, S = A & B; natural logarithms throughout. This module computes arrays; how
they become one number, and its name, is in `metrics.py`; whether rows may be compared at all, in `guards.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from pytest_quantguard.errors import InvalidAnswerError
from pytest_quantguard.logprobs.arrays import Float32, Int32, TopLogprobs
from pytest_quantguard.logprobs.lookup import Lookup

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

MASS_FLOOR = 1e-6
"""Unseen masses of Q below this are not told from zero: a float32 log-softmax sums to 1 within about 1e-6."""

CONFIDENT_MARGIN = 0.2
"""P's probability margin between first and second above which another first of Q is a confident flip."""

_BLOCK_ROWS = 64
_LN2 = float(np.log(2.0))


@dataclass(frozen=True, slots=True)
class Divergence:
    """Per-position arrays over T positions of one or more prompts.

    prompt: int64 [T], index of the prompt (0 from `compare`; numbered in order by `concatenate`).
    position: int64 [T], index within the prompt's scored span.
    kl: float64 [T], nats, lower bound of KL(P||Q): the larger of the bucket and the priced bound.
    kl_bucket: float64 [T], the bucket bound alone (everything outside S merged).
    kl_uniform: float64 [T], KL with each unseen mass spread evenly over the unseen vocabulary.
    js: float64 [T], nats, lower bound of the Jensen-Shannon divergence, at most ln 2.
    cosine: float64 [T], of the probability vectors over A | B, unseen taken as zero.
    agreement: bool [T], a most likely token of P is a most likely token of Q.
    confident_flip: bool [T], P's margin is above CONFIDENT_MARGIN and `agreement` is false.
    probability_shift: float64 [T], q - p of the reference token; NaN where either is unknown.
    log_probability_drop: float64 [T], ln p - ln q of the reference token; NaN where either is unknown.
    captured_mass_baseline, captured_mass_candidate: float64 [T], P(A) and Q(B).
    missing_mass: float64 [T], P(A - B), the baseline's mass on ids that the candidate did not return.
    baseline_width, candidate_width: K of each side (the smallest, after `concatenate`).
    """

    prompt: Int64
    position: Int64
    kl: Float64
    kl_bucket: Float64
    kl_uniform: Float64
    js: Float64
    cosine: Float64
    agreement: Bool
    confident_flip: Bool
    probability_shift: Float64
    log_probability_drop: Float64
    captured_mass_baseline: Float64
    captured_mass_candidate: Float64
    missing_mass: Float64
    baseline_width: int
    candidate_width: int

    @property
    def positions(self) -> int:
        """T."""
        return int(self.kl.shape[0])

    @property
    def prompts(self) -> int:
        """Number of distinct prompts."""
        return int(np.unique(self.prompt).size)

    def select(self, mask: Bool) -> Divergence:
        """The positions where `mask` (bool [T]) is true; prompt numbers are kept."""
        return Divergence(
            **{name: getattr(self, name)[mask] for name in _ARRAYS},
            baseline_width=self.baseline_width,
            candidate_width=self.candidate_width,
        )

    @staticmethod
    def concatenate(parts: Sequence[Divergence]) -> Divergence:
        """One prompt (or group of prompts) after the other; prompts are renumbered in this order.

        Raises InvalidAnswerError when there is nothing to join.
        """
        if not parts:
            raise InvalidAnswerError("no prompt was compared: a comparison over nothing is not a pass")
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
        joined["prompt"] = _renumber([part.prompt for part in parts])
        return Divergence(
            **joined,
            baseline_width=min(part.baseline_width for part in parts),
            candidate_width=min(part.candidate_width for part in parts),
        )

    def aggregate(self, name: str) -> float:
        """The metric `name` of `METRICS` over all positions.

        Raises InvalidAnswerError when no position has a value (KeyError: no such metric).
        """
        from pytest_quantguard.logprobs.metrics import METRICS

        return METRICS[name].of(self)

    def aggregates(self) -> dict[str, float]:
        """Every metric of `METRICS` that has a value here (those of unknown reference tokens may not)."""
        from pytest_quantguard.logprobs.metrics import METRICS

        return {name: metric.of(self) for name, metric in METRICS.items() if metric.known(self) > 0}


_ARRAYS = tuple(field.name for field in fields(Divergence) if not field.name.endswith("_width"))


def compare(baseline: TopLogprobs, candidate: TopLogprobs) -> Divergence:
    """Compare row by row the distributions of one prompt's span (or of any aligned rows).

    The widths K may differ. Rows are expected to have passed `guards.check_rows`; what would still make a
    number meaningless raises InvalidAnswerError: zero positions, another number of positions, other reference
    tokens, another vocabulary size, ids outside it, non-finite log-probabilities.
    """
    _check_comparable(baseline, candidate)
    p_ids, p_logprobs = _best_first(baseline)
    q_ids, q_logprobs = _best_first(candidate)
    lookup = Lookup(baseline.vocab_size)
    spans = (slice(start, start + _BLOCK_ROWS) for start in range(0, baseline.positions, _BLOCK_ROWS))
    blocks = [
        _compare_block((p_ids[span], p_logprobs[span]), (q_ids[span], q_logprobs[span]), lookup)
        for span in spans
    ]
    columns = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    p_chosen, q_chosen = chosen_logprobs(baseline), chosen_logprobs(candidate)
    return Divergence(
        prompt=np.zeros(baseline.positions, np.int64),
        position=np.arange(baseline.positions, dtype=np.int64),
        probability_shift=np.exp(q_chosen) - np.exp(p_chosen),
        log_probability_drop=p_chosen - q_chosen,
        baseline_width=baseline.width,
        candidate_width=candidate.width,
        **columns,
    )


def chosen_logprobs(rows: TopLogprobs) -> Float64:
    """float64 [T]: log-probability of `chosen_ids`, from the top-K where the server did not say, else NaN."""
    known = rows.chosen_logprobs.astype(np.float64)
    unknown = np.flatnonzero(np.isnan(known))
    if unknown.size:
        row, column = np.nonzero(rows.token_ids[unknown] == rows.chosen_ids[unknown, None])
        known[unknown[row]] = rows.logprobs[unknown[row], column]
    return known


def _compare_block(
    baseline: tuple[Int32, Float32], candidate: tuple[Int32, Float32], lookup: Lookup
) -> dict[str, npt.NDArray[np.generic]]:
    """All columns that need the top-K; inputs are ids and log-probabilities [rows, K], best first."""
    (p_ids, p_logprobs), (q_ids, q_logprobs) = baseline, candidate
    log_p, log_q = p_logprobs.astype(np.float64), q_logprobs.astype(np.float64)
    p, q = np.exp(log_p), np.exp(log_q)
    place = lookup.find(p_ids, q_ids)
    shared = place >= 0
    # An absent id has place -1 and so takes the last, smallest entry: m_Q, the most it can have.
    log_q_at, q_at = np.take_along_axis(log_q, place, axis=1), np.take_along_axis(q, place, axis=1)
    p_shared, q_shared = np.where(shared, p, 0.0), np.where(shared, q_at, 0.0)
    log_ratio = log_p - log_q_at
    counts = _Counts(lookup.vocab_size, p.shape[1], q.shape[1], shared.sum(axis=1))
    mass_p, mass_q, missing = p.sum(axis=1), q.sum(axis=1), np.where(shared, 0.0, p).sum(axis=1)
    unseen = _unseen(mass_p, counts.hidden_p), _unseen(mass_q, counts.hidden_q)
    rest = _unseen(p_shared.sum(axis=1), counts.rest), _unseen(q_shared.sum(axis=1), counts.rest)
    shared_sum, priced_sum = _row_dot(p_shared, log_ratio), _row_dot(p, log_ratio)
    bucket = np.maximum(shared_sum + _lump(rest[0], rest[1]), 0.0)
    priced = priced_sum + _lump(unseen[0], rest[1])
    log_q_only = log_q.sum(axis=1) - np.where(shared, log_q_at, 0.0).sum(axis=1)
    agreement = (shared & (log_p == log_p[:, :1]) & (log_q_at == log_q[:, :1])).any(axis=1)
    lead = p[:, 0] - p[:, 1] if p.shape[1] > 1 else p[:, 0]
    return {
        "kl": np.maximum(bucket, priced),
        "kl_bucket": bucket,
        "kl_uniform": _kl_uniform(priced_sum + missing * log_q[:, -1], missing, log_q_only, unseen, counts),
        "js": _jensen_shannon((log_p, p), (log_q, q), (log_q_at, q_at), place, rest),
        "cosine": _row_dot(p, q_shared) / np.sqrt(_row_dot(p, p) * _row_dot(q, q)),
        "agreement": agreement,
        "confident_flip": (lead > CONFIDENT_MARGIN) & ~agreement,
        "captured_mass_baseline": mass_p,
        "captured_mass_candidate": mass_q,
        "missing_mass": missing,
    }


@dataclass(frozen=True, slots=True)
class _Counts:
    """Numbers of ids. shared: int64 [rows], |S|."""

    vocab: int
    width_p: int
    width_q: int
    shared: Int64

    @property
    def hidden_p(self) -> int:
        """Outside A."""
        return self.vocab - self.width_p

    @property
    def hidden_q(self) -> int:
        """Outside B."""
        return self.vocab - self.width_q

    @property
    def rest(self) -> Int64:
        """Outside S."""
        return self.vocab - self.shared

    @property
    def only_q(self) -> Int64:
        """In B - A."""
        return self.width_q - self.shared


def _unseen(mass: Float64, tokens: int | Int64) -> Float64:
    """1 - mass, never negative, and zero where no token is left to hold it."""
    unseen: Float64 = np.where(np.asarray(tokens) > 0, np.maximum(1.0 - mass, 0.0), 0.0)
    return unseen


def _lump(p: Float64, q: Float64) -> Float64:
    """p ln(p / q) of two lumps of mass; q is floored, so that its rounding cannot raise the result."""
    term: Float64 = p * np.log(np.maximum(p, np.finfo(np.float64).tiny) / np.maximum(q, MASS_FLOOR))
    return term


def _kl_uniform(
    seen: Float64, missing: Float64, log_q_only: Float64, unseen: tuple[Float64, Float64], counts: _Counts
) -> Float64:
    """KL of the two distributions whose unseen mass is spread evenly over their unseen ids.

    seen: sum over S of p ln(p/q) plus sum over A - B of p ln p. missing: P(A - B).
    log_q_only: sum over B - A of ln q. unseen: the masses of P outside A and of Q outside B.
    """
    each_p = np.maximum(unseen[0], MASS_FLOOR) / max(counts.hidden_p, 1)
    each_q = np.maximum(unseen[1], MASS_FLOOR) / max(counts.hidden_q, 1)
    log_each_p, log_each_q = np.log(each_p), np.log(each_q)
    neither = counts.hidden_p - counts.only_q
    total = (
        seen
        - missing * log_each_q
        + each_p * (counts.only_q * log_each_p - log_q_only)
        + each_p * neither * (log_each_p - log_each_q)
    )
    clamped: Float64 = np.maximum(total, 0.0)
    return clamped


def _jensen_shannon(
    p: tuple[Float64, Float64],
    q: tuple[Float64, Float64],
    q_at: tuple[Float64, Float64],
    place: Int64,
    rest: tuple[Float64, Float64],
) -> Float64:
    """Lower bound of JS: terms over S plus the larger of one bucket for the rest, and A - B and B - A priced.

    p, q: (logarithms, probabilities) of each side's top-K; q_at: those of Q at the ids of A; rest: the masses
    outside S. A term grows as the smaller of its two probabilities shrinks, so an id outside the other top-K
    counts at the most it can have there (or as equal, term zero, where that most is larger).
    """
    shared = place >= 0
    log_cap, cap = (np.where(shared, at, np.minimum(at, own)) for at, own in zip(q_at, p, strict=True))
    term = _js_term(p[0], p[1], log_cap, cap)
    shared_sum = np.where(shared, term, 0.0).sum(axis=1)
    in_both = np.zeros(q[0].shape, bool)
    row, column = np.nonzero(shared)
    in_both[row, place[row, column]] = True
    row, column = np.nonzero(~in_both)
    log_q_only, q_only = q[0][row, column], q[1][row, column]
    log_most, most = np.minimum(p[0][row, -1], log_q_only), np.minimum(p[1][row, -1], q_only)
    only_q = _js_term(log_q_only, q_only, log_most, most)
    priced = term.sum(axis=1) + np.bincount(row, weights=only_q, minlength=q[0].shape[0])
    lump_p, lump_q = (np.maximum(mass, MASS_FLOOR) for mass in rest)
    bucket = shared_sum + _js_term(np.log(lump_p), lump_p, np.log(lump_q), lump_q)
    bound: Float64 = np.clip(np.maximum(priced, bucket), 0.0, _LN2)
    return bound


def _js_term(log_a: Float64, a: Float64, log_b: Float64, b: Float64) -> Float64:
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


def _renumber(parts: Sequence[Int64]) -> Int64:
    """Distinct prompt numbers across parts, dense and in order."""
    numbered, offset = [], 0
    for part in parts:
        distinct, dense = np.unique(part, return_inverse=True)
        numbered.append(dense.astype(np.int64) + offset)
        offset += distinct.size
    return np.concatenate(numbered)


def _check_comparable(baseline: TopLogprobs, candidate: TopLogprobs) -> None:
    if baseline.positions == 0 or candidate.positions == 0:
        raise InvalidAnswerError("zero positions to compare: a comparison over nothing is not a pass")
    if baseline.positions != candidate.positions:
        raise InvalidAnswerError(
            f"the candidate has {candidate.positions} positions where the baseline has {baseline.positions}"
        )
    if baseline.vocab_size != candidate.vocab_size:
        raise InvalidAnswerError(
            f"the candidate's vocabulary has {candidate.vocab_size} entries, the baseline's "
            f"{baseline.vocab_size}; only models with the same vocabulary can be compared"
        )
    other = np.flatnonzero(baseline.chosen_ids != candidate.chosen_ids)
    if other.size:
        at = int(other[0])
        raise InvalidAnswerError(
            f"at position {at} the candidate scored token {candidate.chosen_ids[at]}, the baseline "
            f"{baseline.chosen_ids[at]}; their distributions have different prefixes from there on"
        )
    for name, rows in (("baseline", baseline), ("candidate", candidate)):
        bad = ~np.isfinite(rows.logprobs).all(axis=1)
        if bad.any():
            raise InvalidAnswerError(
                f"non-finite log-probabilities in the {name}'s row at position {int(np.flatnonzero(bad)[0])}"
            )
        low, high = int(rows.token_ids.min()), int(rows.token_ids.max())
        if low < 0 or high >= rows.vocab_size:
            outside = low if low < 0 else high
            raise InvalidAnswerError(
                f"the {name} names token id {outside}, outside its vocabulary of {rows.vocab_size}"
            )
