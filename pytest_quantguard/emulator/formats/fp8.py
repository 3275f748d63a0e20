"""FP8: E4M3 or E5M2 values under float32 scales per tensor, per channel, per token, or per 128x128 block.

value = fp8 * scale, scale = amax / largest value of the element type; saturating, ties to even.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from pytest_quantguard.emulator.formats.base import Float32, Format, QuantizedTensor, UInt8
from pytest_quantguard.emulator.formats.blocks import check_static_scale, row_amax, row_chunks, safe_divisor
from pytest_quantguard.emulator.formats.minifloat import E4M3, MiniFloat
from pytest_quantguard.emulator.linear import ActivationQuantizer

BLOCK = 128
WeightGranularity = Literal["tensor", "channel", "block"]
ActivationGranularity = Literal["tensor", "token", "block"]


@dataclass(frozen=True, eq=False)
class FP8Tensor(QuantizedTensor):
    """codes: uint8 [out, in]; scale: float32 [1, 1], [out, 1], or [ceil(out / 128), ceil(in / 128)]."""

    codes: UInt8
    scale: Float32
    element: MiniFloat = E4M3
    granularity: WeightGranularity = "tensor"
    format: ClassVar[str] = "fp8"

    @property
    def shape(self) -> tuple[int, int]:
        return (self.codes.shape[0], self.codes.shape[1])

    @property
    def stored_bytes(self) -> int:
        return self.codes.size + 4 * self.scale.size

    def dequantize(self, out: Float32 | None = None) -> Float32:
        values = self.element.decode(self.codes, out)
        if self.granularity == "block":
            for rows, scale in _block_rows(self.scale, values.shape):
                values[rows] *= scale
        else:
            np.multiply(values, self.scale, out=values)
        return values

    def describe(self) -> str:
        return f"{super().describe()}, {self.element.name}, one scale per {self.granularity}"

    @classmethod
    def quantize(
        cls,
        weight: Float32,
        *,
        element: MiniFloat = E4M3,
        granularity: WeightGranularity = "tensor",
        scale: Float32 | None = None,
    ) -> FP8Tensor:
        """weight: float32 [out, in]. scale: as stored; default amax / largest, 1 where all are zero."""
        if scale is None:
            scale = _weight_scale(weight, element, granularity)
        codes = np.empty(weight.shape, np.uint8)
        if granularity == "block":
            for rows, row_scale in _block_rows(scale, weight.shape):
                codes[rows] = element.encode(weight[rows] / row_scale)
        else:
            for rows in row_chunks(weight.shape):
                codes[rows] = element.encode(
                    weight[rows] / (scale[rows] if granularity == "channel" else scale)
                )
        return cls(codes, scale, element, granularity)


def _weight_scale(weight: Float32, element: MiniFloat, granularity: WeightGranularity) -> Float32:
    if granularity == "tensor":
        amax = row_amax(weight).max(initial=0.0, keepdims=True)
    elif granularity == "channel":
        amax = row_amax(weight)
    else:
        starts = np.arange(0, weight.shape[1], BLOCK)
        column_amax = (
            np.abs(weight[start : start + BLOCK]).max(axis=0) for start in range(0, weight.shape[0], BLOCK)
        )
        amax = np.stack([np.maximum.reduceat(columns, starts) for columns in column_amax])
    return safe_divisor((amax / np.float32(element.largest)).astype(np.float32))


def _block_rows(scale: Float32, shape: tuple[int, ...]) -> list[tuple[slice, Float32]]:
    """For every 128 rows of a matrix of `shape`: their slice, and the scale of each of its columns."""
    return [
        (slice(index * BLOCK, (index + 1) * BLOCK), np.repeat(row, BLOCK)[: shape[1]])
        for index, row in enumerate(scale)
    ]


@dataclass(frozen=True)
class FP8Activation:
    """Fake quantization of activations to FP8.

    scale: the checkpoint's static `input_scale`; None for dynamic scales, one per token (row), per tensor
    (all rows of the batch: an answer then depends on its neighbours), or per 128 elements of a row ("block").
    """

    granularity: ActivationGranularity = "token"
    scale: float | None = None
    element: MiniFloat = E4M3

    def __post_init__(self) -> None:
        check_static_scale(self.scale)

    def __call__(self, x: Float32) -> Float32:
        """x: float32 [rows, in_features] -> the nearest FP8 values, same shape. NaN stays NaN."""
        largest = np.float32(self.element.largest)
        scale: Float32 | np.float32
        if self.scale is not None:
            scale = np.float32(self.scale)
        elif self.granularity == "token":
            scale = safe_divisor(row_amax(x) / largest)
        elif self.granularity == "tensor":
            scale = safe_divisor(row_amax(x).max(initial=0.0, keepdims=True) / largest)
        else:
            groups = np.maximum.reduceat(np.abs(x), np.arange(0, x.shape[1], BLOCK), axis=1)
            scale = np.repeat(safe_divisor(groups / largest), BLOCK, axis=1)[:, : x.shape[1]]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            quantized = np.divide(x, scale)
            np.clip(quantized, -largest, largest, out=quantized)
            self.element.snap(quantized)
            np.multiply(quantized, scale, out=quantized)
        return quantized


class FP8Format(Format):
    """FP8 weights; with `activation` None, 16-bit activations (W8A16)."""

    def __init__(
        self,
        name: str,
        description: str,
        granularity: WeightGranularity,
        activation: ActivationQuantizer | None,
        element: MiniFloat = E4M3,
    ) -> None:
        self.name = name
        self.description = description
        self.activation = activation
        self.granularity = granularity
        self.element = element

    def quantize(self, weights: Sequence[Float32]) -> list[QuantizedTensor]:
        """A scale per tensor is one for the group, as fused kernels need and Model Optimizer exports."""
        scale = None
        if self.granularity == "tensor":
            amax = np.max([row_amax(weight).max(initial=0.0, keepdims=True) for weight in weights], axis=0)
            scale = safe_divisor(amax / np.float32(self.element.largest))
        return [
            FP8Tensor.quantize(weight, element=self.element, granularity=self.granularity, scale=scale)
            for weight in weights
        ]
