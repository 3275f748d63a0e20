"""Model folders: what is loaded, against the exporter's own logits and against the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from pytest_quantguard.emulator.checkpoint import load_checkpoint
from pytest_quantguard.emulator.formats import FORMATS, FP8Tensor, NVFP4Tensor, PlainTensor
from pytest_quantguard.emulator.formats.minifloat import E4M3
from pytest_quantguard.emulator.formats.rounding import round_bfloat16
from pytest_quantguard.emulator.layout import fused_groups, linear_shapes, tensor_shapes
from pytest_quantguard.emulator.tensor_files import TensorFolder
from pytest_quantguard.errors import ModelError

from .folders import STORED, bf16, damage, random_model, read_tensors, write_safetensors
from .forward import forward, kl_by_prompt, mean_kl

BF16 = STORED / "bf16-tiny"
EXPORTS = ("modelopt-nvfp4-tiny", "modelopt-nvfp4-fp8kv-tiny", "modelopt-fp8-tiny")


@pytest.mark.parametrize("name", EXPORTS)
def test_modelopt_exports_reproduce_the_exporters_logits(name: str) -> None:
    reference = np.load(STORED / name / "reference.npz")
    checkpoint = load_checkpoint(STORED / name, dtype="float32")
    logits = forward(checkpoint, reference["input_ids"])
    expected = reference["quantized_logits"]
    own = mean_kl(reference["bf16_weights_logits"], expected)
    assert own > 0.01
    found = kl_by_prompt(expected, logits) / own
    assert found[1] < 1e-4, "two prompts of four at least"
    assert found.mean() < 0.02
    close = (np.abs(logits - expected).max(-1) < 1e-3).mean()
    assert close >= 0.8


def test_unquantized_folder_reproduces_the_reference() -> None:
    reference = np.load(STORED / EXPORTS[0] / "reference.npz")
    logits = forward(load_checkpoint(BF16, dtype="float32"), reference["input_ids"])
    assert np.abs(logits - reference["bf16_weights_logits"]).max() < 1e-4


def test_nvfp4_on_the_fly_equals_the_export() -> None:
    exported = load_checkpoint(STORED / "modelopt-nvfp4-tiny")
    on_the_fly = load_checkpoint(BF16, quantization="nvfp4")
    for module, linear in exported.linears.items():
        assert np.array_equal(linear.weight, on_the_fly.linears[module].weight), module


def test_fp8_on_the_fly_equals_the_export_but_for_its_bf16_quotient() -> None:
    """Model Optimizer divides BF16 weights by the scale in BF16, so its values are rounded twice."""
    exported = load_checkpoint(STORED / "modelopt-fp8-tiny")
    on_the_fly = load_checkpoint(BF16, quantization="fp8")
    plain = load_checkpoint(BF16)
    differing = 0
    for module in set(exported.linears) - {"lm_head"}:
        stored, ours = exported.quantized([module])[module], on_the_fly.quantized([module])[module]
        assert isinstance(stored, FP8Tensor)
        assert isinstance(ours, FP8Tensor)
        assert np.array_equal(stored.scale, ours.scale)
        quotient = plain.linears[module].weight / ours.scale
        assert np.array_equal(stored.codes, E4M3.encode(round_bfloat16(quotient)))
        assert np.array_equal(ours.codes, E4M3.encode(quotient))
        differing += int((stored.codes != ours.codes).sum())
    assert 0 < differing < 0.1 * sum(linear.weight.size for linear in plain.linears.values())


def test_kv_cache_follows_folder_patterns_and_flag() -> None:
    with_cache = STORED / "modelopt-nvfp4-fp8kv-tiny"
    assert load_checkpoint(with_cache).kv_cache_format == "fp8_e4m3"
    assert load_checkpoint(with_cache, kv_cache_dtype="bf16").kv_cache_format == "bf16"
    scales = load_checkpoint(with_cache).kv_scales
    stored = TensorFolder(with_cache)
    for layer, (k_scale, v_scale) in scales.items():
        prefix = f"model.layers.{layer}.self_attn"
        assert k_scale == stored.float32(f"{prefix}.k_proj.k_scale")
        assert v_scale == stored.float32(f"{prefix}.v_proj.v_scale")
    plain = load_checkpoint(BF16, kv_cache_dtype="fp8_e5m2")
    assert plain.kv_cache_format == "fp8_e5m2"
    assert set(plain.kv_scales.values()) == {(1.0, 1.0)}
    mixed = load_checkpoint(BF16, quantization={"kv_cache": "fp8_e4m3"})
    assert mixed.kv_cache_format == "fp8_e4m3"


def test_tensors_equal_the_files_as_the_safetensors_library_reads_them() -> None:
    name = "modelopt-nvfp4-tiny"
    checkpoint = load_checkpoint(STORED / name, dtype="float32")
    with safe_open(STORED / name / "model.safetensors", "np") as stored:
        for module, values in checkpoint.tensors.items():
            assert np.array_equal(values, stored.get_tensor(f"{module}.weight"))
        packed = stored.get_tensor("model.layers.1.mlp.up_proj.weight")
    assert np.array_equal(TensorFolder(STORED / name).raw("model.layers.1.mlp.up_proj.weight"), packed)


def test_compute_type_rounds_unquantized_tensors_only() -> None:
    name = STORED / "modelopt-nvfp4-tiny"
    exact, rounded = load_checkpoint(name, dtype="float32"), load_checkpoint(name, dtype="bfloat16")
    assert np.array_equal(rounded.linears["lm_head"].weight, round_bfloat16(exact.linears["lm_head"].weight))
    module = "model.layers.0.mlp.up_proj"
    assert np.array_equal(rounded.linears[module].weight, exact.linears[module].weight)


def test_mixed_precision_by_pattern() -> None:
    patterns = {"model.layers.*": "nvfp4", "*.self_attn.*": "fp8", "model.layers.1.mlp.down_proj": "bf16"}
    checkpoint = load_checkpoint(BF16, quantization=patterns)
    formats = {name: linear.format for name, linear in checkpoint.linears.items()}
    assert formats["model.layers.0.self_attn.q_proj"] == "fp8"
    assert formats["model.layers.0.mlp.gate_proj"] == "nvfp4"
    assert formats["model.layers.1.mlp.down_proj"] == "bf16"
    assert formats["lm_head"] == "bf16"
    assert checkpoint.linears["model.layers.1.mlp.down_proj"].activation is None
    assert checkpoint.bits_per_weight["model.layers.0.mlp.gate_proj"] == pytest.approx(4.5, abs=0.01)
    assert "8 x fp8" in checkpoint.describe()


def test_one_format_inside_a_fused_group_does_not_touch_the_others() -> None:
    checkpoint = load_checkpoint(BF16, quantization={"*.k_proj": "nvfp4"})
    plain = load_checkpoint(BF16)
    prefix = "model.layers.0.self_attn"
    assert np.array_equal(
        checkpoint.linears[f"{prefix}.q_proj"].weight, plain.linears[f"{prefix}.q_proj"].weight
    )
    alone = NVFP4Tensor.quantize(plain.linears[f"{prefix}.k_proj"].weight)
    assert np.array_equal(checkpoint.linears[f"{prefix}.k_proj"].weight, alone.dequantize())


def test_fused_weights_are_views_of_one_array() -> None:
    checkpoint = load_checkpoint(BF16)
    for group in fused_groups(checkpoint.config):
        if len(group) > 1:
            joined = np.concatenate([checkpoint.linears[name].weight for name in group])
            assert np.array_equal(checkpoint.fused[group], joined)
            assert all(
                np.shares_memory(checkpoint.fused[group], checkpoint.linears[name].weight) for name in group
            )


def test_reload_through_a_hook_and_back() -> None:
    checkpoint = load_checkpoint(BF16, quantization="nvfp4")
    before = {name: linear.weight.copy() for name, linear in checkpoint.linears.items()}
    seen: list[tuple[str, ...]] = []

    def zero_keys(group: Any) -> Any:
        seen.append(tuple(group))
        return {
            name: PlainTensor(np.zeros(tensor.shape, np.float32)) if name.endswith("k_proj") else tensor
            for name, tensor in group.items()
        }

    module = "model.layers.1.self_attn.k_proj"
    view = checkpoint.linears[module].weight
    checkpoint.reload([module], zero_keys)
    assert seen == [tuple(f"model.layers.1.self_attn.{part}_proj" for part in "qkv")]
    assert not view.any()
    assert checkpoint.linears[module].format == "bf16"
    checkpoint.reload([module])
    assert checkpoint.linears[module].format == "nvfp4"
    for name, linear in checkpoint.linears.items():
        assert np.array_equal(linear.weight, before[name]), name


def test_reload_of_a_tied_output_layer_keeps_the_embedding(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(random_model(tmp_path / "model", tie_word_embeddings=True))
    embedding = checkpoint.tensors["model.embed_tokens"]
    assert checkpoint.linears["lm_head"].weight is embedding
    before = embedding.copy()
    checkpoint.reload(
        ["lm_head"], lambda group: {n: PlainTensor(np.zeros(t.shape, np.float32)) for n, t in group.items()}
    )
    assert not checkpoint.linears["lm_head"].weight.any()
    assert np.array_equal(embedding, before)
    checkpoint.reload(["lm_head"])
    assert checkpoint.linears["lm_head"].weight is embedding


def test_a_tied_output_layer_can_be_quantized_alone(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model", tie_word_embeddings=True)
    checkpoint = load_checkpoint(folder, quantization={"lm_head": "fp8"})
    expected = FORMATS["fp8"].quantize([checkpoint.tensors["model.embed_tokens"]])[0].dequantize()
    assert np.array_equal(checkpoint.linears["lm_head"].weight, expected)
    assert not np.array_equal(checkpoint.tensors["model.embed_tokens"], expected)


def test_reload_rejects_unknown_modules_and_other_shapes() -> None:
    checkpoint = load_checkpoint(BF16)
    with pytest.raises(ModelError, match=r"no linear layer model\.layers\.9\.mlp\.up_proj"):
        checkpoint.reload(["model.layers.9.mlp.up_proj"])
    with pytest.raises(ModelError, match=r"lm_head: a weight hook returned \[1, 1\], not \[512, 128\]"):
        checkpoint.reload(
            ["lm_head"], lambda group: dict.fromkeys(group, PlainTensor(np.zeros((1, 1), np.float32)))
        )


def test_quantized_gives_the_stored_form_of_the_whole_group() -> None:
    checkpoint = load_checkpoint(STORED / "modelopt-nvfp4-tiny")
    stored = checkpoint.quantized(["model.layers.0.mlp.up_proj"])
    assert sorted(stored) == ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
    for name, tensor in stored.items():
        assert isinstance(tensor, NVFP4Tensor)
        assert np.array_equal(tensor.dequantize(), checkpoint.linears[name].weight)
        assert tensor.describe().startswith("nvfp4 [256, 128], 4.5")


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLM"]},
        {"architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
        {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    ],
    ids=lambda config: config["architectures"][0],
)
def test_every_architecture_loads_all_its_tensors(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = random_model(tmp_path / "model", **config)
    checkpoint = load_checkpoint(folder)
    files = TensorFolder(folder)
    used = {f"{name}.weight" for name in (*checkpoint.tensors, *checkpoint.linears)}
    used |= {f"{name}.bias" for name, linear in checkpoint.linears.items() if linear.bias is not None}
    used -= {"lm_head.weight"} if checkpoint.config.tie_word_embeddings else set()
    assert used == set(files.entries)
    for name, linear in checkpoint.linears.items():
        if f"{name}.weight" in files:
            assert np.array_equal(linear.weight, files.float32(f"{name}.weight"))
        if linear.bias is not None:
            assert np.array_equal(linear.bias, files.float32(f"{name}.bias"))
    assert {name: linear.weight.shape for name, linear in checkpoint.linears.items()} == linear_shapes(
        checkpoint.config
    )
    assert {name: values.shape for name, values in checkpoint.tensors.items()} == tensor_shapes(
        checkpoint.config
    )
    logits = forward(checkpoint, np.arange(12).reshape(2, 6))
    assert np.isfinite(logits).all()


def test_sharded_folder_equals_the_single_file(tmp_path: Path) -> None:
    tensors = read_tensors(BF16)
    names = sorted(tensors)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text((BF16 / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    weight_map = {}
    for index, part in enumerate((names[::2], names[1::2]), start=1):
        shard = f"model-{index:05}-of-00002.safetensors"
        write_safetensors(folder / shard, {name: tensors[name] for name in part})
        weight_map.update(dict.fromkeys(part, shard))

    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8"
    )
    sharded, single = load_checkpoint(folder), load_checkpoint(BF16)
    for name, linear in single.linears.items():
        assert np.array_equal(sharded.linears[name].weight, linear.weight)


def test_float16_and_float32_sources_round_to_the_compute_type(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model")
    values = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    for dtype, stored in (("F32", values), ("F16", values.astype(np.float16))):
        damage(folder, {"model.norm.weight": (dtype, stored)})
        exact = load_checkpoint(folder, dtype="float32").tensors["model.norm"]
        assert np.array_equal(exact, stored.astype(np.float32))
        assert np.array_equal(load_checkpoint(folder).tensors["model.norm"], round_bfloat16(exact))


def test_progress_names_each_group(tmp_path: Path) -> None:
    lines: list[str] = []
    load_checkpoint(random_model(tmp_path / "model"), progress=lines.append)
    assert len(lines) == 9
    assert lines[0] == "loading model.layers.0.self_attn"
    assert lines[-1] == "loading lm_head"


def test_biases_are_rounded_like_weights(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model", architectures=["Qwen2ForCausalLM"])
    bias = np.linspace(0, 1, 64).astype(np.float32)
    damage(folder, {"model.layers.0.self_attn.q_proj.bias": ("F32", bias)})
    loaded = load_checkpoint(folder).linears["model.layers.0.self_attn.q_proj"].bias
    assert loaded is not None
    assert np.array_equal(loaded, round_bfloat16(bias))
    damage(folder, {"model.layers.0.self_attn.q_proj.bias": bf16(bias[:7])})
    with pytest.raises(ModelError, match=r"q_proj\.bias has shape \[7\], config\.json makes it \[64\]"):
        load_checkpoint(folder)
