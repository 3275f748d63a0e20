"""Finds the ids of one top-K in another, row by row, through a dense table over the vocabulary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pytest_quantguard.logprobs.arrays import Int32

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

_TABLE_ROWS = 8


class Lookup:
    """A reusable table; entries are stamped with a number that only grows, so that it never needs clearing.

    Several rows are handled per numpy call, each with its own stretch of the table, to share the call's cost.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._table = np.zeros(_TABLE_ROWS * vocab_size, np.int64)
        self._next_stamp = 1  # zero is the empty table

    def find(self, wanted: Int32, among: Int32) -> Int64:
        """int64 [rows, K]: the column of `among` [rows, K'] that holds each id of `wanted`, else -1.

        Ids lie in 0 .. vocab_size - 1; `among` has no id twice in a row.
        """
        place = np.empty(wanted.shape, np.int64)
        for start in range(0, wanted.shape[0], _TABLE_ROWS):
            rows = slice(start, start + _TABLE_ROWS)
            stamps, offsets = self._write(among[rows])
            found = self._table[wanted[rows] + offsets] - stamps[:, :1]
            place[rows] = np.where(found >= 0, found, -1)
        return place

    def repeated(self, ids: Int32) -> Bool:
        """bool [rows, K]: entries of `ids` whose id occurs again later in the same row."""
        overwritten = np.empty(ids.shape, bool)
        for start in range(0, ids.shape[0], _TABLE_ROWS):
            rows = slice(start, start + _TABLE_ROWS)
            stamps, offsets = self._write(ids[rows])
            overwritten[rows] = self._table[ids[rows] + offsets] != stamps
        return overwritten

    def _write(self, ids: Int32) -> tuple[Int64, Int64]:
        """Note where each id stands: stamps int64 [rows, K], offsets of the rows int64 [rows, 1]."""
        offsets = np.arange(ids.shape[0])[:, None] * self.vocab_size
        stamps = self._next_stamp + np.arange(ids.size).reshape(ids.shape)
        self._table[ids + offsets] = stamps
        self._next_stamp += ids.size
        return stamps, offsets
