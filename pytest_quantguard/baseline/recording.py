"""What is stored of a server: prompts, and its top log-probabilities for each phase and batch size.

A *baseline* is the recording of the BF16 reference, an *accepted run* that of a quantized candidate. Both
have the same form, so that one codec, one store and one set of rules serve them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pytest_quantguard.baseline.manifest import Manifest
from pytest_quantguard.config import Phase
from pytest_quantguard.logprobs.arrays import Int32, TopLogprobs


class CellKey(NamedTuple):
    """One way of asking: the phase and the number of prompts in a request."""

    phase: Phase
    batch_size: int

    def __str__(self) -> str:
        return f"{self.phase}-bs{self.batch_size}"


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """A prompt with the reference's greedy continuation.

    token_ids: int32 [n], prompt and continuation.
    prompt_tokens: how many of them are the prompt.
    span_start: the scored span is token_ids[span_start:]; span_start >= 1.
    """

    id: str
    task: str
    token_ids: Int32
    prompt_tokens: int
    span_start: int

    @property
    def span_ids(self) -> Int32:
        """int32 [score_tokens], the reference tokens of the scored span."""
        return self.token_ids[self.span_start :]

    @property
    def prefix_ids(self) -> Int32:
        """int32 [span_start], what precedes the scored span."""
        return self.token_ids[: self.span_start]


@dataclass(frozen=True, slots=True)
class Cell:
    """The rows of every prompt for one phase and batch size, in prompt order.

    rows[i]: TopLogprobs with one row per position of prompt i's scored span.
    batches: indices of the prompts that shared a request, in order; every prompt occurs exactly once.
    """

    key: CellKey
    batches: tuple[tuple[int, ...], ...]
    rows: tuple[TopLogprobs, ...]


Cells = Mapping[CellKey, Cell]
NoiseFloor = Mapping[CellKey, Mapping[str, float]]
"""Per cell, the value of each metric between two recordings of the same server."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A whole recording in memory. What only a stored manifest has is filled in by the store."""

    manifest: Manifest
    prompts: tuple[PromptRecord, ...]
    cells: Cells
    noise_floor: NoiseFloor

    @property
    def positions(self) -> int:
        """Scored positions of one cell: those of all prompts together."""
        return sum(len(prompt.span_ids) for prompt in self.prompts)


def plan_batches(prompts: int, batch_size: int) -> tuple[tuple[int, ...], ...]:
    """Fixed composition: consecutive prompts, `batch_size` at a time; the last batch may be smaller."""
    if prompts < 1 or batch_size < 1:
        raise ValueError(
            f"need at least one prompt and a positive batch size, not {prompts} and {batch_size}"
        )
    return tuple(
        tuple(range(start, min(start + batch_size, prompts))) for start in range(0, prompts, batch_size)
    )
