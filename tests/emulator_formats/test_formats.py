"""Every format against golden tensors and against the scalar implementation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pytest_quantguard.emulator.formats import FORMATS, FP8Activation, NVFP4Activation, NVFP4Tensor
from pytest_quantguard.emulator.formats.kv_cache import KV_CACHE_FORMATS

from . import scalar

VECTORS = Path(__file__).parents[1] / "data" / "golden" / "nvfp4_vectors.npz"
CASES = ("gauss", "heavy", "zero_blocks", "outlier", "tiny_vs_amax", "ties", "bf16")


def matrix(seed: int, rows: int, columns: int, spread: float = 1.0) -> np.ndarray:
    """Normal values whose rows differ in size by powers of e^spread."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, columns)) * np.exp(spread * rng.standard_normal((rows, 1)))).astype(
        np.float32
    )


def matrices(columns: int) -> st.SearchStrategy[np.ndarray]:
    """Ordinary magnitudes, exact zeros included, so that no scale under- or overflows float32."""
    numbers = st.floats(-1e4, 1e4, width=32).map(lambda x: 0.0 if abs(x) < 1e-6 else x)
    return hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.just(columns)), elements=numbers)


@pytest.mark.parametrize("case", CASES)
def test_golden_nvfp4_bit_for_bit(case: str) -> None:
    vectors = np.load(VECTORS)
    tensor = NVFP4Tensor.quantize(vectors[f"{case}.input"])
    assert tensor.global_scale == vectors[f"{case}.global_scale"]
    assert np.array_equal(tensor.block_scale, vectors[f"{case}.block_scale_e4m3"])
    assert np.array_equal(tensor.packed, vectors[f"{case}.packed"])
    expected = vectors[f"{case}.dequantized"]
    assert np.array_equal(tensor.dequantize().view(np.uint32), expected.view(np.uint32))
    out = np.full_like(expected, np.nan)
    assert tensor.dequantize(out=out) is out
    assert np.array_equal(out, expected)


@settings(max_examples=30)
@given(x=matrices(32))
def test_nvfp4_weights_and_activations_equal_the_scalar_definition(x: np.ndarray) -> None:
    tensor = NVFP4Tensor.quantize(x)
    assert np.array_equal(tensor.dequantize(), scalar.nvfp4(x, tensor.global_scale))
    assert np.array_equal(
        NVFP4Activation(float(tensor.global_scale))(x), scalar.nvfp4(x, tensor.global_scale)
    )
    for row in x:
        amax = np.float32(np.abs(row).max())
        expected = scalar.nvfp4(row[None], amax / np.float32(2688)) if amax else row[None]
        assert np.array_equal(NVFP4Activation()(row[None]), expected)


@settings(max_examples=30)
@given(x=matrices(64))
def test_mx_equals_the_scalar_definition(x: np.ndarray) -> None:
    for kind, values, exponent in (("mxfp4", scalar.E2M1, 2), ("mxfp8", scalar.E4M3, 8)):
        expected = scalar.mx(x, values, exponent)
        assert np.array_equal(FORMATS[kind].quantize([x])[0].dequantize(), expected)
        activation = FORMATS[kind].activation
        assert activation is not None
        assert np.array_equal(activation(x), expected)


@settings(max_examples=30)
@given(x=matrices(24))
def test_int8_equals_the_scalar_definition(x: np.ndarray) -> None:
    activation = FORMATS["int8"].activation
    assert activation is not None
    assert np.array_equal(FORMATS["int8"].quantize([x])[0].dequantize(), scalar.int8(x))
    assert np.array_equal(activation(x), scalar.int8(x))


def _scales(x: np.ndarray, granularity: str, largest: float) -> np.ndarray:
    """The scale of every element of x, block by block."""
    rows, columns = x.shape
    height, width = {
        "tensor": (rows, columns),
        "row": (1, columns),
        "block": (128, 128),
        "row block": (1, 128),
    }[granularity]
    scales = np.ones_like(x)
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            amax = np.abs(x[top : top + height, left : left + width]).max()
            scales[top : top + height, left : left + width] = amax / np.float32(largest) if amax else 1
    return scales


@pytest.mark.parametrize(
    ("kind", "weights", "activations", "values", "largest"),
    [
        ("fp8", "tensor", "row", scalar.E4M3, 448),
        ("fp8_per_tensor", "tensor", "tensor", scalar.E4M3, 448),
        ("fp8_per_channel", "row", "row", scalar.E4M3, 448),
        ("fp8_block", "block", "row block", scalar.E4M3, 448),
        ("fp8_w8a16", "tensor", None, scalar.E4M3, 448),
        ("fp8_e5m2", "tensor", "row", scalar.E5M2, 57344),
    ],
)
def test_fp8_equals_the_scalar_definition(
    kind: str, weights: str, activations: str | None, values: list, largest: float
) -> None:
    x = matrix(1, 130, 136, spread=2.0) if "block" in kind else matrix(1, 5, 12, spread=2.0)
    x[2] = 0
    expected = scalar.scaled(x, _scales(x, weights, largest), values)
    assert np.array_equal(FORMATS[kind].quantize([x])[0].dequantize(), expected)
    activation = FORMATS[kind].activation
    assert (activation is None) == (activations is None)
    if activation is not None and activations is not None:
        assert np.array_equal(activation(x), scalar.scaled(x, _scales(x, activations, largest), values))


