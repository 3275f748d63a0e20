"""The number formats once more, one number at a time, from their definitions and by exhaustive search.

Slow and obviously right; shares no code with the package. Scales are float32 arithmetic where the format
prescribes it.
"""

from __future__ import annotations

import bisect
import math
from fractions import Fraction

import numpy as np


def minifloat_values(exponent_bits: int, mantissa_bits: int, largest: float) -> list[Fraction]:
    """All non-negative finite values, by bit pattern: entry c is the value of code c."""
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = Fraction(mantissa, 2**mantissa_bits)
        if exponent:
            value = (1 + fraction) * Fraction(2) ** (exponent - bias)
        else:
            value = fraction * Fraction(2) ** (1 - bias)
        if value <= largest:
            values.append(value)
    return values


E2M1 = minifloat_values(2, 1, 6)
E4M3 = minifloat_values(4, 3, 448)
E5M2 = minifloat_values(5, 2, 57344)


def nearest_code(x: float, values: list[Fraction]) -> int:
    """The code of the value nearest to |x|; of two equally near the even code; saturating."""
    magnitude = Fraction(abs(float(x))) if math.isfinite(x) else values[-1]
    above = min(bisect.bisect_left(values, magnitude), len(values) - 1)
    candidates = (max(above - 1, 0), above)
    return min(candidates, key=lambda code: (abs(values[code] - magnitude), code % 2))


def nearest(x: float, values: list[Fraction]) -> float:
    """The value nearest to x, with x's sign."""
    return math.copysign(float(values[nearest_code(x, values)]), x)


def nvfp4(matrix: np.ndarray, global_scale: np.float32) -> np.ndarray:
    """Quantize and dequantize under a given global scale; all-zero blocks stay zero."""
    result = np.zeros_like(matrix)
    for row in range(matrix.shape[0]):
        for start in range(0, matrix.shape[1], 16):
            block = matrix[row, start : start + 16]
            amax = max(abs(value) for value in block)
            if amax == 0:
                continue
            scale = np.float32(nearest(amax / (np.float32(6) * global_scale), E4M3)) * global_scale
            for index, value in enumerate(block):
                result[row, start + index] = np.float32(nearest(value / scale, E2M1)) * scale if scale else 0
    return result


def mx(matrix: np.ndarray, values: list[Fraction], largest_exponent: int) -> np.ndarray:
    """OCP microscaling: 32 elements under 2^(floor(log2(amax)) - largest_exponent)."""
    result = np.zeros_like(matrix)
    for row in range(matrix.shape[0]):
        for start in range(0, matrix.shape[1], 32):
            block = [float(value) for value in matrix[row, start : start + 32]]
            amax = max(abs(value) for value in block)
            if amax == 0:
                continue
            scale = 2.0 ** max(-127, math.frexp(amax)[1] - 1 - largest_exponent)
            for index, value in enumerate(block):
                result[row, start + index] = nearest(value / scale, values) * scale
    return result


def scaled(matrix: np.ndarray, scales: np.ndarray, values: list[Fraction]) -> np.ndarray:
    """FP8 under a scale for every element (float32, matrix's shape)."""
    result = np.zeros_like(matrix)
    for index in np.ndindex(matrix.shape):
        result[index] = np.float32(nearest(matrix[index] / scales[index], values)) * scales[index]
    return result


def int8(matrix: np.ndarray) -> np.ndarray:
    """Symmetric integers under amax / 127 per row; Python's round is to nearest even."""
    result = np.zeros_like(matrix)
    for row in range(matrix.shape[0]):
        amax = max(abs(value) for value in matrix[row])
        if amax == 0:
            continue
        scale = np.float32(amax) / np.float32(127)
        for column in range(matrix.shape[1]):
            integer = min(127, max(-127, round(float(matrix[row, column] / scale))))
            result[row, column] = np.float32(integer) * scale
    return result
