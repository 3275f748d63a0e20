"""How far a candidate's next-token distributions are from the baseline's, position by position.

Only the top-K of each distribution is known; what lies outside is unknown, not zero. P is the baseline, Q the
candidate, A and B their top-K ids, S = A & B; natural logarithms throughout. Here are the arrays and what
callers do with them; the formulas are in `bounds.py`; how arrays become one number, and its name, is in
`metrics.py`; whether rows may be compared at all, in `guards.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from pytest_quantguard.errors import InvalidAnswerError
from pytest_quantguard.logprobs.arrays import TopLogprobs
from pytest_quantguard.logprobs.bounds import js_bound, kl_bound, kl_bucket, kl_uniform, reference_token
from pytest_quantguard.logprobs.overlap import overlap

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

CONFIDENT_MARGIN = 0.2
"""P's probability margin between first and second above which another first of Q is a confident flip."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Per-position arrays over T positions of one or more prompts.

    prompt: int64 [T], index of the prompt (0 from `compare`; numbered in order by `concatenate`).
    position: int64 [T], index within the prompt's scored span.
    kl: float64 [T], nats, lower bound of KL(P||Q), see `bounds.kl_bound`.
    kl_bucket: float64 [T], one of its parts alone: everything outside S merged.
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
    sums = overlap(baseline, candidate)
    vocab_size, widths = baseline.vocab_size, (baseline.width, candidate.width)
    p, q = reference_token(baseline), reference_token(candidate)
    return Divergence(
        prompt=np.zeros(baseline.positions, np.int64),
        position=np.arange(baseline.positions, dtype=np.int64),
        kl=kl_bound(sums, p, q, vocab_size=vocab_size, widths=widths),
        kl_bucket=kl_bucket(sums, vocab_size),
        kl_uniform=kl_uniform(sums, vocab_size=vocab_size, widths=widths),
        js=js_bound(sums, vocab_size),
        cosine=sums.cosine,
        agreement=sums.agreement,
        confident_flip=(sums.lead > CONFIDENT_MARGIN) & ~sums.agreement,
        probability_shift=np.exp(q.logprob) - np.exp(p.logprob),
        log_probability_drop=p.logprob - q.logprob,
        captured_mass_baseline=sums.mass_p,
        captured_mass_candidate=sums.mass_q,
        missing_mass=sums.missing,
        baseline_width=baseline.width,
        candidate_width=candidate.width,
    )


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
