"""Measurements on the emulator's own engine with a tiny model: real arithmetic, caches and batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pytest_quantguard.baseline.recording import CellKey, PromptRecord
from pytest_quantguard.logprobs.divergence import Divergence
from pytest_quantguard.measure.cells import measure_cell
from pytest_quantguard.measure.comparison import compare_cells
from pytest_quantguard.measure.continuation import continue_prompts
from pytest_quantguard.measure.decode import DecodeChoice
from pytest_quantguard.prompts.prompt import Prompt

from .engine_client import EngineClient, engine_client

TINY = Path(__file__).parents[1] / "data" / "models" / "bf16-tiny"
SPAN = 16
WIDTH = 64
FORCED, RESYNC = DecodeChoice("forced"), DecodeChoice("resync", context_length=512)


@pytest.fixture(scope="module")
def reference() -> Iterator[EngineClient]:
    with engine_client(TINY) as client:
        yield client


@pytest.fixture(scope="module")
def prompts(reference: EngineClient) -> tuple[PromptRecord, ...]:
    generator = np.random.default_rng(0)
    sources = [
        Prompt(f"p{index}", "qa", token_ids=tuple(generator.integers(3, 500, 12 + 5 * (index % 7)).tolist()))
        for index in range(12)
    ]
    return continue_prompts(reference, sources, score_tokens=SPAN, batch_size=8)


def cell(client: EngineClient, prompts, phase: str, size: int, *, decode=FORCED, warm: bool = False):
    return measure_cell(client, prompts, CellKey(phase, size), top_logprobs=WIDTH, decode=decode, warm=warm)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_forced_decode_at_bf16_equals_prefill(reference: EngineClient, prompts, size: int) -> None:
    prefill, decode = cell(reference, prompts, "prefill", size), cell(reference, prompts, "decode", size)
    divergence = compare_cells(prefill.cell, decode.cell).divergence
    assert divergence.positions == 12 * SPAN
    assert divergence.kl.max() < 5e-4
    for one, other in zip(prefill.cell.rows, decode.cell.rows, strict=True):
        assert np.abs(one.chosen_logprobs - other.chosen_logprobs).max() < 0.03
    assert decode.cost.requests == len(decode.cell.batches)


@pytest.mark.parametrize("quantization", [None, "nvfp4"])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_resync_measures_what_forced_measures(prompts, size: int, quantization: str | None) -> None:
    """With a prefix cache a restart finds the keys and values of the decode steps before it."""
    with engine_client(TINY, quantization=quantization) as client:
        forced = cell(client, prompts, "decode", size)
        resync = cell(client, prompts, "decode", size, decode=RESYNC)
    divergence = compare_cells(forced.cell, resync.cell).divergence
    assert divergence.positions == 12 * SPAN
    if quantization is None:
        assert divergence.kl.max() == 0
    else:
        assert_rounding(divergence)
    assert forced.cost.requests <= resync.cost.requests <= SPAN * len(forced.cell.batches)
    if quantization is not None:
        # It does disagree with the reference, so that there was something to restart from.
        assert resync.cost.requests > 2 * forced.cost.requests
        assert resync.decoded_share < forced.decoded_share


def test_resync_without_a_prefix_cache_computes_the_prefix_anew(prompts) -> None:
    """Restarts then stand on keys and values of prefill: the same to within what rounding makes of them."""
    with engine_client(TINY, quantization="nvfp4", radix_cache=False) as client:
        forced = cell(client, prompts, "decode", 8)
        resync = cell(client, prompts, "decode", 8, decode=RESYNC)
    assert resync.cost.cached_tokens == 0
    assert_rounding(compare_cells(forced.cell, resync.cell).divergence)


def assert_rounding(divergence: Divergence) -> None:
    """Equal but for a 4-bit activation that the matrix kernels of some processors round to another step in a
    smaller batch; this candidate's own KL to BF16 is 0.39."""
    assert np.mean(divergence.kl == 0) > 0.8
    assert divergence.aggregate("kl_mean") < 0.01


def test_warm_and_cold_agree_on_a_sound_server(reference: EngineClient, prompts) -> None:
    for phase in ("prefill", "decode"):
        cold, warm = cell(reference, prompts, phase, 3), cell(reference, prompts, phase, 3, warm=True)
        assert warm.cost.cached_tokens >= sum(prompt.span_start - 1 for prompt in prompts)
        assert compare_cells(cold.cell, warm.cell).divergence.kl.max() < 5e-4
