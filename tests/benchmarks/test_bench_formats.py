"""How long quantizing takes: activations against the matrix product they precede, weights while loading.

Run with `pytest -m benchmark_suite tests/benchmarks/test_bench_formats.py -s`. Ratios within one run; nothing
is asserted about time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np
import pytest

from pytest_quantguard.emulator.formats import FORMATS
from pytest_quantguard.emulator.formats.rounding import round_bfloat16

pytestmark = pytest.mark.benchmark_suite


def median_seconds(call: Callable[[], object], repeats: int = 15) -> float:
    """The median of `repeats` calls after one that is not counted."""
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


@pytest.mark.parametrize("rows", [1, 32, 512])
@pytest.mark.parametrize("columns", [576, 1536])
def test_activation_quantizers_against_the_product(rows: int, columns: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, columns)).astype(np.float32)
    # Many matrices in turn, as in a model: a single one would stay in the cache.
    weights = itertools.cycle(rng.standard_normal((24, 576, columns)).astype(np.float32))
    product = median_seconds(lambda: x @ next(weights).T, 24)
    shares = {
        name: median_seconds(lambda kind=kind: kind.activation(x)) / product  # type: ignore[misc]
        for name, kind in FORMATS.items()
        if kind.activation is not None
    }
    shares["bf16 rounding"] = median_seconds(lambda: round_bfloat16(x)) / product
    print(f"\n[{rows}, {columns}] x [{columns}, 576] takes {product * 1e3:.3f} ms; quantizing its input:")
    print("  " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()))
    assert all(share > 0 for share in shares.values())


def test_weights() -> None:
    weight = np.random.default_rng(0).standard_normal((1536, 576)).astype(np.float32)
    out = np.empty_like(weight)
    copy = median_seconds(lambda: np.copyto(out, weight))
    print("\nquantize and dequantize a [1536, 576] matrix, in million weights per second:")
    for name, kind in FORMATS.items():
        stored = kind.quantize([weight])[0]
        there = median_seconds(lambda kind=kind: kind.quantize([weight]), 5)  # type: ignore[misc]
        back = median_seconds(lambda stored=stored: stored.dequantize(out=out), 5)  # type: ignore[misc]
        print(f"  {name:16} {weight.size / there / 1e6:8.0f} {weight.size / back / 1e6:8.0f}")
    assert copy > 0
