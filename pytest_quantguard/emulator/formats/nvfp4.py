"""NVFP4: E2M1 values, one E4M3 scale for 16 consecutive input elements, one float32 scale for the tensor.

value = e2m1 * block_scale * global_scale. The rules (global scale amax / (6 * 448), block scale
amax / (6 * global_scale) rounded to E4M3 and 1.0 for an all-zero block, ties to even) are those of NVIDIA's
Model Optimizer, whose tensors are reproduced bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pytest_quantguard.emulator.formats.base import Float32, Format, QuantizedTensor, UInt8
from pytest_quantguard.emulator.formats.blocks import block_amax, check_static_scale, row_chunks, safe_divisor
from pytest_quantguard.emulator.formats.minifloat import E2M1, E4M3
from pytest_quantguard.emulator.linear import ActivationQuantizer

BLOCK = 16
_SIX = np.float32(6.0)
_RANGE = np.float32(6.0 * 448.0)
_SMALLEST_BLOCK_SCALE = np.float32(2.0**-9)
# Adding zero turns the -0.0 of code 8 into +0.0, as Model Optimizer's table has it.
_VALUES = E2M1.table + np.float32(0.0)
# Both values of a byte as one 8-byte element, so that a single look-up unpacks them.
_PAIRS = np.stack([_VALUES[np.arange(256) & 15], _VALUES[np.arange(256) >> 4]], axis=1).view(np.uint64)[:, 0]


@dataclass(frozen=True, eq=False)
class NVFP4Tensor(QuantizedTensor):
    """packed: uint8 [out, in / 2], even index in the low nibble; block_scale: E4M3 bits [out, in / 16]."""

    packed: UInt8
    block_scale: UInt8
    global_scale: np.float32
    format: ClassVar[str] = "nvfp4"

    @property
    def shape(self) -> tuple[int, int]:
        return (self.packed.shape[0], 2 * self.packed.shape[1])

    @property
    def stored_bytes(self) -> int:
        return self.packed.size + self.block_scale.size + 4

    def dequantize(self, out: Float32 | None = None) -> Float32:
        rows, columns = self.shape
        values = np.empty((rows, columns), np.float32) if out is None else out
        for part in row_chunks((rows, columns)):
            unpacked = np.take(_PAIRS, self.packed[part], mode="clip").view(np.float32)
            scale = E4M3.decode(self.block_scale[part]) * self.global_scale
            blocks = unpacked.reshape(len(unpacked), -1, BLOCK)
            np.multiply(blocks, scale[:, :, None], out=values[part].reshape(blocks.shape))
        return values

    @classmethod
    def quantize(cls, weight: Float32, global_scale: np.float32 | None = None) -> NVFP4Tensor:
        """weight: float32 [out, in], in a multiple of 16. global_scale: default amax / 2688."""
        rows, columns = weight.shape
        scale = (
            global_scale_of(float(np.abs(weight).max(initial=0.0))) if global_scale is None else global_scale
        )
        packed = np.empty((rows, columns // 2), np.uint8)
        block_scale = np.empty((rows, columns // BLOCK), np.uint8)
        for part in row_chunks((rows, columns)):
            packed[part], block_scale[part] = _quantize_rows(np.ascontiguousarray(weight[part]), scale)
        return cls(packed, block_scale, scale)


def global_scale_of(amax: float) -> np.float32:
    """The float32 scale of a tensor (or a fused group) whose largest magnitude is `amax`; 1 for zeros."""
    scale: np.float32 = np.float32(amax) / _RANGE if amax else np.float32(1.0)
    return scale


def _quantize_rows(rows: Float32, global_scale: np.float32) -> tuple[UInt8, UInt8]:
    ratio = block_amax(rows, BLOCK) / (_SIX * global_scale)
    zero = ratio == 0
    # A block far below the tensor's amax keeps the smallest scale instead of vanishing with a scale of zero.
    np.maximum(ratio, _SMALLEST_BLOCK_SCALE, out=ratio)
    ratio[zero] = 1.0
    block_scale = E4M3.encode(ratio)
    divisor = E4M3.decode(block_scale) * global_scale
    scaled = rows.reshape(len(rows), -1, BLOCK) / divisor[:, :, None]
    scaled += np.float32(0.0)
    codes = E2M1.encode(scaled.reshape(rows.shape))
    return codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4)), block_scale


@dataclass(frozen=True)
class NVFP4Activation:
    """Fake quantization of activations: dynamic E4M3 scales per 16 elements under a global scale.

    global_scale: the checkpoint's static `input_scale`, or None for a dynamic one per token (row): an answer
    then never depends on which other requests share its batch.
    """

    global_scale: float | None = None

    def __post_init__(self) -> None:
        check_static_scale(self.global_scale)

    def __call__(self, x: Float32) -> Float32:
        """x: float32 [rows, in_features] -> the nearest NVFP4 values, same shape. A block with a NaN becomes
        NaN."""
        rows, columns = x.shape
        blocks = np.ascontiguousarray(x).reshape(rows, columns // BLOCK, BLOCK)
        scale = block_amax(blocks.reshape(rows, columns), BLOCK)
        if self.global_scale is None:
            global_scale = scale.max(axis=1, keepdims=True, initial=0.0) / _RANGE
            divisor = _SIX * safe_divisor(global_scale)
        else:
            global_scale = np.full((1, 1), self.global_scale, np.float32)
            divisor = _SIX * global_scale
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            np.divide(scale, divisor, out=scale)
            np.minimum(scale, np.float32(E4M3.largest), out=scale)
            E4M3.snap(scale)
            np.multiply(scale, global_scale, out=scale)
            quantized = np.divide(blocks, safe_divisor(scale)[:, :, None])
            np.clip(quantized, -_SIX, _SIX, out=quantized)
            E2M1.snap(quantized)
            np.multiply(quantized, scale[:, :, None], out=quantized)
        return quantized.reshape(rows, columns)


class NVFP4Format(Format):
    """NVFP4 weights; with `activation` None, 16-bit activations (W4A16)."""

    block_columns = BLOCK

    def __init__(self, name: str, description: str, activation: ActivationQuantizer | None) -> None:
        self.name = name
        self.description = description
        self.activation = activation

    def quantize(self, weights: Sequence[Float32]) -> list[QuantizedTensor]:
        """All members share one global scale, as fused kernels need and Model Optimizer exports."""
        amax = max(float(np.abs(weight).max(initial=0.0)) for weight in weights)
        scale = global_scale_of(amax)
        return [NVFP4Tensor.quantize(weight, scale) for weight in weights]
