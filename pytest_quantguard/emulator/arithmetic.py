"""What the emulator's numbers depend on besides model and settings: numpy, its BLAS, the processor, threads.

Sums of another order round differently, so two machines agree bit by bit only where this is the same.
"""

from __future__ import annotations

import os
from typing import Any, cast

import numpy as np

_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
"""In the order in which OpenBLAS heeds them."""


def available_threads() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def blas_threads() -> int:
    """Threads of a matrix product: what the environment says, otherwise all that this process may use."""
    for name in _THREAD_VARIABLES:
        text = os.environ.get(name, "")
        if text.isdigit() and int(text) > 0:
            return min(int(text), available_threads())
    return available_threads()


def describe_arithmetic() -> str:
    """In one line: `numpy 2.4.6, scipy-openblas 0.3.31, AVX512_ICL, 2 threads`."""
    built = cast("dict[str, Any]", np.show_config(mode="dicts"))
    blas = built.get("Build Dependencies", {}).get("blas", {})
    found = built.get("SIMD Extensions", {}).get("found", ())
    count = blas_threads()
    parts = [
        f"numpy {np.__version__}",
        f"{blas.get('name', 'unknown BLAS')} {blas.get('version', '')}".strip(),
        str(found[-1]) if found else "baseline instructions",
        f"{count} thread" + ("" if count == 1 else "s"),
    ]
    return ", ".join(parts)
