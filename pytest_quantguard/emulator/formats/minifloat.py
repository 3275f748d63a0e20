"""Floating-point numbers of 4 and 8 bits: E2M1, E4M3 (the "fn" variant), E5M2, and the power-of-two E8M0.

Element types only: no scales, no blocks. E4M3 and E5M2 follow Micikevicius et al., "FP8 Formats for Deep
Learning" (2022); E2M1 and E8M0 the OCP Microscaling Formats specification 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]

_EXPONENT_BITS = np.uint32(0x7F800000)


def _decode_table(exponent_bits: int, mantissa_bits: int, largest: float) -> Float32:
    """The value of every bit pattern, from the definition sign * 2^(e - bias) * (1 + m / 2^mantissa_bits)."""
    bias = 2 ** (exponent_bits - 1) - 1
    codes = 2 ** (1 + exponent_bits + mantissa_bits)
    table = np.empty(codes, np.float32)
    for code in range(codes):
        exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
        mantissa = (code & (2**mantissa_bits - 1)) / 2**mantissa_bits
        magnitude = (1 + mantissa) * 2.0 ** (exponent - bias) if exponent else mantissa * 2.0 ** (1 - bias)
        if magnitude > largest:
            # E5M2 keeps IEEE's infinity; E4M3fn has only NaN above its largest value.
            magnitude = np.inf if (exponent_bits, mantissa) == (5, 0) else np.nan
        table[code] = -magnitude if code >> (exponent_bits + mantissa_bits) else magnitude
    table.flags.writeable = False
    return table


@dataclass(frozen=True)
class MiniFloat:
    """One element type. Rounding is to nearest, ties to even, saturating at `largest`."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    largest: float
    table: Float32 = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", _decode_table(self.exponent_bits, self.mantissa_bits, self.largest))

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def smallest_normal(self) -> float:
        """Below this magnitude the step no longer shrinks."""
        return float(2.0 ** (2 - 2 ** (self.exponent_bits - 1)))

    def round(self, x: Float32) -> Float32:
        """Nearest representable value of each element of x (float32, any shape), with the sign of zero; NaN
        stays."""
        rounded = np.clip(x, np.float32(-self.largest), np.float32(self.largest))
        self.snap(rounded)
        return np.copysign(rounded, x, out=rounded)

    def snap(self, x: Float32, scratch: Float32 | None = None) -> None:
        """Round x in place: the fast path, for |x| <= largest; a value that rounds to zero loses its sign.

        Adding and subtracting 1.5 * 2^(23 - mantissa_bits) times the element's power of two lets the FPU's
        own rounding do the work: the last bit of the sum is worth one step of the grid. `scratch` has x's
        shape.
        """
        magic = np.empty(x.shape, np.float32) if scratch is None else scratch
        np.bitwise_and(x.view(np.uint32), _EXPONENT_BITS, out=magic.view(np.uint32))
        np.maximum(magic, np.float32(self.smallest_normal), out=magic)
        np.multiply(magic, np.float32(1.5 * 2.0 ** (23 - self.mantissa_bits)), out=magic)
        np.add(x, magic, out=x)
        np.subtract(x, magic, out=x)

    def encode(self, x: Float32) -> UInt8:
        """The bit pattern of the nearest representable value, one uint8 per element (E2M1 uses its low 4
        bits).

        The sign of a value that rounds to zero is kept. NaN becomes the all-ones magnitude where the type has
        NaN, and the largest value in E2M1, which has none.
        """
        magnitude = self.round(np.abs(x))
        # Lifting subnormals by the smallest normal makes their steps mantissa bits, one exponent too high.
        subnormal = magnitude < self.smallest_normal
        lifted = magnitude + subnormal * np.float32(self.smallest_normal)
        codes = np.right_shift(lifted.view(np.uint32), np.uint32(23 - self.mantissa_bits)).view(np.int32)
        bias = 2 ** (self.exponent_bits - 1) - 1
        codes -= (127 - bias + subnormal.astype(np.int32)) << self.mantissa_bits
        nans = np.isnan(magnitude)
        if nans.any():
            codes[nans] = 2 ** (self.bits - 1) - 1
        encoded: UInt8 = codes.astype(np.uint8)
        encoded |= np.signbit(x).astype(np.uint8) << np.uint8(self.bits - 1)
        return encoded

    def decode(self, codes: UInt8, out: Float32 | None = None) -> Float32:
        """Values of bit patterns."""
        if out is None:
            return self.table[codes]
        return np.take(self.table, codes, out=out, mode="clip")


E2M1 = MiniFloat("e2m1", exponent_bits=2, mantissa_bits=1, largest=6.0)
E4M3 = MiniFloat("e4m3", exponent_bits=4, mantissa_bits=3, largest=448.0)
E5M2 = MiniFloat("e5m2", exponent_bits=5, mantissa_bits=2, largest=57344.0)


_POWERS_OF_TWO = np.array([2.0 ** (code - 127) for code in range(255)] + [np.nan], np.float32)
_POWERS_OF_TWO.flags.writeable = False


def decode_e8m0(codes: UInt8) -> Float32:
    """The shared scales 2^(code - 127) of the microscaling formats; NaN for 255."""
    return _POWERS_OF_TWO[codes]
