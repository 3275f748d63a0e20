"""Faults of weights and scales: each transform against its closed form, and each fault on a loaded model."""

from __future__ import annotations

import itertools
from fnmatch import fnmatchcase

import numpy as np
import pytest

from pytest_quantguard.emulator.batch import ForwardBatch
from pytest_quantguard.emulator.checkpoint import Checkpoint, load_checkpoint
from pytest_quantguard.emulator.faults import weight_transforms as transforms
from pytest_quantguard.emulator.faults.base import Fault, hooks_for, parse_fault
from pytest_quantguard.emulator.faults.weights import WEIGHT_FAULTS, InputScaleZero, WeightFault
from pytest_quantguard.emulator.formats import FORMATS, FP8Tensor, MXTensor, NVFP4Tensor, PlainTensor
from pytest_quantguard.emulator.formats.minifloat import E2M1, E4M3
from pytest_quantguard.errors import ConfigError

from . import scalar
from .folders import STORED
from .forward import forward, mean_kl

REGISTRY = {fault.name: fault for fault in WEIGHT_FAULTS}
KINDS = {
    "nibble_swap",
    "scale_swizzle",
    "fused_scale_max",
    "fused_scale_first",
    "fused_scale_uninitialised",
    "global_scale_inverted",
    "global_scale_missing",
    "block_scale_roll",
    "scale_round_up",
    "scale_round_down",
    "one_scale_for_fused",
    "input_scale_zero",
    "lm_head_quantized",
    "lm_head_zero",
    "layer_wrong_format",
    "shard_scale_mixup",
    "global_scale_drift",
}
SPECIFICATIONS = [
    f"{kind.name}:{variant}" if variant else kind.name
    for kind in WEIGHT_FAULTS
    for variant in ("", *kind.variants)
]
UP = "model.layers.0.mlp.up_proj"


