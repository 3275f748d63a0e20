"""The speed checks on real emulator processes with a tiny model. Verdicts here are only those that no load of
this machine can turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_quantguard.results import CheckResult, RunResult, read_result

MODEL = Path(__file__).parents[1] / "data" / "models" / "bf16-tiny"
SERVER = {"backend": "emulator", "model_path": str(MODEL), "threads": 1}
SCENARIOS = [
    {"kind": "prefill_heavy", "input_tokens": 32, "requests": 8},
    {"kind": "decode_heavy", "input_tokens": 8, "output_tokens": 12, "requests": 8},
]

pytestmark = pytest.mark.slow


def gate(pytester: pytest.Pytester, candidate: dict[str, Any] | None = None, **speed: Any) -> RunResult:
    config = {
        "version": 1,
        "name": "tiny",
        "reference": SERVER,
        "candidate": {**SERVER, "quantization": "nvfp4", **(candidate or {})},
        "baseline": "baseline",
        "accuracy": {"kl_mean": {"max": 9}},
        "speed": {"scenarios": SCENARIOS, "warmup_rounds": 1, "max_scatter": 100, **speed},
    }
    (pytester.path / "gate.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    pytester.runpytest_subprocess("--quantguard-config=gate.yaml", "-k", "speed", "-p", "no:cacheprovider")
    return read_result(pytester.path / ".quantguard" / "tiny")


def cells(result: RunResult) -> dict[str, CheckResult]:
    return {check.id: check for check in result.checks}


def test_six_cells_with_all_figures(pytester: pytest.Pytester) -> None:
    found = cells(gate(pytester, rounds=2, slo={"ttft_ms": 1e5}))
    assert list(found) == [
        f"speed[{name}-{level}]" for name in ("prefill_heavy", "decode_heavy") for level in (1, 8, "max")
    ]
    for check in found.values():
        assert (check.outcome, check.message) == ("passed", "reported only: nothing is bounded")
        assert check.speed is not None
        figures = check.speed.figures
        assert figures["slo_attainment"] == 1
        assert 0 < figures["median_ttft_ms"] <= figures["p99_ttft_ms"] <= figures["p99_e2e_latency_ms"]
        rounds = check.speed.by_round
        for rate, seconds in zip(rounds["output_throughput"], rounds["duration"], strict=True):
            assert rate * seconds == pytest.approx(check.speed.output_tokens)
        assert ("p99_itl_ms" in figures) == (check.speed.scenario == "decode_heavy")
        assert check.speed.cached_tokens == 0
        assert {"idle", "foreign", "gpus", "disturbances"} <= check.speed.machine.keys()


def test_a_shared_prefix_is_served_from_the_cache(pytester: pytest.Pytester) -> None:
    scenario = {"kind": "prefill_heavy", "input_tokens": 64, "shared_prefix": 48, "requests": 4}
    (check,) = gate(pytester, rounds=2, levels=[1], scenarios=[scenario]).checks
    assert check.speed is not None
    assert check.speed.cached_tokens == 2 * 3 * 48, "the first request of each round finds it empty"


@pytest.mark.parametrize("way", ["interleaved", "in_turn"])
def test_a_slow_candidate_is_seen_beside_and_after_the_reference(pytester: pytest.Pytester, way: str) -> None:
    """With a pause of 30 times a step the candidate is not half as fast, however busy the machine."""
    slow = {"faults": ["slow_step:share=30"]}
    result = gate(
        pytester,
        slow,
        rounds=5,
        levels=["max"],
        min_speedup_vs_reference=0.5,
        reference_rounds=way,
        on_inconclusive="fail",
    )
    for check in result.checks:
        assert check.outcome == "failed"
        assert check.speed is not None
        assert check.speed.interleaved == (way == "interleaved")
        (verdict,) = check.speed.verdicts
        assert verdict.value is not None
        assert verdict.value < 0.5
    log = pytester.path / ".quantguard" / "tiny" / "server.log.1"
    assert log.exists() == (way == "in_turn"), "the candidate is started twice only where it had to make room"


def test_longer_steps_take_longer(pytester: pytest.Pytester) -> None:
    fast, slow = (
        cells(gate(pytester, {"faults": faults} if faults else None, rounds=5, levels=[8]))
        for faults in ([], ["slow_step:share=10"])
    )
    for name, check in fast.items():
        assert check.value is not None
        later = slow[name].value
        assert later is not None
        assert later > 1.5 * check.value
