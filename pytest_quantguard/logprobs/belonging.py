"""Whether a candidate's rows belong to what they are compared with: guards that need both sides.

Rows of another prompt, another vocabulary, or a candidate that is the reference itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pytest_quantguard.logprobs.arrays import TopLogprobs
from pytest_quantguard.logprobs.divergence import Float64, Int64, compare
from pytest_quantguard.logprobs.guards import Violation

SUSPICIOUS_JS = 0.05
"""Mean Jensen-Shannon divergence below which rows plainly belong to their prompt."""

BETTER_MATCH = 0.5
"""Another prompt's baseline must be closer than this part of the distance to the own one."""

SAMPLED_POSITIONS = 8
MAX_PADDING = 1024
PADDING_MULTIPLE = 64
NOISE_MARGIN = 1.5


def check_row_identity(
    baseline: Sequence[TopLogprobs], candidate: Sequence[TopLogprobs], *, prompt_ids: Sequence[str], cell: str
) -> list[Violation]:
    """Rows that match another prompt's baseline, or their own one position off, better than their own.

    Judged by the mean Jensen-Shannon divergence over a few positions, which is bounded, so that broken rows
    that match nothing do not count as somebody else's. Prompts that are close to their own baseline cost
    nothing more. Both sides have passed `check_rows`.
    """
    violations = []
    for i, rows in enumerate(candidate):
        own = float(_distance([(baseline[i], rows)])[0])
        alternatives = _alternatives(baseline, rows, i, prompt_ids)
        if own <= SUSPICIOUS_JS or not alternatives:
            continue
        distances = _distance([pair for _, pair in alternatives])
        best = int(np.argmin(distances))
        match, nearest = alternatives[best][0], float(distances[best])
        if nearest < BETTER_MATCH * own:
            text = (
                f"{cell}: prompt {prompt_ids[i]!r}: its rows match {match} better than their own place "
                f"(Jensen-Shannon divergence {nearest:.3g} against {own:.3g}): the answer's rows are "
                "permuted, shifted or another request's"
            )
            values: dict[str, float | int | str] = {"match": match, "own_js": own, "match_js": nearest}
            violations.append(
                Violation("row_identity", cell, prompt_ids[i], None, rows.positions, text, values)
            )
    return violations


def _alternatives(
    baseline: Sequence[TopLogprobs], rows: TopLogprobs, own: int, prompt_ids: Sequence[str]
) -> list[tuple[str, tuple[TopLogprobs, TopLogprobs]]]:
    """What `rows` might be instead, in words, with the two sides to compare."""
    found = [(f"prompt {prompt_ids[j]!r}", (other, rows)) for j, other in enumerate(baseline) if j != own]
    if rows.positions > 1:
        first, last = slice(None, -1), slice(1, None)
        expected = baseline[own]
        found.append(("the previous position's", (_part(expected, first), _part(rows, last))))
        found.append(("the next position's", (_part(expected, last), _part(rows, first))))
    return found


def _distance(pairs: Sequence[tuple[TopLogprobs, TopLogprobs]]) -> Float64:
    """float64 [pairs]: mean Jensen-Shannon divergence over evenly spaced common positions."""
    width_a, width_b = min(a.width for a, _ in pairs), min(b.width for _, b in pairs)
    positions = [_sample(min(a.positions, b.positions)) for a, b in pairs]
    vocab_size = max(rows.vocab_size for pair in pairs for rows in pair)  # they may differ by padding
    stacked_a = _stack([a for a, _ in pairs], positions, width_a, vocab_size)
    stacked_b = _stack([b for _, b in pairs], positions, width_b, vocab_size)
    owner = np.repeat(np.arange(len(pairs)), [at.size for at in positions])
    sums = np.bincount(owner, weights=compare(stacked_a, stacked_b).js, minlength=len(pairs))
    means: Float64 = sums / np.bincount(owner, minlength=len(pairs))
    return means


def _sample(positions: int) -> Int64:
    return np.unique(np.linspace(0, positions - 1, min(SAMPLED_POSITIONS, positions)).astype(np.int64))