def normal(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def parts(tensor: NVFP4Tensor) -> tuple[np.ndarray, np.ndarray]:
    """E2M1 values [rows, columns] and block scales [rows, blocks] as numbers."""
    codes = np.stack([tensor.packed & 15, tensor.packed >> 4], axis=-1).reshape(tensor.shape)
    return E2M1.decode(codes), E4M3.decode(tensor.block_scale)


def combine(values: np.ndarray, block_scales: np.ndarray, global_scale: np.floating) -> np.ndarray:
    return values * np.repeat(block_scales * global_scale, 16, axis=1)


def test_nibble_swap_exchanges_neighbours() -> None:
    tensor = NVFP4Tensor.quantize(normal(4, 32))
    values, scales = parts(tensor)
    swapped = values.reshape(4, 16, 2)[:, :, ::-1].reshape(4, 32)
    assert np.array_equal(
        transforms.nibble_swap(tensor).dequantize(), combine(swapped, scales, tensor.global_scale)
    )
    mx = MXTensor.quantize(normal(4, 32), E2M1)
    expected = mx.dequantize().reshape(4, 16, 2)[:, :, ::-1].reshape(4, 32)
    assert np.array_equal(transforms.nibble_swap(mx).dequantize(), expected)


@pytest.mark.parametrize(("rows", "columns"), [(128, 64), (256, 128), (200, 96), (8, 160)])
def test_scale_swizzle_is_the_layout_of_cublas(rows: int, columns: int) -> None:
    """Where the documentation of cuBLAS puts each scale, one by one, then read row by row."""
    tensor = NVFP4Tensor.quantize(normal(rows, columns))
    blocks = columns // 16
    tiles_across = -(-blocks // 4)
    flat = np.zeros(-(-rows // 128) * tiles_across * 512, np.uint8)
    for row, column in itertools.product(range(rows), range(blocks)):
        tile = (row // 128) * tiles_across + column // 4
        inner = row % 128
        flat[tile * 512 + (inner % 32) * 16 + (inner // 32) * 4 + column % 4] = tensor.block_scale[
            row, column
        ]
    swizzled = transforms.scale_swizzle(tensor)
    assert isinstance(swizzled, NVFP4Tensor)
    assert np.array_equal(swizzled.block_scale, flat[: rows * blocks].reshape(rows, blocks))


def test_roll_and_mixup_move_block_scales() -> None:
    tensor = NVFP4Tensor.quantize(normal(4, 80))
    values, scales = parts(tensor)
    rolled = scales[:, [4, 0, 1, 2, 3]]
    assert np.array_equal(
        transforms.block_scale_roll(tensor).dequantize(), combine(values, rolled, tensor.global_scale)
    )
    mixed = scales[:, [0, 1, 2, 0, 1]]
    assert np.array_equal(
        transforms.shard_scale_mixup(tensor).dequantize(), combine(values, mixed, tensor.global_scale)
    )
    fp8 = FP8Tensor.quantize(normal(128, 256), granularity="block")
    scale = transforms.block_scale_roll(fp8).scale  # type: ignore[attr-defined]
    assert np.array_equal(scale, fp8.scale[:, ::-1])


@pytest.mark.parametrize(("direction", "low", "high"), [("up", 1.0, 2.0), ("down", 0.5, 1.0)])
def test_rounded_scales_are_powers_of_two(direction: str, low: float, high: float) -> None:
    tensor = NVFP4Tensor.quantize(normal(16, 64), np.float32(0.001))
    rounded = transforms.scale_round(tensor, direction)  # type: ignore[arg-type]
    assert isinstance(rounded, NVFP4Tensor)
    before, after = E4M3.decode(tensor.block_scale), E4M3.decode(rounded.block_scale)
    inside = before <= 256
    assert inside.any()
    assert np.array_equal(np.log2(after[inside]), np.round(np.log2(after[inside])))
    ratio = after[inside] / before[inside]
    assert (ratio >= low).all()
    assert (ratio <= high).all()
    assert (ratio != 1).any()
    assert np.array_equal(rounded.packed, tensor.packed)


def fused_group() -> tuple[dict[str, NVFP4Tensor], dict[str, np.ndarray]]:
    weights = {
        "q_proj": normal(8, 32, 1),
        "k_proj": 0.25 * normal(8, 32, 2),
        "v_proj": 0.1 * normal(8, 32, 3),
    }
    weights = {name: weight.astype(np.float32) for name, weight in weights.items()}
    tensors = FORMATS["nvfp4"].quantize(list(weights.values()))
    group = dict(zip(weights, tensors, strict=True))
    return group, {name: tensor.dequantize() for name, tensor in group.items()}  # type: ignore[return-value]


def test_fused_scales() -> None:
    group, clean = fused_group()
    amax = {name: np.abs(weight).max() for name, weight in clean.items()}
    largest = transforms.fused_scale_max(group)
    first = transforms.fused_scale_first(group, None)
    forced = transforms.fused_scale_first(group, 8)
    for name, weight in clean.items():
        expected = weight * (amax["q_proj"] / amax[name])
        assert np.allclose(largest[name].dequantize(), expected, rtol=1e-5)
        assert np.allclose(first[name].dequantize(), expected, rtol=1e-5)
        assert np.allclose(forced[name].dequantize(), weight * (1 if name == "q_proj" else 8), rtol=1e-6)
    assert first["q_proj"] is group["q_proj"]


def test_global_scale_changes() -> None:
    tensor = NVFP4Tensor.quantize(normal(4, 32))
    weight, scale = tensor.dequantize(), tensor.global_scale
    inverted = transforms.with_global_scale(tensor, np.reciprocal).dequantize()
    assert np.allclose(inverted, weight / scale**2, rtol=1e-5)
    missing = transforms.with_global_scale(tensor, np.ones_like).dequantize()
    assert np.allclose(missing, weight / scale, rtol=1e-5)
    assert np.allclose(transforms.multiply_global_scale(tensor, 1.02).dequantize(), 1.02 * weight, rtol=1e-5)
    fp8 = FP8Tensor.quantize(normal(4, 32))
    assert np.allclose(transforms.multiply_global_scale(fp8, 3).dequantize(), 3 * fp8.dequantize(), rtol=1e-5)


def test_one_scale_rounds_under_a_scale_that_is_too_large() -> None:
    fp8 = FP8Tensor.quantize(normal(4, 32))
    coarse = transforms.one_scale_for_fused({"k_proj": fp8}, 50)["k_proj"].dequantize()
    scale = np.broadcast_to(fp8.scale * np.float32(50), fp8.shape)
    assert np.array_equal(coarse, scalar.scaled(fp8.dequantize(), scale, scalar.E4M3))
    nvfp4 = NVFP4Tensor.quantize(normal(4, 32))
    coarse = transforms.one_scale_for_fused({"k_proj": nvfp4}, 50)["k_proj"].dequantize()
    expected = scalar.nvfp4(nvfp4.dequantize(), nvfp4.global_scale * np.float32(50))
    assert np.array_equal(coarse, expected)


def test_transforms_leave_other_formats_alone() -> None:
    plain = PlainTensor(normal(4, 32))
    channel = FORMATS["int8"].quantize([normal(4, 32)])[0]
    for tensor in (plain, channel):
        for change in (
            transforms.nibble_swap,
            transforms.scale_swizzle,
            transforms.block_scale_roll,
            transforms.shard_scale_mixup,
        ):
            assert change(tensor) is tensor
        assert transforms.scale_round(tensor, "up") is tensor
        assert transforms.multiply_global_scale(tensor, 2) is tensor
        assert transforms.one_scale_for_fused({"k": tensor}, 2)["k"] is tensor


def test_the_catalogue_is_complete_and_described() -> None:
    assert {fault.name for fault in WEIGHT_FAULTS} == KINDS
    assert len(REGISTRY) == len(WEIGHT_FAULTS)
    for kind in WEIGHT_FAULTS:
        assert kind.summary
        assert kind.shows_in
        assert kind.source
        assert kind.severity_by_default == kind().severity


@pytest.fixture(scope="module")
def nvfp4() -> Checkpoint:
    return load_checkpoint(STORED / "bf16-tiny", quantization="nvfp4", dtype="float32")


def switch(checkpoint: Checkpoint, fault: Fault) -> None:
    hooks = hooks_for([fault])
    concerned = [name for name in checkpoint.linears if any(rule.concerns(name) for rule in hooks.weight)]
    checkpoint.reload(concerned, hooks.apply_weights)


@pytest.mark.parametrize(
    "specification", [text for text in SPECIFICATIONS if not text.startswith("input_scale")]
)
def test_every_fault_changes_answers_and_goes_away(nvfp4: Checkpoint, specification: str) -> None:
    fault = parse_fault(specification, REGISTRY)
    assert parse_fault(fault.specification, REGISTRY) == fault
    assert isinstance(fault, WeightFault)
    assert fault.applies_to({name: linear.format for name, linear in nvfp4.linears.items()})
    input_ids = np.random.default_rng(5).integers(0, 512, (2, 12))
    before = {name: linear.weight.copy() for name, linear in nvfp4.linears.items()}
    clean = forward(nvfp4, input_ids)
    with np.errstate(all="ignore"):
        switch(nvfp4, fault)
        damaged = forward(nvfp4, input_ids)
    changed = {
        name for name, linear in nvfp4.linears.items() if not np.array_equal(linear.weight, before[name])
    }
    assert changed
    assert all(fault.concerns(name) for name in changed)
    if fault.module != "*":
        assert all(fnmatchcase(name, fault.module) for name in changed)
    divergence = mean_kl(clean, damaged)
    assert np.isnan(divergence) if specification.endswith("nan") else divergence > 1e-6
    nvfp4.reload()
    assert all(np.array_equal(linear.weight, before[name]) for name, linear in nvfp4.linears.items())
    assert np.array_equal(forward(nvfp4, input_ids), clean)


def test_uninitialised_memory_differs_from_load_to_load(nvfp4: Checkpoint) -> None:
    fault = parse_fault("fused_scale_uninitialised:value=random", REGISTRY)
    seen = []
    for _ in range(2):
        switch(nvfp4, fault)
        seen.append(nvfp4.linears[UP].weight.copy())
    nvfp4.reload()
    assert not np.array_equal(*seen)


def test_a_fault_says_where_it_does_not_apply() -> None:
    nibbles = parse_fault("nibble_swap", REGISTRY)
    assert isinstance(nibbles, WeightFault)
    assert nibbles.applies_to({UP: "nvfp4_w4a16", "lm_head": "bf16"})
    assert not nibbles.applies_to({UP: "fp8", "lm_head": "bf16"})
    elsewhere = parse_fault("nibble_swap:module=model.layers.7.*", REGISTRY)
    assert isinstance(elsewhere, WeightFault)
    assert not elsewhere.applies_to({UP: "nvfp4"})
    head = parse_fault("lm_head_quantized", REGISTRY)
    assert isinstance(head, WeightFault)
    assert not head.applies_to({UP: "nvfp4", "lm_head": "fp8"})


def test_wrong_format_depends_on_the_layer() -> None:
    fp8 = load_checkpoint(STORED / "bf16-tiny", quantization="fp8")
    switch(fp8, parse_fault("layer_wrong_format:module=model.layers.0.mlp.*", REGISTRY))
    assert fp8.linears[UP].format == "nvfp4"
    assert fp8.linears["model.layers.0.self_attn.q_proj"].format == "fp8"
    nvfp4 = load_checkpoint(STORED / "bf16-tiny", quantization="nvfp4")
    switch(nvfp4, parse_fault("layer_wrong_format", REGISTRY))
    assert nvfp4.linears[UP].format == "mxfp4"
    assert nvfp4.linears["model.layers.1.mlp.up_proj"].format == "nvfp4"


def test_input_scale_zero_reaches_some_tokens_only() -> None:
    fault = parse_fault("input_scale_zero:every=7", REGISTRY)
    assert isinstance(fault, InputScaleZero)
    hooks = hooks_for([fault])
    token_ids = np.array([3, 7, 14, 20], np.int32)
    batch = ForwardBatch(
        phase="prefill",
        entries=(),
        token_ids=token_ids,
        positions=np.arange(4, dtype=np.int32),
        logit_rows=np.array([3]),
    )
    values = hooks.linear_input[0](fault.module, np.ones((4, 8), np.float32), batch)
    assert np.isnan(values[[1, 2]]).all()
    assert (values[[0, 3]] == 1).all()
    assert (hooks.linear_input[0]("lm_head", np.ones((4, 8), np.float32), batch) == 1).all()


@pytest.mark.parametrize(
    ("specification", "message"),
    [
        ("one_scale_for_fused:ratio=0.5", "parameter ratio: expected at least 1, found 0.5"),
        ("input_scale_zero:every=0", "parameter every: expected at least 1, found 0"),
        ("fused_scale_uninitialised:value=x", "expected one of large, zero, nan, random, found 'x'"),
        ("nibble_swap:modul=x", "unknown parameter 'modul' (did you mean 'module'?)"),
    ],
)
def test_bad_parameters(specification: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_fault(specification, REGISTRY)
    assert message in str(caught.value)
