"""How many threads compute, and that the BLAS library is not one of those who decide it.

The emulator splits its work itself, at places that do not depend on the number of threads, and the library
computes each piece on the thread that calls it. So results are the same bits on one core and on sixty-four,
and threads sleep while they wait: those of OpenBLAS spin, which makes two of them many times slower than
one as soon as other processes want the same cores.
"""

from __future__ import annotations

import os

_LIBRARIES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def available_threads() -> int:
    """CPUs that this process may use; fewer where OMP_NUM_THREADS says so."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(count, int(limit)) if limit.isdigit() and int(limit) > 0 else count


def claim_threads(asked: int | None = None) -> int:
    """The threads to compute with, by default all available ones; the BLAS library gets one.

    Must be called before numpy is first imported: that is when the library reads the environment.
    """
    count = asked or available_threads()
    for name in _LIBRARIES:
        os.environ[name] = "1"
    return count