def _stack(
    parts: Sequence[TopLogprobs], positions: Sequence[Int64], width: int, vocab_size: int
) -> TopLogprobs:
    """Some rows of several prompts as one, without their tokens: these differ between prompts by nature."""
    chosen = list(zip(parts, positions, strict=True))
    count = sum(at.size for at in positions)
    return TopLogprobs(
        token_ids=np.concatenate([rows.token_ids[at, :width] for rows, at in chosen]),
        logprobs=np.concatenate([rows.logprobs[at, :width] for rows, at in chosen]),
        chosen_ids=np.zeros(count, np.int32),
        vocab_size=vocab_size,
        chosen_logprobs=np.full(count, np.nan, np.float32),
    )


def _part(rows: TopLogprobs, positions: slice) -> TopLogprobs:
    return TopLogprobs(
        rows.token_ids[positions],
        rows.logprobs[positions],
        rows.chosen_ids[positions],
        rows.vocab_size,
        rows.chosen_logprobs[positions],
    )


@dataclass(frozen=True, slots=True)
class VocabularyMatch:
    """The size to compare over, and why it is not the size of both (None where it is)."""

    size: int
    note: str | None


def match_vocabularies(
    baseline: Sequence[TopLogprobs], candidate: Sequence[TopLogprobs], *, cell: str
) -> VocabularyMatch | Violation:
    """Accept equal vocabularies, and ones that differ only by rows that pad the larger to a round number.

    Padding: the larger size is a multiple of 64, at most 1,023 more than the smaller, and no row on either
    side names an id beyond the smaller one. To compare then, give both sides the returned size.
    """
    size_a, size_b = _vocabulary(baseline), _vocabulary(candidate)
    small, large = min(size_a, size_b), max(size_a, size_b)
    if small == large:
        return VocabularyMatch(small, None)
    highest = max(int(rows.token_ids.max()) for rows in (*baseline, *candidate) if rows.token_ids.size)
    if large % PADDING_MULTIPLE == 0 and large - small < MAX_PADDING and highest < small:
        note = (
            f"the baseline's vocabulary has {size_a} entries, the candidate's {size_b}; the last "
            f"{large - small} of the larger pad it to a multiple of {PADDING_MULTIPLE} and occur in no row, "
            f"so {small} are compared"
        )
        return VocabularyMatch(small, note)
    reason = f"token id {highest} is used"
    if highest < small:
        reason = f"{large - small} more are no padding to a round size"
    return Violation(
        "vocabulary",
        cell,
        None,
        None,
        0,
        f"{cell}: the candidate's vocabulary has {size_b} entries where the baseline has {size_a}, and "
        f"{reason}: these are different models or tokenizers; record a baseline of its own",
        {"baseline": size_a, "candidate": size_b},
    )


def _vocabulary(rows: Sequence[TopLogprobs]) -> int:
    sizes = {part.vocab_size for part in rows}
    if len(sizes) != 1:
        raise ValueError(f"one server's rows must have one vocabulary size, not {sorted(sizes)}")
    return sizes.pop()


def check_quantized(
    *, kl_mean: float, noise_floor: float, cell: str, margin: float = NOISE_MARGIN
) -> Violation | None:
    """Fires when a candidate that should be quantized equals the reference to within its noise.

    kl_mean: the candidate against the baseline. noise_floor: kl_mean between two recordings of the reference.
    A server may ignore a quantization flag that it does not know.
    """
    if kl_mean > margin * noise_floor and kl_mean > 0:
        return None
    return Violation(
        "quantized",
        cell,
        None,
        None,
        0,
        f"{cell}: the candidate should be quantized but equals the reference to within noise (kl_mean "
        f"{kl_mean:.3g}, noise floor {noise_floor:.3g}): the server may have ignored its quantization flag, "
        "or served the reference's weights",
        {"kl_mean": kl_mean, "noise_floor": noise_floor, "margin": margin},
    )
