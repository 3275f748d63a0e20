"""How fast the engine runs SmolLM2-135M, as ratios within one run: pytest -m benchmark_suite -s <this
file>.

Prefill and decode in BF16, NVFP4 against BF16, and, where QUANTGUARD_TORCH_PYTHON names an interpreter
that has torch and transformers, the same work by `transformers` in float32. Each measurement is a process
of its own, so that its peak memory is its own, with as many threads as OMP_NUM_THREADS says (default 1: on a
busy machine threads wait for each other). Wall-clock and CPU time are both shown: on a busy machine only the
latter means something. Nothing is asserted about time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_quantguard.emulator.models import resolve_model

pytestmark = pytest.mark.benchmark_suite

Figures = dict[str, dict[str, float]]
"""By measurement: tokens, wall and cpu seconds, peak memory in MB."""

HELPERS = Path(__file__).parent
CASES = ["prefill 1x512", "prefill 32x100", "decode 1", "decode 8", "decode 32"]


def measure(script: str, interpreter: str, *arguments: str) -> Figures:
    figures: Figures = {}
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    for case in CASES:
        done = subprocess.run(
            [interpreter, str(HELPERS / script), str(resolve_model("smollm2-135m")), case, *arguments],
            capture_output=True,
            encoding="utf-8",
            timeout=900,
            check=False,
            env=environment,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        figures[case] = json.loads(done.stdout.splitlines()[-1])
    return figures


def show(title: str, figures: Figures, against: Figures) -> None:
    print(f"\n{title}")
    for case, one in figures.items():
        other = against[case]
        rate, memory = one["tokens"] / one["wall"], one["peak"] / other["peak"]
        wall, cpu = one["wall"] / other["wall"], one["cpu"] / other["cpu"]
        print(
            f"  {case:15} {rate:8.0f} tokens/s, wall x{wall:.2f}, CPU x{cpu:.2f}, "
            f"memory {one['peak']:.0f} MB, x{memory:.2f}"
        )


def test_engine_against_torch_and_nvfp4_against_bfloat16() -> None:
    plain = measure("run_engine.py", sys.executable, "bf16")
    show("emulator, BF16 (ratios to itself)", plain, plain)
    show(
        "emulator, NVFP4 weights and activations (ratios to BF16)",
        measure("run_engine.py", sys.executable, "nvfp4"),
        plain,
    )
    interpreter = os.environ.get("QUANTGUARD_TORCH_PYTHON")
    if interpreter:
        show(
            "transformers, float32 (ratios to the emulator)",
            measure("run_transformers.py", interpreter),
            plain,
        )
