"""The arrays that all comparisons work on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The K best tokens at each of T consecutive positions, with natural log-probabilities.

    token_ids: int32 [T, K], best first (ties in any order).
    logprobs: float32 [T, K], the log-probabilities of `token_ids`, non-increasing along K.
    chosen_ids: int32 [T], the token that follows at each position in the scored text (the reference's token).
    vocab_size: number of logits of the model, including padding rows.
    chosen_logprobs: float32 [T], log-probability of `chosen_ids`; NaN where the server did not say;
        comparisons then take it from the top K, if the token is there.
    """

    token_ids: Int32
    logprobs: Float32
    chosen_ids: Int32
    vocab_size: int
    chosen_logprobs: Float32

    def __post_init__(self) -> None:
        rows, width = self.token_ids.shape
        if self.logprobs.shape != (rows, width):
            raise ValueError(f"logprobs {self.logprobs.shape} do not match token_ids {(rows, width)}")
        if self.chosen_ids.shape != (rows,) or self.chosen_logprobs.shape != (rows,):
            raise ValueError(f"chosen_ids and chosen_logprobs must have shape ({rows},)")

    @property
    def positions(self) -> int:
        """T."""
        return int(self.token_ids.shape[0])

    @property
    def width(self) -> int:
        """K."""
        return int(self.token_ids.shape[1])
