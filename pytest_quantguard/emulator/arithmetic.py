"""What the emulator's numbers depend on besides model and settings: numpy, its BLAS library, the processor.

Sums of another order round differently, so two machines agree bit by bit only where this is the same.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np


def describe_arithmetic() -> str:
    """In one line: `numpy 2.4.6, scipy-openblas 0.3.31, AVX512_ICL`."""
    built = cast("dict[str, Any]", np.show_config(mode="dicts"))
    blas = built.get("Build Dependencies", {}).get("blas", {})
    found = built.get("SIMD Extensions", {}).get("found", ())
    parts = [
        f"numpy {np.__version__}",
        f"{blas.get('name', 'unknown BLAS')} {blas.get('version', '')}".strip(),
        str(found[-1]) if found else "baseline instructions",
    ]
    return ", ".join(parts)
