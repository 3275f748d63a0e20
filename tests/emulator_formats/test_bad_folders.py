"""Folders and files that cannot be read: each message names the file, the tensor, and what was expected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_quantguard.emulator.checkpoint import load_checkpoint
from pytest_quantguard.emulator.tensor_files import TensorFolder
from pytest_quantguard.errors import ModelError, QuantguardError

from .folders import bf16, copy_folder, damage, edit_json, f32, random_model, read_tensors, write_safetensors

UP = "model.layers.0.mlp.up_proj"


def message(folder: Path, **options: Any) -> str:
    with pytest.raises(QuantguardError) as caught:
        load_checkpoint(folder, **options)
    return str(caught.value)


def test_no_folder_no_config_no_weights(tmp_path: Path) -> None:
    assert "found no folder" in message(tmp_path / "nowhere")
    assert "it has no config.json" in message(tmp_path)
    folder = random_model(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    text = message(folder)
    assert "expected model.safetensors or model.safetensors.index.json; found pytorch_model.bin" in text
    (folder / "pytorch_model.bin").unlink()
    assert "found none. Only safetensors can be read" in message(folder)


def test_unsupported_architecture_names_the_supported(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model")
    edit_json(folder / "config.json", architectures=["MixtralForCausalLM"])
    text = message(folder)
    assert "architecture MixtralForCausalLM is not supported" in text
    assert "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM" in text


def test_truncated_file(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    assert "truncated: tensor" in message(folder)
    assert f"of {len(whole) - 1000}" in message(folder)
    path.write_bytes(whole[:5])
    assert "not a complete safetensors file: 5 bytes" in message(folder)
    path.write_bytes(whole[:100])
    assert "it is truncated or another kind of file" in message(folder)


def test_damaged_header(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes((16).to_bytes(8, "little") + b"{not json at all" + b"\0" * 64)
    assert "the safetensors header is damaged" in message(folder)
    header = json.dumps({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    assert "tensor x [4] of F32 needs 16 bytes, not 8" in message(folder)
    header = json.dumps({"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    assert "tensor x has the unknown type F4; known: F64, F32" in message(folder)


def test_shards(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model")
    tensors = read_tensors(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for shard, part in shards.items():
        write_safetensors(folder / shard, {name: tensors[name] for name in part})
    assert "2 safetensors files but no model.safetensors.index.json; fetch the model again" in message(folder)
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    load_checkpoint(folder)
    (folder / "b.safetensors").rename(folder / "c.safetensors")
    assert "1 of 2 weight files named by model.safetensors.index.json are missing: b.safetensors" in message(
        folder
    )
    (folder / "c.safetensors").rename(folder / "b.safetensors")
    index["weight_map"]["model.norm.weight"] = "a.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert "tensor model.norm.weight should be in a.safetensors, but is not there" in message(folder)
    (folder / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    assert "expected an object 'weight_map'" in message(folder)


def test_missing_tensor_and_wrong_shape(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model")
    damage(folder, {f"{UP}.weight": None})
    assert f"tensor {UP}.weight is missing from the safetensors files" in message(folder)
    damage(folder, {f"{UP}.weight": bf16(np.zeros((3, 64)))})
    assert f"tensor {UP}.weight has shape [3, 64], config.json makes it [96, 64]" in message(folder)


def test_quantized_tensor_in_an_unquantized_folder(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model")
    damage(folder, {f"{UP}.weight": ("F8_E4M3", np.zeros((96, 64), np.uint8))})
    text = message(folder)
    assert "expected BF16, F16, F32, found F8_E4M3" in text
    assert "leaves this module unquantized" in text


def test_integers_are_not_weights(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model")
    damage(folder, {"ids": ("I64", np.arange(3))})
    with pytest.raises(ModelError, match="tensor ids: expected floating-point values, found I64"):
        TensorFolder(folder).float32("ids")


def test_blocks_that_do_not_fit(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model", hidden_size=72, intermediate_size=96, num_attention_heads=4)
    text = message(folder, quantization="nvfp4")
    assert "model.layers.0.self_attn.q_proj [72, 72] cannot be stored as nvfp4" in text
    assert "must be a multiple of 16; give it another format with a pattern" in text
    assert load_checkpoint(folder, quantization="fp8_block").linears["lm_head"].format == "bf16"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"quant_algo": "INT4_AWQ"},
            "key 'quant_algo': 'INT4_AWQ' is not supported by the emulator; supported: FP8, NVFP4",
        ),
        ({"group_size": 32}, "key 'group_size': NVFP4 has a scale for every 16 elements, found 32"),
        ({"kv_cache_quant_algo": "INT8"}, "key 'kv_cache_quant_algo': 'INT8' is not supported"),
        ({"exclude_modules": "lm_head"}, "key 'exclude_modules': expected a list of names, found 'lm_head'"),
        ({"quant_algo": "MIXED_PRECISION"}, "key 'quantized_layers': expected an object, found None"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {UP: {"quant_algo": "INT8"}}},
            f"key 'quantized_layers.{UP}': 'INT8' is not supported",
        ),
    ],
)
def test_modelopt_configs_that_cannot_be_served(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    folder = copy_folder("modelopt-nvfp4-tiny", tmp_path)
    path = folder / "hf_quant_config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["quantization"].update(changes)
    path.write_text(json.dumps(content), encoding="utf-8")
    text = message(folder)
    assert str(path) in text
    assert expected in text


def test_unknown_quantization_method(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model", quantization_config={"quant_method": "awq"})
    text = message(folder)
    assert "key 'quantization_config.quant_method': 'awq' is not supported by the emulator" in text
    assert "supported: modelopt, compressed-tensors, fp8" in text


@pytest.mark.parametrize(
    ("kind", "weights", "expected"),
    [
        (
            "pack-quantized",
            {},
            "format': 'pack-quantized' is not supported by the emulator; supported: nvfp4",
        ),
        ("float-quantized", {"num_bits": 4}, "weights': '4-bit float' is not supported"),
        ("float-quantized", {"type": "int"}, "weights': '8-bit int' is not supported"),
        ("float-quantized", {"strategy": "group"}, "weights.strategy': 'group' is not supported"),
        ("float-quantized", {"strategy": None}, "supported: tensor, channel, block"),
        (
            "float-quantized",
            {"strategy": "block", "block_structure": [64, 64]},
            "weights.block_structure': [64, 64] is not supported",
        ),
        ("nvfp4-pack-quantized", {"group_size": 32}, "weights.group_size': NVFP4 has a scale for every 16"),
        ("nvfp4-pack-quantized", {"group_size": None}, "weights.group_size'"),
    ],
)
def test_compressed_tensors_configs_that_cannot_be_served(
    tmp_path: Path, kind: str, weights: dict[str, Any], expected: str
) -> None:
    whole = {"num_bits": 8, "type": "float", "strategy": "tensor", "group_size": 16, **weights}
    section = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": whole}},
        "ignore": ["lm_head"],
    }
    text = message(random_model(tmp_path / "model", quantization_config=section))
    assert "config.json" in text
    assert "quantization_config.config_groups.group_0." in text
    assert expected in text


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["input_scale", "weight_scale_2"])
def test_useless_scales_are_refused(tmp_path: Path, part: str, value: float) -> None:
    folder = copy_folder("modelopt-nvfp4-tiny", tmp_path)
    damage(folder, {f"{UP}.{part}": f32(value)})
    text = message(folder)
    assert f"tensor {UP}.{part}: expected one positive finite scale, found {value:g}" in text
    assert "quantguard check-checkpoint" in text


def test_scales_of_another_number(tmp_path: Path) -> None:
    folder = copy_folder("modelopt-nvfp4-tiny", tmp_path)
    damage(folder, {f"{UP}.input_scale": f32([1.0, 2.0])})
    assert "expected one positive finite scale, found 2 values" in message(folder)
    folder = copy_folder("modelopt-fp8-tiny", tmp_path)
    damage(folder, {f"{UP}.weight_scale": f32([1.0, 2.0])})
    assert f"tensor {UP}.weight_scale: expected [1, 1] finite scales, found [2]" in message(folder)


def test_stored_type_that_contradicts_the_config(tmp_path: Path) -> None:
    folder = copy_folder("modelopt-nvfp4-tiny", tmp_path)
    damage(folder, {f"{UP}.weight": bf16(np.zeros((256, 128)))})
    text = message(folder)
    assert f"tensor {UP}.weight: hf_quant_config.json makes it U8 [256, 64], found BF16 [256, 128]" in text


def test_quantizing_twice_and_serving_what_is_not_quantized(tmp_path: Path) -> None:
    folder = copy_folder("modelopt-nvfp4-tiny", tmp_path)
    assert "already quantized (modelopt, hf_quant_config.json), cannot become 'fp8'" in message(
        folder, quantization="fp8"
    )
    plain = random_model(tmp_path / "plain")
    assert "has no quantization config; choose a format: bf16, nvfp4" in message(
        plain, quantization="checkpoint"
    )
    assert load_checkpoint(folder, quantization="checkpoint").linears[UP].format == "nvfp4"


def test_unknown_cache_format(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model")
    assert "kv_cache_dtype: unknown key/value cache format 'fp8_e4m4'" in message(
        folder, kv_cache_dtype="fp8_e4m4"
    )
