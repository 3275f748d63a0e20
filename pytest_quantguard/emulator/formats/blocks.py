"""Block-wise work shared by the formats whose scales cover runs of consecutive elements of a row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

_CHUNK_ELEMENTS = 1 << 17
"""Half a megabyte of float32: temporaries of this size stay in the cache and are recycled at once."""


def row_chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Slices of consecutive rows that cover a matrix of `shape`, each of a size that is fast to work on."""
    step = max(1, _CHUNK_ELEMENTS // max(shape[1], 1))
    return (slice(start, start + step) for start in range(0, shape[0], step))


def block_amax(x: Float32, width: int) -> Float32:
    """Largest magnitude of every `width` consecutive elements (a power of two) of each row.

    x: C-contiguous float32 [rows, columns], columns a multiple of width. Returns float32 [rows, columns /
    width]; NaN where a block holds one. Halving pairwise over the flat array is several times faster than a
    reduction over a short last axis.
    """
    rows, columns = x.shape
    largest = np.abs(x).reshape(-1)
    while width > 1:
        largest = np.maximum(largest[0::2], largest[1::2])
        width //= 2
    return largest.reshape(rows, -1) if rows else largest.reshape(0, columns // max(width, 1))


def row_amax(x: Float32) -> Float32:
    """Largest magnitude of each row: float32 [rows, 1]; 0 for rows without columns."""
    largest: Float32 = x.max(axis=1, keepdims=True, initial=0.0)
    np.maximum(largest, -x.min(axis=1, keepdims=True, initial=0.0), out=largest)
    return largest


def safe_divisor(scale: Float32) -> Float32:
    """`scale` with zeros replaced by one: what is divided by it is then multiplied by the zero again."""
    return np.where(scale == 0, np.float32(1.0), scale)


def check_static_scale(scale: float | None) -> None:
    """Raises ValueError unless a checkpoint's activation scale is usable; None stands for a dynamic one."""
    if scale is not None and not 0 < scale < np.inf:
        raise ValueError(f"a static activation scale must be positive and finite, found {scale}")
