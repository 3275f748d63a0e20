"""INT8: symmetric integers -127 .. 127 under one float32 scale per output channel; activations per token.

value = integer * scale, scale = amax / 127, rounded to nearest, ties to even.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pytest_quantguard.emulator.formats.base import Float32, Format, QuantizedTensor
from pytest_quantguard.emulator.formats.blocks import row_amax, row_chunks, safe_divisor
from pytest_quantguard.emulator.linear import ActivationQuantizer

_LARGEST = np.float32(127.0)


@dataclass(frozen=True, eq=False)
class Int8Tensor(QuantizedTensor):
    """integers: int8 [out, in]; scale: float32 [out, 1]."""

    integers: npt.NDArray[np.int8]
    scale: Float32
    format: ClassVar[str] = "int8"

    @property
    def shape(self) -> tuple[int, int]:
        return (self.integers.shape[0], self.integers.shape[1])

    @property
    def stored_bytes(self) -> int:
        return self.integers.size + 4 * self.scale.size

    def dequantize(self, out: Float32 | None = None) -> Float32:
        values = np.empty(self.shape, np.float32) if out is None else out
        return np.multiply(self.integers, self.scale, out=values)

    @classmethod
    def quantize(cls, weight: Float32) -> Int8Tensor:
        """weight: float32 [out, in]. A channel of zeros gets the scale 1."""
        scale = safe_divisor(row_amax(weight) / _LARGEST)
        integers = np.empty(weight.shape, np.int8)
        for rows in row_chunks(weight.shape):
            integers[rows] = np.clip(np.rint(weight[rows] / scale[rows]), -_LARGEST, _LARGEST)
        return cls(integers, scale)


@dataclass(frozen=True)
class Int8Activation:
    """Fake quantization of activations to INT8 with a dynamic scale per token (row)."""

    def __call__(self, x: Float32) -> Float32:
        """x: float32 [rows, in_features] -> the nearest values, same shape. A row with a NaN becomes NaN."""
        scale = safe_divisor(row_amax(x) / _LARGEST)
        quantized = np.divide(x, scale)
        np.rint(quantized, out=quantized)
        np.clip(quantized, -_LARGEST, _LARGEST, out=quantized)
        return np.multiply(quantized, scale, out=quantized)


class Int8Format(Format):
    """INT8 weights; with `activation` None, 16-bit activations (W8A16)."""

    def __init__(self, name: str, description: str, activation: ActivationQuantizer | None) -> None:
        self.name = name
        self.description = description
        self.activation = activation

    def quantize(self, weights: Sequence[Float32]) -> list[QuantizedTensor]:
        """Every channel has its own scale, so fused members are independent."""
        return [Int8Tensor.quantize(weight) for weight in weights]
