"""Element types against the golden casts, an exhaustive scalar search, and ml_dtypes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_quantguard.emulator.formats.minifloat import E2M1, E4M3, E5M2, MiniFloat, decode_e8m0
from pytest_quantguard.emulator.formats.rounding import (
    canonical_nans,
    round_bfloat16,
    widen_bfloat16,
)

from . import scalar

VECTORS = Path(__file__).parents[1] / "data" / "golden" / "fp8_vectors.npz"
TYPES = [
    pytest.param(E2M1, scalar.E2M1, ml_dtypes.float4_e2m1fn, id="e2m1"),
    pytest.param(E4M3, scalar.E4M3, ml_dtypes.float8_e4m3fn, id="e4m3"),
    pytest.param(E5M2, scalar.E5M2, ml_dtypes.float8_e5m2, id="e5m2"),
]
SEARCHED = [pytest.param(*case.values[:2], id=case.id) for case in TYPES]
FLOATS = st.floats(width=32, allow_nan=False)


def bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


@pytest.mark.parametrize(("element", "stored"), [(E4M3, "e4m3fn_saturated"), (E5M2, "e5m2_saturated")])
def test_golden_fp8_casts_bit_for_bit(element: MiniFloat, stored: str) -> None:
    vectors = np.load(VECTORS)
    expected = bits(vectors[stored])
    assert np.array_equal(bits(element.round(vectors["input"])), expected)
    assert np.array_equal(bits(element.decode(element.encode(vectors["input"]))), expected)


def test_golden_bfloat16_casts_bit_for_bit() -> None:
    vectors = np.load(VECTORS)
    assert np.array_equal(bits(round_bfloat16(vectors["input"])), bits(vectors["bfloat16"]))


@pytest.mark.parametrize(("element", "values", "other"), TYPES)
def test_every_code_decodes_as_defined(element: MiniFloat, values: list, other: type) -> None:
    codes = np.arange(2**element.bits, dtype=np.uint8)
    decoded = element.decode(codes)
    assert [float(value) for value in decoded[: len(values)]] == [float(value) for value in values]
    assert np.array_equal(bits(decoded), bits(codes.view(other).astype(np.float32))) or np.array_equal(
        np.nan_to_num(decoded), np.nan_to_num(codes.view(other).astype(np.float32))
    )
    finite = np.isfinite(decoded)
    assert np.array_equal(element.encode(decoded)[finite], codes[finite])


@pytest.mark.parametrize(("element", "values"), SEARCHED)
@given(x=st.lists(FLOATS, min_size=1, max_size=20))
def test_rounding_finds_the_nearest_value_ties_to_even(
    element: MiniFloat, values: list, x: list[float]
) -> None:
    array = np.array(x, np.float32)
    expected = np.array([scalar.nearest(value, values) for value in x], np.float32)
    assert np.array_equal(bits(element.round(array)), bits(expected))
    assert np.array_equal(bits(element.decode(element.encode(array))), bits(expected))


@pytest.mark.parametrize(("element", "values"), SEARCHED)
def test_halfway_cases_and_their_neighbours(element: MiniFloat, values: list) -> None:
    halves = np.array([float((low + high) / 2) for low, high in pairwise(values)], np.float32)
    x = np.concatenate([halves, np.nextafter(halves, np.float32(0)), np.nextafter(halves, np.float32(1e9))])
    x = np.concatenate([x, -x])
    expected = np.array([scalar.nearest(float(value), values) for value in x], np.float32)
    assert np.array_equal(bits(element.round(x)), bits(expected))
    snapped = x.copy()
    element.snap(snapped)
    assert np.array_equal(snapped, expected)


@pytest.mark.parametrize("element", [E4M3, E5M2])
def test_nan_stays_nan_and_infinity_saturates(element: MiniFloat) -> None:
    x = np.array([np.nan, np.inf, -np.inf], np.float32)
    rounded = element.round(x)
    assert np.isnan(rounded[0])
    assert rounded[1:].tolist() == [element.largest, -element.largest]
    assert np.isnan(element.decode(element.encode(x))[0])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_bfloat16_rounding_equals_ml_dtypes(patterns: list[int]) -> None:
    x = canonical_nans(np.array(patterns, np.uint32).view(np.float32))
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    rounded = round_bfloat16(x)
    assert np.array_equal(np.isnan(rounded), np.isnan(expected))
    assert np.array_equal(bits(rounded)[~np.isnan(expected)], bits(expected)[~np.isnan(expected)])


def test_bfloat16_rounding_in_place_and_into_a_buffer() -> None:
    x = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    out = np.empty_like(x)
    assert round_bfloat16(x, out=out) is out
    assert np.array_equal(out, expected)
    assert np.array_equal(round_bfloat16(x[:, ::2]), expected[:, ::2])
    round_bfloat16(x, out=x)
    assert np.array_equal(x, expected)
    assert np.array_equal(widen_bfloat16(x.astype(ml_dtypes.bfloat16).view(np.uint16)), x)


def test_a_nan_of_any_payload_survives() -> None:
    x = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(round_bfloat16(canonical_nans(x))).all()


def test_powers_of_two() -> None:
    codes = np.array([0, 1, 126, 127, 128, 254, 255], np.uint8)
    expected = [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127]
    assert decode_e8m0(codes)[:-1].tolist() == expected
    assert np.isnan(decode_e8m0(codes)[-1])
