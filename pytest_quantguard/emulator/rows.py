"""Row-wise work on several threads: small blocks, so that a block's temporaries stay in the processor's
cache.

Element-wise work gives the same bits however the rows are split.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_BLOCK_ROWS = 32


class RowWorkers:
    """Runs a function over blocks of rows. With one thread, or few rows, on the caller's own thread."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="emulator-rows") if threads > 1 else None

    def each_block(self, rows: int, work: Callable[[slice], None]) -> None:
        """Call work(slice) for consecutive blocks that cover range(rows); returns when all are done."""
        if self._pool is None or rows <= 2 * _BLOCK_ROWS:
            _run_blocks(0, rows, work)
            return
        share = -(-rows // self._threads)
        parts = [
            self._pool.submit(_run_blocks, start, min(start + share, rows), work)
            for start in range(0, rows, share)
        ]
        for part in parts:
            part.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _run_blocks(start: int, stop: int, work: Callable[[slice], None]) -> None:
    # numpy's error state belongs to a thread; overflow to infinity is what the arithmetic is meant to do.
    with np.errstate(all="ignore"):
        for first in range(start, stop, _BLOCK_ROWS):
            work(slice(first, min(first + _BLOCK_ROWS, stop)))
