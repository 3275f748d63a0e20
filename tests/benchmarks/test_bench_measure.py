"""Requests and time of decode, forced and by resync, against one prefill pass over the same positions.

OMP_NUM_THREADS=1 pytest -m benchmark_suite tests/benchmarks/test_bench_measure.py -s

On a tiny random model, whose passes cost little: the ratios are those of many small steps. docs/measuring.md
has the same of SmolLM2 (python -m tests.measure.tables cost).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from measure.engine_client import engine_client

from pytest_quantguard.baseline.recording import CellKey
from pytest_quantguard.measure.cells import measure_cell
from pytest_quantguard.measure.continuation import continue_prompts
from pytest_quantguard.measure.decode import DecodeChoice
from pytest_quantguard.prompts.prompt import Prompt

pytestmark = pytest.mark.benchmark_suite

TINY = Path(__file__).parents[1] / "data" / "models" / "bf16-tiny"
PROMPTS, PROMPT_TOKENS, SPAN = 32, 64, 32


@pytest.mark.parametrize("quantization", [None, "fp8", "nvfp4"])
def test_decode_against_prefill(quantization: str | None) -> None:
    generator = np.random.default_rng(0)
    sources = [
        Prompt(f"p{index}", "qa", token_ids=tuple(generator.integers(3, 500, PROMPT_TOKENS).tolist()))
        for index in range(PROMPTS)
    ]
    with engine_client(TINY) as client:
        prompts = continue_prompts(client, sources, score_tokens=SPAN, batch_size=PROMPTS)
    print(f"\n{quantization or 'bf16'}: {PROMPTS} prompts x {SPAN} positions")
    with engine_client(TINY, quantization=quantization) as client:
        for size in (1, 8, 32):
            prefill = measure_cell(client, prompts, CellKey("prefill", size), top_logprobs=256)
            for mode in ("forced", "resync"):
                key, choice = CellKey("decode", size), DecodeChoice(mode, 512)
                decode = measure_cell(client, prompts, key, top_logprobs=256, decode=choice)
                ratio = decode.cost.seconds / prefill.cost.seconds
                print(
                    f"  batch {size:2}, {mode}: {decode.cost.requests:4} requests "
                    f"(prefill {prefill.cost.requests:2}), time {ratio:5.1f} x prefill, "
                    f"{decode.decoded_share:.0%} of the positions out of decode steps"
                )
                assert sum(rows.positions for rows in decode.cell.rows) == PROMPTS * SPAN
