"""The claims of docs/measuring.md on the real model: minutes, and the model's package from the registry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_quantguard.baseline.recording import CellKey
from pytest_quantguard.config import SuiteConfig
from pytest_quantguard.emulator.models import resolve_model
from pytest_quantguard.emulator.tokenizer import load_tokenizer
from pytest_quantguard.measure.comparison import compare_cells
from pytest_quantguard.measure.continuation import continue_prompts
from pytest_quantguard.measure.diagnosis import diagnose
from pytest_quantguard.prompts.prompt import Prompt
from pytest_quantguard.prompts.suite import load_suite

from .engine_client import EngineClient, engine_client
from .test_faults import Reference, changes, measure, observe

pytestmark = pytest.mark.slow

KEYS = tuple(CellKey(phase, size) for phase in ("prefill", "decode") for size in (1, 8))


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    suite = load_suite(SuiteConfig(size=24, max_prompt_tokens=128), base_folder=Path())
    sources = [Prompt(one.id, one.task, token_ids=tuple(tokenizer.encode(one.text))) for one in suite]
    with engine_client(folder) as client:
        prompts = continue_prompts(client, sources, score_tokens=12, batch_size=8)
        return Reference(prompts, {key: measure(client, prompts, key).cell for key in KEYS})


@pytest.fixture(scope="module")
def candidate(folder: Path) -> Iterator[EngineClient]:
    with engine_client(folder, quantization="nvfp4", kv_cache_dtype="fp8_e4m3") as client:
        yield client


def test_forced_decode_at_bf16_equals_prefill(reference: Reference) -> None:
    for size in (1, 8):
        keys = CellKey("prefill", size), CellKey("decode", size)
        divergence = compare_cells(*(reference.cells[key] for key in keys)).divergence
        assert divergence.aggregate("kl_mean") < 2e-3
        assert divergence.aggregate("kl_max") < 0.05


@pytest.mark.parametrize(
    ("fault", "worse", "rule"),
    [
        (None, set(), None),
        ("kv_read_unscaled", {"decode"}, "decode_worse"),
        ("rows_zero_at_batch", {"batch prefill", "batch decode"}, "batch_dependent"),
        ("cached_page_stale", {"warm"}, "prefix_cache"),
        ("logprob_temperature", set(), "logits_scaled"),
    ],
)
def test_a_fault_shows_where_it_belongs(
    candidate: EngineClient, reference: Reference, fault: str | None, worse: set[str], rule: str | None
) -> None:
    candidate.switch_faults(*([fault] if fault else []))
    seen = observe(candidate, reference)
    assert changes(seen) == worse
    assert {diagnosis.rule for diagnosis in diagnose(seen)} == ({rule} if rule else set())
