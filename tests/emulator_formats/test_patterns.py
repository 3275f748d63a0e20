"""Mixed precision: which pattern decides, and what a wrong one says."""

from __future__ import annotations

import pytest

from pytest_quantguard.emulator.formats import FORMATS
from pytest_quantguard.emulator.quantize import plan_quantization
from pytest_quantguard.errors import ConfigError

MODULES = [
    f"model.layers.{layer}.{part}"
    for layer in range(2)
    for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
] + ["lm_head"]


def test_one_scheme_leaves_the_output_layer_alone() -> None:
    plan = plan_quantization("nvfp4", MODULES)
    assert plan.formats["lm_head"] == "bf16"
    assert {plan.formats[name] for name in MODULES[:-1]} == {"nvfp4"}
    assert plan.kv_cache is None


def test_no_quantization() -> None:
    assert set(plan_quantization(None, MODULES).formats.values()) == {"bf16"}


def test_the_last_match_wins() -> None:
    plan = plan_quantization(
        {"*": "fp8", "*.mlp.*": "nvfp4", "model.layers.1.*": "int8", "lm_head": "bf16"}, MODULES
    )
    assert plan.formats["model.layers.0.mlp.up_proj"] == "nvfp4"
    assert plan.formats["model.layers.0.self_attn.q_proj"] == "fp8"
    assert plan.formats["model.layers.1.mlp.up_proj"] == "int8"
    assert plan.formats["lm_head"] == "bf16"


def test_unmatched_modules_stay_unquantized_and_the_cache_has_its_own_key() -> None:
    plan = plan_quantization({"*.mlp.*": "mxfp4", "kv_cache": "fp8_e5m2"}, MODULES)
    assert plan.formats["model.layers.0.self_attn.q_proj"] == "bf16"
    assert plan.kv_cache == "fp8_e5m2"
    assert plan_quantization({"kv_cache": "bfloat16"}, MODULES).kv_cache == "bf16"


def test_a_pattern_without_match_names_the_nearest_modules() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_quantization({"model.layers.0.mlp.upp_proj": "nvfp4"}, MODULES)
    assert "'model.layers.0.mlp.upp_proj' matches no linear layer" in str(caught.value)
    assert "nearest modules: model.layers.0.mlp.up_proj" in str(caught.value)


def test_a_pattern_that_is_always_overridden_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"'\*\.up_proj' never takes effect: later patterns match all its modules"
    ):
        plan_quantization({"*.up_proj": "nvfp4", "*.mlp.*": "fp8"}, MODULES)


@pytest.mark.parametrize("quantization", ["nvfp44", {"*": "nvfp44"}])
def test_an_unknown_format_names_the_nearest_and_all(quantization: str | dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_quantization(quantization, MODULES)
    assert "unknown number format 'nvfp44' (did you mean 'nvfp4'?)" in str(caught.value)
    assert all(name in str(caught.value) for name in FORMATS)


def test_an_unknown_cache_format_lists_the_known() -> None:
    with pytest.raises(
        ConfigError, match=r"kv_cache: unknown key/value cache format 'fp8'; known: auto, bf16, fp8_e4m3"
    ):
        plan_quantization({"kv_cache": "fp8"}, MODULES)
