"""MXFP4 and MXFP8: E2M1 or E4M3 values, 32 consecutive input elements sharing a power-of-two scale (E8M0).

As in the OCP Microscaling Formats specification 1.0, section 6.3: the shared exponent is floor(log2(amax))
less the element type's largest exponent; elements round to nearest, ties to even, and saturate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pytest_quantguard.emulator.formats.base import Float32, Format, QuantizedTensor, UInt8
from pytest_quantguard.emulator.formats.blocks import block_amax, row_chunks
from pytest_quantguard.emulator.formats.minifloat import MiniFloat, decode_e8m0
from pytest_quantguard.emulator.linear import ActivationQuantizer

BLOCK = 32
_EXPONENT_SHIFT = np.uint32(23)


def shared_exponents(x: Float32, element: MiniFloat) -> UInt8:
    """E8M0 codes (exponent + 127) for each 32 elements of x [rows, columns]; 0 where all are zero, 255 for
    NaN."""
    amax = block_amax(x, BLOCK)
    # A float32's exponent field is floor(log2) + 127; subnormal blocks count as 2^-127, the smallest scale.
    biased = np.right_shift(amax.view(np.uint32), _EXPONENT_SHIFT).view(np.int32)
    codes = np.clip(biased - int(np.log2(element.largest)), 0, 254)
    codes[~np.isfinite(amax)] = 255
    stored: UInt8 = codes.astype(np.uint8)
    return stored


@dataclass(frozen=True, eq=False)
class MXTensor(QuantizedTensor):
    """codes: uint8, E4M3 bits [out, in] or pairs of E2M1 [out, in / 2]; scale: E8M0 codes [out, in / 32]."""

    codes: UInt8
    scale: UInt8
    element: MiniFloat

    @property
    def format(self) -> str:
        return f"mxfp{self.element.bits}"

    @property
    def shape(self) -> tuple[int, int]:
        return (self.scale.shape[0], BLOCK * self.scale.shape[1])

    @property
    def stored_bytes(self) -> int:
        return self.codes.size + self.scale.size

    def dequantize(self, out: Float32 | None = None) -> Float32:
        values = np.empty(self.shape, np.float32) if out is None else out
        if self.element.bits == 4:
            values[:, 0::2] = self.element.table[self.codes & np.uint8(15)]
            values[:, 1::2] = self.element.table[self.codes >> np.uint8(4)]
        else:
            self.element.decode(self.codes, out=values)
        blocks = values.reshape(len(values), -1, BLOCK)
        np.multiply(blocks, decode_e8m0(self.scale)[:, :, None], out=blocks)
        return values

    @classmethod
    def quantize(cls, weight: Float32, element: MiniFloat) -> MXTensor:
        """weight: float32 [out, in], in a multiple of 32."""
        rows, columns = weight.shape
        codes = np.empty((rows, columns * element.bits // 8), np.uint8)
        scale = np.empty((rows, columns // BLOCK), np.uint8)
        for part in row_chunks(weight.shape):
            chunk = np.ascontiguousarray(weight[part])
            scale[part] = shared_exponents(chunk, element)
            blocks = chunk.reshape(len(chunk), -1, BLOCK) / decode_e8m0(scale[part])[:, :, None]
            encoded = element.encode(blocks.reshape(chunk.shape))
            codes[part] = (
                encoded if element.bits == 8 else encoded[:, 0::2] | (encoded[:, 1::2] << np.uint8(4))
            )
        return cls(codes, scale, element)


@dataclass(frozen=True)
class MXActivation:
    """Fake quantization of activations with dynamic power-of-two scales per 32 elements."""

    element: MiniFloat

    def __call__(self, x: Float32) -> Float32:
        """x: float32 [rows, in_features] -> the nearest values; a block with a NaN becomes NaN."""
        work = np.ascontiguousarray(x)
        scale = decode_e8m0(shared_exponents(work, self.element))[:, :, None]
        largest = np.float32(self.element.largest)
        quantized = np.divide(work.reshape(len(work), -1, BLOCK), scale)
        np.clip(quantized, -largest, largest, out=quantized)
        self.element.snap(quantized)
        np.multiply(quantized, scale, out=quantized)
        return quantized.reshape(x.shape)


class MXFormat(Format):
    """MXFP4 or MXFP8 weights; with `activation` None, 16-bit activations."""

    block_columns = BLOCK

    def __init__(
        self, name: str, description: str, element: MiniFloat, activation: ActivationQuantizer | None
    ) -> None:
        self.name = name
        self.description = description
        self.element = element
        self.activation = activation

    def quantize(self, weights: Sequence[Float32]) -> list[QuantizedTensor]:
        """Blocks know nothing of the rest of the tensor, so every member is quantized alone."""
        return [MXTensor.quantize(weight, self.element) for weight in weights]
