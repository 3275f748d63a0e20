"""Every example config is right, and what the documentation says of it holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_quantguard.config import EmulatorServer, SglangServer
from pytest_quantguard.config_file import load_config
from pytest_quantguard.gate.plan import plan_checks

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGS = sorted(path for path in EXAMPLES.glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_example_is_right(path: Path) -> None:
    config = load_config(path)
    assert config.name == path.stem
    assert config.reference is not None
    assert config.expects_quantization
    names = [check.name for check in plan_checks(config)]
    assert len(names) == len(set(names))


def test_small_examples_share_one_baseline_and_suite() -> None:
    first, *others = (
        load_config(EXAMPLES / f"smollm2-{name}.yaml") for name in ("nvfp4", "fp8", "nvfp4-broken")
    )
    for other in others:
        assert other.baseline == first.baseline
        assert other.suite == first.suite


@pytest.mark.parametrize("name", ["smollm2-nvfp4", "smollm2-generation"])
def test_broken_example_differs_by_its_fault_only(name: str) -> None:
    good, broken = (load_config(EXAMPLES / f"{name}{end}.yaml") for end in ("", "-broken"))
    assert isinstance(broken.candidate, EmulatorServer)
    assert broken.candidate.faults
    repaired = broken.candidate.model_copy(update={"faults": []})
    assert broken.model_copy(update={"candidate": repaired, "name": good.name}) == good


def test_gpu_example_is_a_real_server() -> None:
    config = load_config(EXAMPLES / "qwen3-8b-nvfp4.yaml")
    assert isinstance(config.candidate, SglangServer)
    assert config.candidate.server_args["disable_radix_cache"] is True
    assert config.candidate.quantization == "modelopt_fp4"
