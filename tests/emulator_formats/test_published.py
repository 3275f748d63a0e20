"""Published layouts other than the stored exports, made from these by renaming and requantizing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_quantguard.emulator.checkpoint import load_checkpoint
from pytest_quantguard.emulator.formats import FP8Activation, FP8Tensor, NVFP4Activation
from pytest_quantguard.emulator.quantization_config import matches, read_quantization_config

from .folders import (
    STORED,
    Tensors,
    bf16,
    copy_folder,
    damage,
    edit_json,
    f32,
    read_tensors,
    write_safetensors,
)

Q, UP, DOWN = (f"model.layers.0.{name}_proj" for name in ("self_attn.q", "mlp.up", "mlp.down"))
NVFP4_GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "input_activations": {"num_bits": 4, "type": "float", "dynamic": "local", "group_size": 16},
}


def compressed_nvfp4(tmp_path: Path, **changes: Any) -> Path:
    """The stored NVFP4 export in compressed-tensors' layout: other names, inverse global scales."""
    folder = copy_folder("modelopt-nvfp4-fp8kv-tiny", tmp_path)
    renamed: Tensors = {}
    for name, (dtype, array) in read_tensors(folder).items():
        module, _, part = name.rpartition(".")
        if part in ("weight_scale_2", "input_scale"):
            kind = "weight_global_scale" if part == "weight_scale_2" else "input_global_scale"
            renamed[f"{module}.{kind}"] = f32([np.float32(1) / array])
        elif part in ("k_scale", "v_scale"):
            renamed[f"{module.rpartition('.')[0]}.{part}"] = f32([array])
        else:
            renamed[f"{module}.weight_packed" if dtype == "U8" else name] = (dtype, array)
    write_safetensors(folder / "model.safetensors", renamed)
    (folder / "hf_quant_config.json").unlink()
    section = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": NVFP4_GROUP},
        "ignore": ["lm_head"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"},
        **changes,
    }
    edit_json(folder / "config.json", quantization_config=section)
    return folder


def test_compressed_tensors_nvfp4_equals_the_modelopt_export(tmp_path: Path) -> None:
    ours = load_checkpoint(compressed_nvfp4(tmp_path))
    reference = load_checkpoint(STORED / "modelopt-nvfp4-fp8kv-tiny")
    assert ours.kv_scales == reference.kv_scales
    assert ours.kv_cache_format == "fp8_e4m3"
    for name, linear in reference.linears.items():
        # The inverse of an inverse differs in the last bit of float32.
        assert np.allclose(ours.linears[name].weight, linear.weight, rtol=3e-7, atol=0)
        assert ours.linears[name].format == linear.format
        activation, expected = ours.linears[name].activation, linear.activation
        if name != "lm_head":
            assert isinstance(activation, NVFP4Activation)
            assert isinstance(expected, NVFP4Activation)
            assert activation.global_scale == pytest.approx(expected.global_scale, rel=3e-7)


def test_compressed_tensors_weight_only(tmp_path: Path) -> None:
    group = {**NVFP4_GROUP, "input_activations": None}
    checkpoint = load_checkpoint(compressed_nvfp4(tmp_path, config_groups={"group_0": group}))
    assert checkpoint.linears[UP].format == "nvfp4_w4a16"
    assert checkpoint.linears[UP].activation is None


def fp8_folder(
    tmp_path: Path, section: dict[str, Any], layout: str, scale_name: str = "weight_scale"
) -> Path:
    """The tiny BF16 model with FP8 weights in the named layout."""
    folder = copy_folder("bf16-tiny", tmp_path)
    plain = load_checkpoint(folder)
    changes: dict[str, tuple[str, np.ndarray] | None] = {}
    for name, linear in plain.linears.items():
        if name == "lm_head":
            continue
        tensor = FP8Tensor.quantize(linear.weight, granularity=layout)  # type: ignore[arg-type]
        changes[f"{name}.weight"] = ("F8_E4M3", tensor.codes)
        changes[f"{name}.{scale_name}"] = f32(tensor.scale)
        changes[f"{name}.input_scale"] = f32([0.02])
    damage(folder, changes)
    edit_json(folder / "config.json", quantization_config=section)
    return folder


@pytest.mark.parametrize(
    ("strategy", "dynamic", "expected_format", "expected_activation"),
    [
        ("tensor", False, "fp8_static", FP8Activation("token", float(np.float32(0.02)))),
        ("tensor", True, "fp8", FP8Activation("token")),
        ("channel", True, "fp8_per_channel", FP8Activation("token")),
        ("channel", None, "fp8_w8a16", None),
        ("block", True, "fp8_block", FP8Activation("block")),
    ],
)
def test_compressed_tensors_fp8(
    tmp_path: Path, strategy: str, dynamic: bool | None, expected_format: str, expected_activation: Any
) -> None:
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None
        if dynamic is None
        else {"num_bits": 8, "type": "float", "dynamic": dynamic},
    }
    section = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    checkpoint = load_checkpoint(fp8_folder(tmp_path, section, strategy))
    assert checkpoint.linears[UP].format == expected_format
    assert checkpoint.linears[UP].activation == expected_activation
    plain = load_checkpoint(STORED / "bf16-tiny").linears[UP].weight
    expected = FP8Tensor.quantize(plain, granularity=strategy).dequantize()  # type: ignore[arg-type]
    assert np.array_equal(checkpoint.linears[UP].weight, expected)