def test_static_fp8_activation_saturates() -> None:
    x = np.array([[1.0, 100.0, -1000.0, 0.3]], np.float32)
    expected = scalar.scaled(x, np.full_like(x, 0.5), scalar.E4M3)
    assert np.array_equal(FP8Activation("tensor", 0.5)(x), expected)
    assert expected[0, 2] == -224


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_static_scale_must_be_positive_and_finite(scale: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        NVFP4Activation(scale)
    with pytest.raises(ValueError, match="positive and finite"):
        FP8Activation("tensor", scale)


@pytest.mark.parametrize("kind", [name for name, kind in FORMATS.items() if kind.activation is not None])
def test_activations_keep_nan_and_zero_rows_and_their_input(kind: str) -> None:
    activation = FORMATS[kind].activation
    assert activation is not None
    x = matrix(2, 6, 128)
    x[1], x[3, 5] = 0, np.nan
    before = x.copy()
    y = activation(x)
    assert np.array_equal(x, before, equal_nan=True)
    assert np.isnan(y[3, 5])
    if kind != "fp8_per_tensor":
        assert not y[1].any()
        assert np.isfinite(np.delete(y, 3, axis=0)).all()


@pytest.mark.parametrize(
    "kind",
    [name for name, kind in FORMATS.items() if kind.activation is not None and name != "fp8_per_tensor"],
)
def test_a_row_does_not_depend_on_its_neighbours(kind: str) -> None:
    activation = FORMATS[kind].activation
    assert activation is not None
    x = matrix(3, 9, 256, spread=3.0)
    together = activation(x)
    for index in range(len(x)):
        assert np.array_equal(activation(x[index : index + 1]), together[index : index + 1])


@pytest.mark.parametrize("kind", FORMATS)
def test_quantizing_what_is_representable_changes_nothing(kind: str) -> None:
    once = FORMATS[kind].quantize([matrix(4, 16, 128)])[0]
    values = once.dequantize()
    assert once.shape == values.shape == (16, 128)
    assert np.array_equal(FORMATS[kind].quantize([values])[0].dequantize(), values)


@pytest.mark.parametrize("kind", FORMATS)
def test_error_shrinks_with_bits(kind: str) -> None:
    """Signal-to-noise ratio of normal weights: what the literature gives for each width, within 2 dB."""
    x = matrix(5, 128, 256, spread=0.0)
    tensor = FORMATS[kind].quantize([x])[0]
    noise = tensor.dequantize() - x
    ratio = 10 * np.log10((x**2).sum() / max((noise**2).sum(), 1e-30))
    floor = {"bf16": 100, "nvfp4": 20, "mxfp4": 18, "fp8": 31, "mxfp8": 30, "int8": 40}[tensor.format]
    assert ratio > (25 if kind == "fp8_e5m2" else floor) - 2
    assert tensor.bits_per_weight == pytest.approx(
        {"bf16": 16, "nvfp4": 4.5, "mxfp4": 4.25, "fp8": 8, "mxfp8": 8.25, "int8": 8.125}[tensor.format],
        abs=0.2,
    )


def test_a_fused_group_shares_one_scale_where_kernels_need_it() -> None:
    small, large = matrix(6, 8, 32) * np.float32(0.01), matrix(7, 8, 32)
    for kind in ("nvfp4", "fp8"):
        alone = FORMATS[kind].quantize([large])[0]
        first, second = FORMATS[kind].quantize([small, large])
        assert np.array_equal(second.dequantize(), alone.dequantize())
        scale = "global_scale" if kind == "nvfp4" else "scale"
        assert np.array_equal(getattr(first, scale), getattr(second, scale))


def test_all_zero_weights_stay_zero() -> None:
    for kind in FORMATS:
        zeros = np.zeros((4, 128), np.float32)
        for tensor in FORMATS[kind].quantize([zeros, zeros]):
            assert not tensor.dequantize().any()


@pytest.mark.parametrize(("name", "values"), [("fp8_e4m3", scalar.E4M3), ("fp8_e5m2", scalar.E5M2)])
def test_kv_cache_stores_what_the_scale_makes_of_it(name: str, values: list) -> None:
    x = matrix(8, 4, 8, spread=4.0)
    cache = KV_CACHE_FORMATS[name]
    scale = np.array([[0.5], [1.0], [0.01], [3.0]], np.float32)
    expected = scalar.scaled(x, np.broadcast_to(scale, x.shape), values)
    assert np.array_equal(cache.load(cache.store(x, scale), scale), expected)


def test_unquantized_kv_cache_changes_nothing() -> None:
    x = matrix(9, 2, 8)
    cache = KV_CACHE_FORMATS["bf16"]
    assert cache.store(x, 0.5) is x
    assert cache.load(x, 0.5) is x


def test_formats_describe_themselves() -> None:
    for name, kind in FORMATS.items():
        assert kind.describe().startswith(f"{name}: ")
    described = FORMATS["fp8_block"].quantize([matrix(10, 128, 128)])[0].describe()
    assert described == "fp8 [128, 128], 8 bits per weight, e4m3, one scale per block"
