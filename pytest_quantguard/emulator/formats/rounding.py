"""BF16 rounding of float32 arrays by integer arithmetic. Nothing here knows of scales or tensors' meaning."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
UInt16 = npt.NDArray[np.uint16]

_SIXTEEN = np.uint32(16)
_ONE = np.uint32(1)
_HALF = np.uint32(0x7FFF)
_UPPER = np.uint32(0xFFFF0000)


def round_bfloat16(x: Float32, out: Float32 | None = None) -> Float32:
    """Nearest BF16 value of each element, ties to even, as float32.

    x: float32, any shape. `out` may be `x` itself. Infinities stay; a finite value above the largest BF16
    value becomes infinite, as in hardware. NaNs made by arithmetic stay NaN (their payload is 0; a payload of
    all ones would carry into the exponent, so `canonical_nans` cleans what is read from files).
    """
    bits = x.view(np.uint32)
    work = np.right_shift(bits, _SIXTEEN)
    np.bitwise_and(work, _ONE, out=work)
    np.add(work, _HALF, out=work)
    np.add(work, bits, out=work)
    rounded = work.view(np.float32) if out is None else out
    np.bitwise_and(work, _UPPER, out=rounded.view(np.uint32))
    return rounded


def canonical_nans(x: Float32) -> Float32:
    """x with every NaN replaced by the quiet NaN that arithmetic makes; x itself where it has none."""
    nans = np.isnan(x)
    return np.where(nans, np.float32(np.nan), x) if nans.any() else x


def widen_bfloat16(bits: UInt16, out: Float32 | None = None) -> Float32:
    """BF16 bit patterns (uint16) as float32; exact."""
    widened = np.empty(bits.shape, np.float32) if out is None else out
    np.left_shift(bits, _SIXTEEN, out=widened.view(np.uint32), dtype=np.uint32)
    return widened
