"""The main job with real servers: capture a BF16 baseline, then judge real and emulated candidates by it.

KL is in nats, means over the scored positions.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pytest_quantguard.baseline.store import read_recording
from tests.integration.gating import SUITE, Gate, as_yaml, emulated, run_gate, write_prompts
from tests.integration.real_sglang.server import server_config

pytestmark = pytest.mark.sglang

ARGS = {"disable_radix_cache": True}
SPEED = {
    "rounds": 2,
    "warmup_rounds": 1,
    "levels": [1, "max"],
    "scenarios": [
        {"kind": "prefill_heavy", "input_tokens": 64, "requests": 4},
        {"kind": "decode_heavy", "input_tokens": 16, "output_tokens": 8, "requests": 4},
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gate")
    write_prompts(folder)
    return folder


@pytest.fixture(scope="module")
def real_bf16(sglang_venv: Path, smollm2: Path) -> dict[str, Any]:
    return as_yaml(server_config(sglang_venv, smollm2, server_args=ARGS))


@pytest.fixture(scope="module")
def real_fp8(sglang_venv: Path, smollm2: Path) -> dict[str, Any]:
    return as_yaml(server_config(sglang_venv, smollm2, cache="fp8_e4m3", server_args=ARGS))


@pytest.fixture(scope="module")
def captured(folder: Path, real_bf16: dict[str, Any]) -> Path:
    """The baseline of the real BF16 server."""
    baseline = folder / "real-baseline"
    config = {"reference": real_bf16, "candidate": real_bf16, "baseline": str(baseline)}
    capture = run_gate(folder, "capture", config, "--quantguard-update-baseline")
    assert (baseline / "manifest.json").is_file(), capture.output
    return baseline


@pytest.fixture(scope="module")
def emulator_captured(folder: Path) -> Path:
    """The baseline of the emulator, of the same prompts."""
    baseline = folder / "emulator-baseline"
    config = {"reference": emulated(), "candidate": emulated(), "baseline": str(baseline)}
    capture = run_gate(folder, "capture-emulator", config, "--quantguard-update-baseline")
    assert (baseline / "manifest.json").is_file(), capture.output
    return baseline


@pytest.fixture(scope="module")
def fp8_gate(folder: Path, real_fp8: dict[str, Any], captured: Path) -> Gate:
    """The real FP8-KV server, judged and accepted."""
    config = {"candidate": real_fp8, "baseline": str(captured), "speed": SPEED}
    return run_gate(folder, "real-fp8", config, "--quantguard-accept")


def show(gate: Gate, title: str) -> None:
    for key, cell in gate.cells.items():
        values = {name: round(cell.metrics[name], 5) for name in ("kl_mean", "kl_p99", "agreement")}
        cost = f"{cell.requests} requests, {cell.seconds:.1f} s"
        print(f"{title} {key[0]}-bs{key[1]} {cell.mode}: {values}, {cost}")


@pytest.mark.parametrize("number", [1, 2])
def test_bf16_against_itself(folder: Path, real_bf16: dict[str, Any], captured: Path, number: int) -> None:
    """Further starts of the same server: within a tight bound in every cell, decode forced; no noise floor
    above it."""
    config = {
        "candidate": real_bf16,
        "baseline": str(captured),
        "accuracy": {"kl_mean": {"max": 1e-3}, "agreement": {"min": 0.98}},
        "speed": SPEED if number == 1 else None,
    }
    gate = run_gate(folder, f"real-bf16-{number}", config)
    show(gate, f"real BF16, start {number}")
    assert gate.exit_code == 0, gate.failures()
    assert {key[0] for key in gate.cells} == {"prefill", "decode"}
    assert all(cell.mode == "forced" for key, cell in gate.cells.items() if key[0] == "decode")
    assert all(cell.metrics["kl_mean"] < 1e-3 for cell in gate.cells.values())
    floors = read_recording(captured).noise_floor
    print({str(key): f"{floor['kl_mean']:.1e}" for key, floor in floors.items()})
    assert {(key.phase, key.batch_size) for key in floors} == set(gate.cells)
    assert all(floor["kl_mean"] < 1e-3 for floor in floors.values())


def test_fp8_cache_is_seen_and_emulated(folder: Path, fp8_gate: Gate, emulator_captured: Path) -> None:
    """The emulator's FP8 cache costs what the real server's does, each against its own BF16."""
    show(fp8_gate, "real FP8 cache")
    assert fp8_gate.exit_code == 0, fp8_gate.failures()
    candidate = emulated(kv_cache_dtype="fp8_e4m3")
    emulated_gate = run_gate(
        folder, "emulated-fp8", {"candidate": candidate, "baseline": str(emulator_captured)}
    )
    show(emulated_gate, "emulated FP8 cache")
    for key, cell in fp8_gate.cells.items():
        real, ours = cell.metrics["kl_mean"], emulated_gate.cells[key].metrics["kl_mean"]
        assert 0.003 < real < 0.03
        assert ours == pytest.approx(real, rel=0.25)


def test_a_tight_bound_fails_the_fp8_cache_and_drift_sees_no_change(
    folder: Path, real_fp8: dict[str, Any], fp8_gate: Gate, captured: Path
) -> None:
    """A second start of the accepted server: over a bound for BF16, and unchanged since it was accepted."""
    assert fp8_gate.exit_code == 0
    accuracy = {"kl_mean": {"max": 1e-3}, "drift": {"kl_mean": {"max_increase": "10%"}}}
    gate = run_gate(
        folder, "real-fp8", {"candidate": real_fp8, "baseline": str(captured), "accuracy": accuracy}
    )
    assert gate.exit_code == 1
    assert gate.failures()
    assert all(name.startswith("accuracy[") for name in gate.failures())
    assert any(check.kind == "drift" for check in gate.result.checks)  # type: ignore[union-attr]


def test_an_ignored_quantization_is_not_quantized(
    folder: Path, sglang_venv: Path, smollm2: Path, captured: Path
) -> None:
    """This server takes the flag without a word and serves BF16."""
    candidate = as_yaml(server_config(sglang_venv, smollm2, quantization="modelopt_fp4", server_args=ARGS))
    gate = run_gate(folder, "not-quantized", {"candidate": candidate, "baseline": str(captured)})
    assert gate.exit_code == 1
    assert "not quantized" in gate.output.lower()


def test_emulated_candidates_against_the_real_baseline(
    folder: Path, captured: Path, emulator_captured: Path
) -> None:
    """An emulated BF16 candidate is close to the real reference, and NVFP4 costs the same by either
    baseline."""
    suite = SUITE | {"batch_sizes": [8]}
    bf16 = run_gate(
        folder, "emulated-bf16", {"candidate": emulated(), "baseline": str(captured), "suite": suite}
    )
    show(bf16, "emulated BF16 by the real baseline")
    assert bf16.exit_code == 0, bf16.failures()
    assert set(bf16.cells) == {("prefill", 8), ("decode", 8)}
    assert all(cell.metrics["kl_mean"] < 2e-3 for cell in bf16.cells.values())
    kl = {}
    for name, baseline in (("real", captured), ("emulated", emulator_captured)):
        config = {"candidate": emulated(quantization="nvfp4"), "baseline": str(baseline), "suite": suite}
        gate = run_gate(folder, f"nvfp4-{name}", config)
        show(gate, f"emulated NVFP4 by the {name} baseline")
        kl[name] = {key: cell.metrics["kl_mean"] for key, cell in gate.cells.items()}
    assert set(kl["real"]) == set(bf16.cells)
    for key, value in kl["real"].items():
        assert value == pytest.approx(kl["emulated"][key], rel=0.1)


def test_a_real_candidate_against_the_emulators_baseline(
    folder: Path, real_bf16: dict[str, Any], emulator_captured: Path
) -> None:
    config = {
        "candidate": real_bf16,
        "baseline": str(emulator_captured),
        "accuracy": {"kl_mean": {"max": 2e-3}},
        "suite": SUITE | {"decode_mode": "resync"},
    }
    gate = run_gate(folder, "reverse", config)
    show(gate, "real BF16 by the emulator's baseline")
    assert gate.exit_code == 0, gate.failures()
    assert all(cell.mode == "resync" for key, cell in gate.cells.items() if key[0] == "decode")


def test_without_its_baseline_nothing_passes(folder: Path, captured: Path) -> None:
    moved = captured.with_name("moved")
    shutil.move(captured, moved)
    gate = run_gate(folder, "no-baseline", {"candidate": emulated(), "baseline": str(captured)})
    shutil.move(moved, captured)
    assert gate.exit_code == 1
    assert "There is no recording at" in gate.output
