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
            _run_blocks(slice(0, rows), work)
        else:
            self._share(rows, lambda part: _run_blocks(part, work))

    def each_share(self, items: int, work: Callable[[slice], None]) -> None:
        """Call work(slice) once per thread for parts that cover range(items); returns when all are done."""
        if self._pool is None or items < 2 * self._threads:
            work(slice(0, items))
        else:
            self._share(items, work)

    def _share(self, items: int, work: Callable[[slice], None]) -> None:
        assert self._pool is not None
        share = -(-items // self._threads)
        parts = [slice(start, min(start + share, items)) for start in range(0, items, share)]
        running = [self._pool.submit(_quietly, work, part) for part in parts]
        for part in running:
            part.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _run_blocks(rows: slice, work: Callable[[slice], None]) -> None:
    for first in range(rows.start, rows.stop, _BLOCK_ROWS):
        work(slice(first, min(first + _BLOCK_ROWS, rows.stop)))


def _quietly(work: Callable[[slice], None], part: slice) -> None:
    # numpy's error state belongs to a thread; overflow to infinity is what the arithmetic is meant to do.
    with np.errstate(all="ignore"):
        work(part)