def test_block_fp8_as_deepseek_and_qwen_publish_it(tmp_path: Path) -> None:
    section = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [DOWN]}
    folder = fp8_folder(tmp_path, section, "block", "weight_scale_inv")
    plain = load_checkpoint(STORED / "bf16-tiny").linears
    damage(folder, {f"{DOWN}.weight": bf16(plain[DOWN].weight)})
    checkpoint = load_checkpoint(folder)
    assert checkpoint.linears[UP].format == "fp8_block"
    assert np.array_equal(checkpoint.linears[DOWN].weight, plain[DOWN].weight)
    expected = FP8Tensor.quantize(plain[UP].weight, granularity="block").dequantize()
    assert np.array_equal(checkpoint.linears[UP].weight, expected)


def test_modelopt_mixed_precision(tmp_path: Path) -> None:
    """Layers that are not listed stay as they are; each listed one has its own algorithm."""
    folder = copy_folder("modelopt-nvfp4-tiny", tmp_path)
    exported = load_checkpoint(folder, dtype="float32")
    fp8 = read_tensors(STORED / "modelopt-fp8-tiny")
    changes: dict[str, tuple[str, np.ndarray] | None] = {f"{UP}.weight_scale_2": None}
    changes.update({name: value for name, value in fp8.items() if name.startswith(UP)})
    changes.update({f"{DOWN}.{part}": None for part in ("weight_scale", "weight_scale_2", "input_scale")})
    changes[f"{DOWN}.weight"] = f32(exported.linears[DOWN].weight)
    damage(folder, changes)
    layers = {
        name: {"quant_algo": "FP8"} if name == UP else {"quant_algo": "NVFP4", "group_size": 16}
        for name in exported.linears
        if name not in ("lm_head", DOWN)
    }
    path = folder / "hf_quant_config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["quantization"] = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    path.write_text(json.dumps(content), encoding="utf-8")
    mixed = load_checkpoint(folder, dtype="float32")
    assert mixed.linears[UP].format == "fp8_static"
    assert mixed.linears[Q].format == "nvfp4"
    assert mixed.linears[DOWN].format == "bf16"
    assert np.array_equal(mixed.linears[DOWN].weight, exported.linears[DOWN].weight)


def test_a_config_in_config_json_alone_is_enough(tmp_path: Path) -> None:
    folder = copy_folder("modelopt-nvfp4-fp8kv-tiny", tmp_path)
    (folder / "hf_quant_config.json").unlink()
    checkpoint = load_checkpoint(folder)
    assert checkpoint.kv_cache_format == "fp8_e4m3"
    assert checkpoint.linears[UP].format == "nvfp4"


def test_fused_modules_use_the_largest_input_scale(tmp_path: Path) -> None:
    folder = copy_folder("modelopt-nvfp4-tiny", tmp_path)
    damage(folder, {f"{UP}.input_scale": f32(0.5)})
    checkpoint = load_checkpoint(folder)
    gate = checkpoint.linears[UP.replace("up", "gate")].activation
    assert gate == checkpoint.linears[UP].activation == NVFP4Activation(0.5)


def test_cache_scales_are_found_under_either_name(tmp_path: Path) -> None:
    folder = copy_folder("modelopt-nvfp4-fp8kv-tiny", tmp_path)
    expected = load_checkpoint(folder).kv_scales
    renamed = {
        name.replace(".k_proj.k_scale", ".k_scale").replace(".v_proj.v_scale", ".v_scale"): value
        for name, value in read_tensors(folder).items()
    }
    write_safetensors(folder / "model.safetensors", renamed)
    assert load_checkpoint(folder).kv_scales == expected
    assert expected[0] != (1.0, 1.0)


@pytest.mark.parametrize(
    ("pattern", "module", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.0", "model.layers.0.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("*.mlp.*", "model.layers.3.mlp.up_proj", True),
        ("re:.*self_attn.*", "model.layers.3.self_attn.q_proj", True),
        ("re:self_attn", "model.layers.3.self_attn.q_proj", False),
    ],
)
def test_exclusion_patterns(pattern: str, module: str, expected: bool) -> None:
    assert matches(pattern, module) is expected


def test_unquantized_folder_has_no_quantization_config() -> None:
    assert read_quantization_config(STORED / "bf16-tiny", ["lm_head"]) is None
