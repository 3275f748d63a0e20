"""What the emulator's faults look like to the measurements: each where it belongs, and nowhere else.

On a tiny random model in the formats of the examples; its accepted run and its faulty runs are the same
binary on the same machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from pytest_quantguard.baseline.recording import Cell, CellKey, PromptRecord
from pytest_quantguard.errors import QuantguardError
from pytest_quantguard.logprobs.identity import compare_bits
from pytest_quantguard.measure.cells import CellMeasurement, measure_cell
from pytest_quantguard.measure.comparison import compare_cells, noise_floor
from pytest_quantguard.measure.consistency import compare_with_itself
from pytest_quantguard.measure.continuation import continue_prompts
from pytest_quantguard.measure.decode import DecodeChoice
from pytest_quantguard.measure.diagnosis import diagnose
from pytest_quantguard.measure.observations import Observations, clearly_worse, fit_logit_scale
from pytest_quantguard.prompts.prompt import Prompt

from .engine_client import EngineClient, engine_client

TINY = Path(__file__).parents[1] / "data" / "models" / "bf16-tiny"
FORCED = DecodeChoice("forced")
KEYS = tuple(CellKey(phase, size) for phase in ("prefill", "decode") for size in (1, 3, 8))
PREFILL, DECODE = CellKey("prefill", 1), CellKey("decode", 1)


@dataclass(frozen=True)
class Reference:
    prompts: tuple[PromptRecord, ...]
    cells: dict[CellKey, Cell]


@pytest.fixture(scope="module")
def reference() -> Reference:
    generator = np.random.default_rng(0)
    sources = [
        Prompt(f"p{index}", "qa", token_ids=tuple(generator.integers(3, 500, 20 + 6 * (index % 7)).tolist()))
        for index in range(16)
    ]
    with engine_client(TINY) as client:
        prompts = continue_prompts(client, sources, score_tokens=16, batch_size=8)
        cells = {key: measure(client, prompts, key).cell for key in KEYS}
    return Reference(prompts, cells)


SCHEMES = pytest.mark.parametrize("candidate", [None, "nvfp4"], ids=["fp8-kv", "nvfp4-fp8-kv"], indirect=True)


@pytest.fixture(scope="module")
def candidate(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    with engine_client(
        TINY, quantization=getattr(request, "param", "nvfp4"), kv_cache_dtype="fp8_e4m3"
    ) as client:
        yield client


@pytest.fixture
def faulty(candidate: EngineClient, request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    candidate.switch_faults(*request.param)
    yield candidate
    candidate.switch_faults()


def measure(client: EngineClient, prompts, key: CellKey, *, warm: bool = False) -> CellMeasurement:
    return measure_cell(client, prompts, key, top_logprobs=256, decode=FORCED, warm=warm)


def observe(client: EngineClient, reference: Reference) -> Observations:
    measured: dict[CellKey, CellMeasurement] = {}
    unusable: dict[CellKey, str] = {}
    for key in reference.cells:
        try:
            measured[key] = measure(client, reference.prompts, key)
            compare_cells(reference.cells[key], measured[key].cell)
        except QuantguardError as error:
            unusable[key] = str(error)
            measured.pop(key, None)
    warm = measure(client, reference.prompts, PREFILL, warm=True)
    again = measure(client, reference.prompts, PREFILL)
    return Observations(
        prompts=reference.prompts,
        cells={key: compare_cells(reference.cells[key], m.cell).divergence for key, m in measured.items()},
        noise=noise_floor({key: [cell] for key, cell in reference.cells.items()}),
        comparisons=(
            compare_with_itself("warm_cache", measured[PREFILL], warm, baseline=reference.cells),
            compare_with_itself("repeat", measured[PREFILL], again, baseline=reference.cells),
        ),
        logit_scales={key: fit_logit_scale(reference.cells[key], m.cell) for key, m in measured.items()},
        unusable=unusable,
    )


def changes(seen: Observations) -> set[str]:
    """Which of decode against prefill, batch 8 against 1 in either phase, and warm against cold are worse."""
    warm = seen.comparisons[0]
    pairs = {
        "decode": (seen.cells[PREFILL], seen.cells[DECODE]),
        "batch prefill": (seen.cells[PREFILL], seen.cells[CellKey("prefill", 8)]),
        "batch decode": (seen.cells[DECODE], seen.cells[CellKey("decode", 8)]),
        "warm": (warm.before, warm.after),
    }
    return {name for name, pair in pairs.items() if clearly_worse(*pair, noise=seen.noise_of(PREFILL))}


@SCHEMES
def test_a_sound_candidate_shows_no_pattern(candidate: EngineClient, reference: Reference) -> None:
    seen = observe(candidate, reference)
    assert all(divergence.aggregate("kl_mean") > 0.005 for divergence in seen.cells.values())
    assert changes(seen) == set()
    assert diagnose(seen) == ()


@SCHEMES
@pytest.mark.parametrize(
    "faulty",
    [("decode_position_off_by_one",), ("kv_read_unscaled",)],
    ids=["position", "unscaled"],
    indirect=True,
)
def test_a_decode_fault_shows_in_decode_only(faulty: EngineClient, reference: Reference) -> None:
    seen = observe(faulty, reference)
    assert changes(seen) == {"decode"}
    found = diagnose(seen)
    assert [diagnosis.rule for diagnosis in found] == ["decode_worse"]
    assert "Decode is worse than prefill" in found[0].sentence


@SCHEMES
@pytest.mark.parametrize("faulty", [("cached_page_stale",)], ids=["page"], indirect=True)
def test_a_cache_fault_shows_in_the_warm_check_only(faulty: EngineClient, reference: Reference) -> None:
    seen = observe(faulty, reference)
    assert changes(seen) == {"warm"}
    assert [diagnosis.rule for diagnosis in diagnose(seen)] == ["prefix_cache"]


@SCHEMES
@pytest.mark.parametrize("faulty", [("rows_zero_at_batch:every=2",)], ids=["rows"], indirect=True)
def test_a_batch_fault_shows_in_batches_only(faulty: EngineClient, reference: Reference) -> None:
    seen = observe(faulty, reference)
    assert changes(seen) == {"batch prefill", "batch decode"}
    found = diagnose(seen)
    assert {diagnosis.rule for diagnosis in found} == {"batch_dependent"}
    assert all("from batch size 8 on" in diagnosis.sentence for diagnosis in found)


@pytest.mark.parametrize("faulty", [("nan_at_batch",)], ids=["nan"], indirect=True)
def test_answers_that_are_unusable_at_some_batch_sizes(faulty: EngineClient, reference: Reference) -> None:
    found = diagnose(observe(faulty, reference))
    assert [diagnosis.rule for diagnosis in found] == ["unusable_answers"]
    assert "in decode from batch size 3 on" in found[0].sentence


@pytest.mark.parametrize("faulty", [("logprob_temperature",)], ids=["temperature"], indirect=True)
def test_a_temperature_is_named(faulty: EngineClient, reference: Reference) -> None:
    found = diagnose(observe(faulty, reference))
    assert [diagnosis.rule for diagnosis in found] == ["logits_scaled"]
    assert "temperature of about 0.80" in found[0].sentence


@pytest.mark.parametrize("faulty", [("lm_head_zero",)], ids=["head"], indirect=True)
def test_a_dead_output_layer_is_called_destroyed(faulty: EngineClient, reference: Reference) -> None:
    assert [diagnosis.rule for diagnosis in diagnose(observe(faulty, reference))] == ["output_destroyed"]


def test_two_percent_of_one_scale_hide_from_bf16_and_not_from_the_accepted_run(reference: Reference) -> None:
    with engine_client(TINY, quantization="nvfp4", kv_cache_dtype="fp8_e4m3") as client:
        accepted, again = (measure(client, reference.prompts, PREFILL).cell for _ in range(2))
        client.switch_faults("global_scale_drift")
        changed = measure(client, reference.prompts, PREFILL).cell
    assert compare_bits(accepted.rows, again.rows).share == 1
    before, after = (compare_cells(reference.cells[PREFILL], one).divergence for one in (accepted, changed))
    assert abs(after.kl.mean() / before.kl.mean() - 1) < 0.1
    assert clearly_worse(before, after, noise=0) is None
    assert compare_bits(accepted.rows, changed.rows).share < 0.01
    assert compare_cells(accepted, changed).divergence.aggregate("kl_mean") > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "fp8", "nvfp4_w4a16", "nvfp4"])
def test_twenty_clean_runs_raise_no_alarm(reference: Reference, quantization: str | None) -> None:
    """Bounds at twice the first run's values; every run a fresh engine, with one thread or two."""
    bounds: dict[CellKey, float] = {}
    for run in range(20):
        with engine_client(
            TINY, quantization=quantization, kv_cache_dtype="fp8_e4m3", threads=1 + run % 2
        ) as client:
            seen = observe(client, reference)
        values = {key: divergence.aggregate("kl_mean") for key, divergence in seen.cells.items()}
        bounds = bounds or {key: 2 * value for key, value in values.items()}
        assert all(values[key] <= bounds[key] for key in KEYS)
        assert changes(seen) == set()
        assert diagnose(seen) == ()
