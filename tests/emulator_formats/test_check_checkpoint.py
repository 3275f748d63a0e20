"""Checkpoints damaged one way each: the defect is found, the tensor named, and nothing else reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_quantguard.emulator.check_checkpoint import CheckpointReport, check_checkpoint
from pytest_quantguard.emulator.formats import FP8Tensor, NVFP4Tensor
from pytest_quantguard.errors import ModelError

from .folders import STORED, Tensors, bf16, copy_folder, damage, edit_json, f32, random_model, read_tensors
from .test_published import compressed_nvfp4, fp8_folder

UP, GATE, DOWN = (f"model.layers.1.mlp.{name}_proj" for name in ("up", "gate", "down"))
Q, K = (f"model.layers.0.self_attn.{name}_proj" for name in "qk")
NVFP4, FP8, WITH_CACHE = "modelopt-nvfp4-tiny", "modelopt-fp8-tiny", "modelopt-nvfp4-fp8kv-tiny"
Changes = dict[str, "tuple[str, np.ndarray] | None"]


def found(report: CheckpointReport) -> list[tuple[str, str, str]]:
    return [(finding.severity, finding.kind, finding.tensor) for finding in report.findings]


@pytest.mark.parametrize("name", [NVFP4, FP8, WITH_CACHE])
def test_good_checkpoints_are_silent(name: str) -> None:
    report = check_checkpoint(STORED / name, reference=STORED / "bf16-tiny")
    assert found(report) == []
    assert report.passed
    quantized = [item for item in report.noise if item.format != "bf16"]
    assert len(quantized) == 14
    assert all(15 < item.decibels < 40 for item in quantized)
    assert all(item.decibels == np.inf for item in report.noise if item.format == "bf16")


def test_good_checkpoints_of_other_methods_are_silent(tmp_path: Path) -> None:
    assert found(check_checkpoint(compressed_nvfp4(tmp_path), STORED / "bf16-tiny")) == []
    section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = fp8_folder(tmp_path, section, "block", "weight_scale_inv")
    report = check_checkpoint(folder)
    assert report.passed
    assert {finding.kind for finding in report.findings} == {"unaligned-shape"}


def test_scales_of_zero_blocks_may_be_zero(tmp_path: Path) -> None:
    """Exporters disagree on what scale an all-zero block has; the values are zero either way."""
    folder = copy_folder(NVFP4, tmp_path)
    tensors = read_tensors(folder)
    packed, scales = tensors[f"{UP}.weight"][1].copy(), tensors[f"{UP}.weight_scale"][1].copy()
    packed[3, :8], scales[3, 0] = 0x80, 0
    damage(folder, {f"{UP}.weight": ("U8", packed), f"{UP}.weight_scale": ("F8_E4M3", scales)})
    assert found(check_checkpoint(folder)) == []


def _block_scales(change: Callable[[np.ndarray], None]) -> Callable[[Tensors], Changes]:
    def make(tensors: Tensors) -> Changes:
        scales = tensors[f"{UP}.weight_scale"][1].copy()
        change(scales)
        return {f"{UP}.weight_scale": ("F8_E4M3", scales)}

    return make


def _set(index: Any, value: int) -> Callable[[np.ndarray], None]:
    def change(scales: np.ndarray) -> None:
        scales[index] = value

    return change


def _requantized_with_small_global_scale(tensors: Tensors) -> Changes:
    packed, scales = tensors[f"{DOWN}.weight"][1], tensors[f"{DOWN}.weight_scale"][1]
    stored = np.float32(tensors[f"{DOWN}.weight_scale_2"][1])
    weight = NVFP4Tensor(packed, scales, stored).dequantize()
    small = NVFP4Tensor.quantize(weight, np.float32(stored / 8))
    return {
        f"{DOWN}.weight": ("U8", small.packed),
        f"{DOWN}.weight_scale": ("F8_E4M3", small.block_scale),
        f"{DOWN}.weight_scale_2": f32(small.global_scale),
    }


@pytest.mark.parametrize(
    ("name", "make", "expected"),
    [
        (NVFP4, {f"{UP}.weight": None}, ("error", "missing-tensor", f"{UP}.weight")),
        (NVFP4, {f"{UP}.weight_scale": None}, ("error", "missing-scale", f"{UP}.weight_scale")),
        (NVFP4, {f"{UP}.weight_scale_2": None}, ("error", "missing-scale", f"{UP}.weight_scale_2")),
        (NVFP4, {f"{UP}.input_scale": None}, ("error", "missing-scale", f"{UP}.input_scale")),
        (FP8, {f"{UP}.weight_scale": None}, ("error", "missing-scale", f"{UP}.weight_scale")),
        (NVFP4, {"model.norm.weight": None}, ("error", "missing-tensor", "model.norm.weight")),
        (NVFP4, {f"{DOWN}.input_scale": f32(0)}, ("error", "zero-scale", f"{DOWN}.input_scale")),
        (
            NVFP4,
            {f"{DOWN}.weight_scale_2": f32(0)},
            ("error", "zero-scale", f"{DOWN}.weight_scale_2"),
        ),
        (
            NVFP4,
            {f"{DOWN}.weight_scale_2": f32(np.nan)},
            ("error", "non-finite-scale", f"{DOWN}.weight_scale_2"),
        ),
        (
            FP8,
            {f"{DOWN}.weight_scale": f32(np.inf)},
            ("error", "non-finite-scale", f"{DOWN}.weight_scale"),
        ),
        (
            FP8,
            {f"{DOWN}.input_scale": f32(-0.1)},
            ("error", "negative-scale", f"{DOWN}.input_scale"),
        ),
        (NVFP4, _block_scales(_set((5, 2), 0)), ("error", "zero-scale", f"{UP}.weight_scale")),
        (NVFP4, _block_scales(_set((5, 2), 0x7F)), ("error", "non-finite-scale", f"{UP}.weight_scale")),
        (NVFP4, _block_scales(_set((5, 2), 0xB8)), ("error", "negative-scale", f"{UP}.weight_scale")),
        (NVFP4, _block_scales(_set(..., 0x38)), ("error", "constant-scale", f"{UP}.weight_scale")),
        (NVFP4, _requantized_with_small_global_scale, ("error", "saturated-scale", f"{DOWN}.weight_scale")),
        (
            NVFP4,
            lambda t: {f"{DOWN}.weight_scale_2": f32(1 / t[f"{DOWN}.weight_scale_2"][1])},
            ("error", "implausible-scale", f"{DOWN}.weight_scale_2"),
        ),
        (
            NVFP4,
            lambda t: {f"{UP}.weight_scale_2": f32(2 * t[f"{UP}.weight_scale_2"][1])},
            ("error", "fused-scales-differ", f"{GATE}.weight_scale_2"),
        ),
        (
            NVFP4,
            lambda t: {f"{K}.weight_scale_2": f32(2 * t[f"{K}.weight_scale_2"][1])},
            ("error", "fused-scales-differ", f"{Q}.weight_scale_2"),
        ),
        (
            NVFP4,
            {f"{UP}.weight_scale_2": f32(-np.inf)},
            ("error", "non-finite-scale", f"{UP}.weight_scale_2"),
        ),
        (
            NVFP4,
            lambda t: {f"{UP}.input_scale": f32(2 * t[f"{UP}.input_scale"][1])},
            ("warning", "fused-scales-differ", f"{GATE}.input_scale"),
        ),
        (
            FP8,
            lambda t: {f"{UP}.weight_scale": f32(2 * t[f"{UP}.weight_scale"][1])},
            ("warning", "fused-scales-differ", f"{GATE}.weight_scale"),
        ),
        (WITH_CACHE, {f"{K}.k_scale": None}, ("error", "missing-kv-scale", f"{K}.k_scale")),
        (WITH_CACHE, {f"{K}.k_scale": f32(0)}, ("error", "zero-scale", f"{K}.k_scale")),
        (
            WITH_CACHE,
            lambda t: {name: f32(1) for name in t if name.endswith(("k_scale", "v_scale"))},
            ("warning", "unit-kv-scales", f"{K}.k_scale"),
        ),
        (
            NVFP4,
            {"lm_head.weight": ("F8_E4M3", np.full((512, 128), 0x38, np.uint8))},
            ("error", "excluded-but-quantized", "lm_head.weight"),
        ),
        (
            NVFP4,
            {"model.embed_tokens.weight": ("F8_E4M3", np.full((512, 128), 0x38, np.uint8))},
            ("error", "excluded-but-quantized", "model.embed_tokens.weight"),
        ),
        (
            NVFP4,
            {f"{UP}.weight": bf16(np.ones((256, 128)))},
            ("error", "listed-but-unquantized", f"{UP}.weight"),
        ),
        (
            NVFP4,
            {f"{UP}.weight": ("U8", np.ones((256, 32), np.uint8))},
            ("error", "wrong-shape", f"{UP}.weight"),
        ),
        (NVFP4, {f"{UP}.input_scale": f32([1, 2])}, ("error", "wrong-shape", f"{UP}.input_scale")),
        (FP8, {f"{UP}.weight_scale": f32([1, 2])}, ("error", "wrong-shape", f"{UP}.weight_scale")),
        (
            NVFP4,
            {"model.norm.weight": f32(np.ones(7))},
            ("error", "wrong-shape", "model.norm.weight"),
        ),
        (
            NVFP4,
            {"lm_head.weight": f32(np.zeros((512, 128)))},
            ("error", "zero-weights", "lm_head.weight"),
        ),
        (
            NVFP4,
            {"lm_head.weight": f32(np.full((512, 128), np.nan))},
            ("error", "non-finite-weights", "lm_head.weight"),
        ),
        (
            NVFP4,
            {f"{DOWN}.weight": ("U8", np.zeros((128, 128), np.uint8))},
            ("error", "zero-weights", f"{DOWN}.weight"),
        ),
        (
            FP8,
            {f"{DOWN}.weight": ("F8_E4M3", np.zeros((128, 256), np.uint8))},
            ("error", "zero-weights", f"{DOWN}.weight"),
        ),
        (
            FP8,
            {f"{DOWN}.weight": ("F8_E4M3", np.full((128, 256), 0x7F, np.uint8))},
            ("error", "non-finite-weights", f"{DOWN}.weight"),
        ),
        (NVFP4, {"lm_head.weight_scale": f32(1)}, ("warning", "unused-scale", "lm_head")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_each_defect_is_found_and_named(
    tmp_path: Path, name: str, make: Changes | Callable[[Tensors], Changes], expected: tuple[str, str, str]
) -> None:
    folder = copy_folder(name, tmp_path)
    damage(folder, make if isinstance(make, dict) else make(read_tensors(folder)))
    report = check_checkpoint(folder)
    assert found(report) == [expected]
    assert report.passed is (expected[0] == "warning")
    assert expected[2] in str(report.findings[0])
    check_checkpoint(folder, reference=STORED / "bf16-tiny")


def test_exclusion_lists_that_disagree_with_the_tensors(tmp_path: Path) -> None:
    folder = copy_folder(NVFP4, tmp_path)
    path = folder / "hf_quant_config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["quantization"]["exclude_modules"].append(DOWN)
    path.write_text(json.dumps(content), encoding="utf-8")
    assert found(check_checkpoint(folder)) == [("error", "excluded-but-quantized", f"{DOWN}.weight")]
    folder = compressed_nvfp4(tmp_path / "other", ignore=["lm_head", f"re:.*{DOWN[-9:]}"])
    assert ("error", "excluded-but-quantized", f"{DOWN}.weight_packed") in found(check_checkpoint(folder))


def test_fused_modules_in_different_formats(tmp_path: Path) -> None:
    folder = copy_folder(NVFP4, tmp_path)
    tensors = read_tensors(STORED / FP8)
    damage(folder, {f"{UP}.weight_scale_2": None, **{n: v for n, v in tensors.items() if n.startswith(UP)}})
    path = folder / "hf_quant_config.json"
    modules = [name.removesuffix(".weight_scale") for name in tensors if name.endswith("weight_scale")]
    layers = {name: {"quant_algo": "FP8" if name == UP else "NVFP4", "group_size": 16} for name in modules}
    path.write_text(
        json.dumps({"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}),
        encoding="utf-8",
    )
    assert found(check_checkpoint(folder)) == [("warning", "fused-formats-differ", GATE)]


def test_unaligned_shapes(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model", hidden_size=72)
    section = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    edit_json(folder / "config.json", quantization_config=section)
    changes: dict[str, tuple[str, np.ndarray] | None] = {}
    for name, (_, array) in read_tensors(folder).items():
        if "_proj" in name:
            tensor = FP8Tensor.quantize(
                np.random.default_rng(0).standard_normal(array.shape).astype(np.float32)
            )
            module = name.removesuffix(".weight")
            changes |= {
                name: ("F8_E4M3", tensor.codes),
                f"{module}.weight_scale": f32(1),
                f"{module}.input_scale": f32(1),
            }
    damage(folder, changes)
    report = check_checkpoint(folder)
    assert {finding.kind for finding in report.findings} == {"unaligned-shape"}
    assert "[72, 72] is not a multiple of 16" in report.findings[0].message
    assert report.passed


@pytest.mark.parametrize(
    ("damaged", "kind"), [("half the scale in some rows", "median"), ("swapped nibbles", "at least 12 dB")]
)
def test_a_reference_exposes_noisy_tensors(tmp_path: Path, damaged: str, kind: str) -> None:
    folder = copy_folder(NVFP4, tmp_path)
    tensors = read_tensors(folder)
    packed, scales = tensors[f"{DOWN}.weight"][1].copy(), tensors[f"{DOWN}.weight_scale"][1].copy()
    if damaged == "swapped nibbles":
        packed = (packed >> 4) | (packed << 4)
    else:
        scales[:20] -= 8
    damage(folder, {f"{DOWN}.weight": ("U8", packed), f"{DOWN}.weight_scale": ("F8_E4M3", scales)})
    assert found(check_checkpoint(folder)) == []
    report = check_checkpoint(folder, reference=STORED / "bf16-tiny")
    assert found(report) == [("error", "noisy-tensor", DOWN)]
    assert kind in report.findings[0].message


def test_the_report_as_json(tmp_path: Path) -> None:
    folder = copy_folder(NVFP4, tmp_path)
    damage(folder, {f"{DOWN}.input_scale": f32(0)})
    report = check_checkpoint(folder, reference=STORED / "bf16-tiny")
    content = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert content["passed"] is False
    assert content["method"] == "modelopt"
    assert content["formats"] == {"nvfp4": 14, "bf16": 1}
    assert content["findings"] == [
        {"severity": "error", "kind": "zero-scale", "tensor": f"{DOWN}.input_scale", "message": "is zero"}
    ]
    noise = {item["tensor"]: item["signal_to_noise_db"] for item in content["noise"]}
    assert noise["lm_head"] is None
    assert 15 < noise[UP] < 25
    assert DOWN not in noise
    assert str(report.findings[0]) == f"error: {DOWN}.input_scale: is zero [zero-scale]"


def test_what_cannot_be_checked(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="expected a quantized checkpoint, found no quantization config"):
        check_checkpoint(STORED / "bf16-tiny")
    other = random_model(tmp_path / "other")
    with pytest.raises(ModelError, match=r"is not the model that .* was made from: shapes differ"):
        check_checkpoint(STORED / NVFP4, reference=other)
    with pytest.raises(ModelError, match="found no folder"):
        check_checkpoint(tmp_path / "nowhere")


def test_progress_names_modules() -> None:
    lines: list[str] = []
    check_checkpoint(STORED / NVFP4, STORED / "bf16-tiny", lines.append)
    assert f"checking {UP}" in lines
    assert f"comparing {UP}" in lines
