"""The `speed` section: what it means and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_quantguard.config import EmulatorServer, GateConfig, SglangServer
from pytest_quantguard.config_file import load_config
from pytest_quantguard.config_speed import SpeedConfig
from pytest_quantguard.errors import ConfigError
from pytest_quantguard.gate.plan import plan_checks
from pytest_quantguard.gate.speed_times import fit_together

GATE = """\
version: 1
name: g
candidate: {backend: emulator, model_path: tiny}
baseline: base
accuracy: {kl_mean: {max: 1}}
"""


def speed(**values: Any) -> SpeedConfig:
    return SpeedConfig.model_validate(values)


def load(tmp_path: Path, text: str) -> GateConfig:
    (tmp_path / "gate.yaml").write_text(GATE + text, encoding="utf-8")
    return load_config(tmp_path / "gate.yaml")


def test_defaults_time_two_scenarios_at_three_levels(tmp_path: Path) -> None:
    config = load(tmp_path, "speed: {}\n")
    assert [check.name for check in plan_checks(config) if check.kind == "speed"] == [
        f"speed[{name}-{level}]" for name in ("prefill_heavy", "decode_heavy") for level in (1, 8, "max")
    ]
    assert load(tmp_path, "").speed is None


def test_rules_and_overrides() -> None:
    config = speed(
        max_slowdown="5%",
        output_tokens_per_s={"min": 100},
        overrides=[
            {"scenario": "decode_heavy", "max_slowdown": 0.2},
            {"level": "max", "ttft_p99_ms": {"max": 500}, "output_throughput": {"min": 300}},
        ],
    )
    assert config.rules_of("prefill_heavy", 1).max_slowdown == 0.05
    assert config.rules_of("decode_heavy", 8).max_slowdown == 0.2
    crowded = config.rules_of("decode_heavy", "max").bounds
    assert (crowded["output_throughput"].min, crowded["p99_ttft_ms"].max) == (300, 500)
    assert set(config.rules_of("decode_heavy", 1).bounds) == {"output_throughput"}
    assert not config.needs_reference
    assert speed(overrides=[{"min_speedup_vs_reference": 1.3}]).needs_reference


@pytest.mark.parametrize("share", ["5%", "99.5%", "100%", "150%", "1000%"])
def test_any_share_that_may_be_written_is_a_rule(share: str) -> None:
    """Also one of 100 % and more, which is a number that nobody may write without its sign."""
    written = float(share.removesuffix("%")) / 100
    for config in (speed(max_slowdown=share), speed(overrides=[{"level": 8, "max_slowdown": share}])):
        assert config.rules_of("decode_heavy", 8).max_slowdown == pytest.approx(written)


def test_a_score_of_some_scenarios_leaves_open_loops_alone() -> None:
    scenarios = [{"kind": "decode_heavy"}, {"kind": "prefill_heavy", "request_rate": 4}]
    assert speed(scenarios=scenarios, score={"scenarios": ["decode_heavy"]}).score is not None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("speed: {ttft_p98_ms: {max: 3}}", "speed.ttft_p98_ms: unknown key"),
        ("speed: {output_throughput: {max: 3}}", "output_throughput is better higher: bound it with 'min'"),
        ("speed: {ttft_p99_ms: {min: 3}}", "ttft_p99_ms is better lower: bound it with 'max'"),
        (
            "speed: {ttft_p99_ms: {max: 3}, p99_ttft_ms: {max: 4}}",
            "ttft_p99_ms and p99_ttft_ms are one figure, which can have one bound",
        ),
        ("speed: {max_slowdown: 5%, rounds: 4}", "need at least 5, fewer give no interval"),
        ("speed: {max_slowdown: fast}", "speed.max_slowdown"),
        ("speed: {levels: [0]}", "speed.levels"),
        ("speed: {levels: [all]}", "speed.levels"),
        ("speed: {scenarios: []}", "speed.scenarios"),
        ("speed: {scenarios: [{kind: chat}]}", "speed.scenarios"),
        ("speed: {scenarios: [{kind: mixed, name: 'a b'}]}", "allowed are letters, digits"),
        ("speed: {scenarios: [{kind: mixed}, {kind: mixed}]}", "two scenarios are called 'mixed'"),
        ("speed: {scenarios: [{kind: mixed, input_tokens: [9, 3]}]}", "[shortest, longest]"),
        (
            "speed: {scenarios: [{kind: prefill_heavy, shared_prefix: 2048}]}",
            "shorter than the shortest prompt",
        ),
        ("speed: {overrides: [{scenario: nobody}]}", "matches no scenario at no level"),
        ("speed: {slo: {}}", "limits nothing"),
        ("speed: {min_speedup_vs_reference: 1.3}", "need `reference`"),
        ("speed: {score: {weights: {1: 0.5, 8: 0.4}}}", "the weights sum to 0.9"),
        (
            "speed: {score: {weights: {2: 1}}}",
            "score.weights has level 2, at which 'prefill_heavy' is not timed",
        ),
        ("speed: {max_slowdown: 5}", "5 would be 500%: write 5% or 0.05"),
        ("speed: {max_slowdown: true}", "write 1% or 0.01"),
        ("speed: {rounds: 100000000000}", "speed.rounds is 100000000000"),
        ("speed: {scenarios: [{kind: mixed, requests: 100000000000}]}", "requests"),
        ("speed: {scenarios: [{kind: mixed, output_tokens: 100000000000}]}", "output_tokens"),
        ("speed: {scenarios: [{kind: decode_heavy, input_tokens: 100000000000}]}", "input_tokens"),
        ("speed: {scenarios: [{kind: mixed, request_rate: 1.0e-300}]}", "request_rate"),
        ("speed: {scenarios: [{kind: mixed, request_rate: .inf}]}", "request_rate"),
        ("speed: {score: {weights: {1: .nan, 8: 0.5, max: 0.5}}}", "should be a finite number"),
        ("speed: {score: {weights: {1: 2, 8: -1}}}", "greater than or equal to 0"),
        ("speed: {score: {correctness: [[0.9, .nan]]}}", "should be a finite number"),
        ("speed: {score: {scenarios: [x]}}", "score.scenarios names 'x'"),
        (
            "speed: {score: {}, scenarios: [{kind: prefill_heavy}, {kind: mixed, request_rate: 4}]}",
            "that of 'mixed' is the one of its arrivals (request_rate)",
        ),
        ("speed: {score: {correctness: [[0.99, 1], [0.9, 0]]}}", "rising score"),
    ],
)
def test_refusals(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text + "\n")
    assert said in " ".join(str(error.value).split())


def test_a_replayed_file_is_seen_from_the_configs_folder(tmp_path: Path) -> None:
    config = load(tmp_path, "speed: {scenarios: [{kind: replay, file: data/r.jsonl}]}\n")
    assert config.speed is not None
    assert getattr(config.speed.scenarios[0], "file", None) == tmp_path / "data" / "r.jsonl"


def sglang(**values: Any) -> SglangServer:
    return SglangServer.model_validate({"backend": "sglang", "model_path": "m", **values})


def test_which_servers_fit_together() -> None:
    emulator = EmulatorServer(backend="emulator", model_path="m")
    assert fit_together(emulator, emulator)
    assert fit_together(sglang(), emulator)
    assert not fit_together(sglang(), sglang())
    assert fit_together(sglang(devices=["0"]), sglang(devices=["1"]))
    assert not fit_together(sglang(devices=["0,1"]), sglang(devices=["1"]))
    half = {"mem_fraction_static": 0.45}
    assert fit_together(sglang(server_args=half), sglang(server_args=half))
    assert not fit_together(sglang(server_args=half), sglang(server_args={"mem_fraction_static": 0.6}))
