"""Work is split at the same places whatever the number of threads, and nothing of it is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_quantguard.emulator.threads import available_threads, claim_threads
from pytest_quantguard.emulator.workers import Workers

CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def collected(
    call: Callable[[Workers, Callable[[slice], None]], None], threads: int
) -> list[tuple[int, int]]:
    """The slices that were worked on, in order."""
    found: list[tuple[int, int]] = []
    lock = threading.Lock()

    def work(part: slice) -> None:
        with lock:
            found.append((part.start, part.stop))

    workers = Workers(threads)
    try:
        call(workers, work)
    finally:
        workers.close()
    return sorted(found)


@given(rows=st.integers(0, 700), threads=st.integers(1, 9))
def test_blocks_cover_all_rows_and_do_not_depend_on_threads(rows: int, threads: int) -> None:
    blocks = collected(lambda workers, work: workers.each_block(rows, work), threads)
    assert blocks == [(start, min(start + 32, rows)) for start in range(0, rows, 32)]


@given(items=st.integers(0, 70), threads=st.integers(1, 9))
def test_parts_cover_all_items(items: int, threads: int) -> None:
    parts = collected(lambda workers, work: workers.each_item(items, work), threads)
    assert [index for start, stop in parts for index in range(start, stop)] == list(range(items))
    assert len(parts) <= threads


@pytest.mark.parametrize(
    ("rows", "columns", "inner"), [(1, 3072, 576), (3, 700, 576), (40, 1000, 130), (300, 191, 64)]
)
def test_products_are_right_and_the_same_bits_on_any_number_of_threads(
    rows: int, columns: int, inner: int
) -> None:
    rng = np.random.default_rng(rows)
    values = rng.standard_normal((rows, inner), dtype=np.float32)
    weight = rng.standard_normal((columns, inner), dtype=np.float32)
    found = []
    for threads in (1, 2, 3, 8):
        wide = np.full((rows, columns + 5), np.nan, np.float32)
        workers = Workers(threads)
        workers.multiply(values, weight, wide[:, 2:-3])
        workers.close()
        assert np.isnan(wide[:, [0, 1, -3, -2, -1]]).all(), "only its own columns are written"
        found.append(wide[:, 2:-3])
    exact = values.astype(np.float64) @ weight.T.astype(np.float64)
    assert np.abs(found[0] - exact).max() < 1e-5 * inner
    assert all(np.array_equal(found[0], other) for other in found[1:])


def test_an_error_in_any_part_is_told_after_all_have_ended() -> None:
    ended = []

    def work(part: slice) -> None:
        if part.start == 0:
            raise ValueError("the first part")
        ended.append(part.start)

    workers = Workers(4)
    with pytest.raises(ValueError, match="the first part"):
        workers.each_item(8, work)
    workers.close()
    assert sorted(ended) == [2, 4, 6]


@pytest.mark.parametrize(
    ("limit", "threads"), [(None, CPUS), ("1", 1), ("100000", CPUS), ("0", CPUS), ("many", CPUS)]
)
def test_available_threads_heed_the_environment(
    monkeypatch: pytest.MonkeyPatch, limit: str | None, threads: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if limit is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", limit)
    assert available_threads() == threads


def test_claiming_leaves_one_thread_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1000")
    assert claim_threads() == CPUS
    assert os.environ["OPENBLAS_NUM_THREADS"] == os.environ["OMP_NUM_THREADS"] == "1"
    assert claim_threads(3) == 3


@pytest.mark.parametrize(
    "module", ["pytest_quantguard.emulator.launch", "pytest_quantguard.commands.sensitivity"]
)
def test_numpy_is_not_imported_before_threads_are_claimed(module: str) -> None:
    """The library reads the environment once."""
    code = f"import sys, {module}; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
