"""Where two recordings of the same positions are equal bit by bit.

Between runs of the same binary on the same device nothing may move; between kernels, devices or batch shapes
this says little (see docs/metrics.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pytest_quantguard.errors import InvalidAnswerError
from pytest_quantguard.logprobs.arrays import TopLogprobs

Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class BitComparison:
    """Which positions of which prompts are bit-identical.

    identical: per prompt, bool [positions]. first_affected: per prompt, the first position that differs, or
    None.
    """

    identical: tuple[Bool, ...]
    first_affected: tuple[int | None, ...]

    @property
    def share(self) -> float:
        """Bit-identical positions among all."""
        return sum(int(rows.sum()) for rows in self.identical) / sum(rows.size for rows in self.identical)

    @property
    def earliest(self) -> tuple[int, int] | None:
        """(prompt index, position) of the earliest difference in any span; None where there is none."""
        affected = [(at, prompt) for prompt, at in enumerate(self.first_affected) if at is not None]
        if not affected:
            return None
        position, prompt = min(affected)
        return prompt, position


def compare_bits(accepted: Sequence[TopLogprobs], candidate: Sequence[TopLogprobs]) -> BitComparison:
    """Compare prompt by prompt. InvalidAnswerError: other numbers of prompts or positions, or none at all."""
    if len(accepted) != len(candidate):
        raise InvalidAnswerError(f"{len(candidate)} prompts where the accepted run has {len(accepted)}")
    for prompt, (old, new) in enumerate(zip(accepted, candidate, strict=True)):
        if old.positions != new.positions:
            raise InvalidAnswerError(
                f"prompt {prompt}: {new.positions} positions where the accepted run has {old.positions}"
            )
    if not sum(rows.positions for rows in accepted):
        raise InvalidAnswerError("zero positions to compare: a comparison over nothing is not a pass")
    identical = tuple(identical_positions(old, new) for old, new in zip(accepted, candidate, strict=True))
    first = tuple(None if rows.all() else int(np.argmin(rows)) for rows in identical)
    return BitComparison(identical, first)


def identical_positions(a: TopLogprobs, b: TopLogprobs) -> Bool:
    """bool [T]: rows with the same ids and the same bits of log-probability.

    Ids of equal log-probability may stand in any order. Rows of different width differ.
    """
    if a.width != b.width:
        return np.zeros(a.positions, bool)
    same_values = (a.logprobs.view(np.int32) == b.logprobs.view(np.int32)).all(axis=1)
    same: Bool = same_values & (a.token_ids == b.token_ids).all(axis=1)
    for row in np.flatnonzero(same_values & ~same):
        first, second = (np.lexsort((rows.token_ids[row], -rows.logprobs[row])) for rows in (a, b))
        same[row] = bool((a.token_ids[row][first] == b.token_ids[row][second]).all())
    return same
