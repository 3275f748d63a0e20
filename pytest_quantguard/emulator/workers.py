"""Work on several threads, split at places that do not depend on their number, so that results do not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

_BLOCK_ROWS = 32
"""So few that a block's temporaries stay in the processor's cache."""
_COLUMNS, _COLUMNS_OF_A_ROW = 192, 1536
"""Of a product of matrices, or of a row with a matrix, that are computed at once; multiples of what vector
instructions take.
"""
_WORTH_SHARING = 3_000_000
"""Multiplications, some 0.2 ms, below which waking another thread costs more than it saves."""


class Workers:
    """Threads that share work. With one thread, or little work, everything runs on the caller's own."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="emulator") if threads > 1 else None

    def each_block(self, rows: int, work: Callable[[slice], None]) -> None:
        """Call work(slice) for consecutive blocks of rows that cover range(rows); returns when all are
        done.
        """
        self._blocks(rows, _BLOCK_ROWS, work, shared=rows > 2 * _BLOCK_ROWS)

    def each_item(self, items: int, work: Callable[[slice], None]) -> None:
        """Call work(slice) for parts, at most one per thread, that cover range(items); returns when all are
        done. For work whose results do not depend on how it is split.
        """
        self._share(self._cuts(items, 1, shared=items >= 2 * self._threads), work)

    def multiply(self, values: Float32, weight: Float32, out: Float32) -> None:
        """out = values @ weight.T: float32 [rows, k] and [columns, k] -> [rows, columns]."""

        def work(columns: slice) -> None:
            np.matmul(values, weight[columns].T, out=out[:, columns])

        size = _COLUMNS_OF_A_ROW if len(values) == 1 else _COLUMNS
        self._blocks(len(weight), size, work, shared=len(values) * weight.size >= _WORTH_SHARING)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _blocks(self, items: int, size: int, work: Callable[[slice], None], *, shared: bool) -> None:
        def consecutively(part: slice) -> None:
            for first in range(part.start, part.stop, size):
                work(slice(first, min(first + size, part.stop)))

        self._share(self._cuts(items, size, shared=shared), consecutively)

    def _cuts(self, items: int, size: int, *, shared: bool) -> list[int]:
        """Where one thread's part ends and the next one's begins: multiples of `size`."""
        blocks = -(-items // size)
        parts = min(self._threads, blocks) if shared and self._pool is not None else 1
        return [min(items, size * (blocks * part // max(parts, 1))) for part in range(parts + 1)]

    def _share(self, cuts: list[int], work: Callable[[slice], None]) -> None:
        own, *others = [slice(start, stop) for start, stop in pairwise(cuts)]
        running = [self._pool.submit(_quietly, work, part) for part in others] if self._pool else []
        try:
            work(own)
        finally:
            for part in running:
                part.result()


def _quietly(work: Callable[[slice], None], part: slice) -> None:
    # numpy's error state belongs to a thread; overflow to infinity is what the arithmetic is meant to do.
    with np.errstate(all="ignore"):
        work(part)
