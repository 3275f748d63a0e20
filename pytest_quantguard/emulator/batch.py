"""What one forward pass computes: which rows belong to which sequence, and where they stand in it.

Data only. The engine makes it, the model and the cache read it, hooks see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pytest_quantguard.emulator.cache import Slot

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """One sequence's part of a forward pass.

    slot: where its keys and values are. row_start, row_stop: its rows of the batch. context_length:
    tokens that the cache held before this pass; row j has position context_length + j - row_start. chunk:
    0 for the first prefill chunk of the request, 1 for the next, and so on.
    """

    rid: str
    slot: Slot
    row_start: int
    row_stop: int
    context_length: int
    chunk: int = 0

    @property
    def length(self) -> int:
        """Tokens that the cache holds after this pass."""
        return self.context_length + self.row_stop - self.row_start


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """All rows of one forward pass, sequence after sequence.

    phase: "prefill" (any number of rows per entry) or "decode" (one row per entry).
    token_ids: int32 [rows]. positions: int32 [rows], the position in the sequence, from 0.
    logit_rows: int64 [wanted], the rows whose logits somebody asked for, ascending.
    """

    phase: Phase
    entries: tuple[BatchEntry, ...]
    token_ids: Int32
    positions: Int32
    logit_rows: Int64

    @property
    def rows(self) -> int:
        """Rows of the pass over all entries."""
        return int(self.token_ids.shape[0])

    @property
    def size(self) -> int:
        """Sequences in the pass."""
        return len(self.entries)
