"""Defects of stored weights and scales, as pure functions of one group of fused modules.

Each takes the quantized weights by module name and gives what a defective loader or exporter would have used;
tensors of formats that have no such scale come back as the same object. A correct NVFP4 weight is q *
block_scale * s2, where s2 = amax / 2688 is shared by the group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pytest_quantguard.emulator.formats import (
    FORMATS,
    FP8Tensor,
    MXTensor,
    NVFP4Tensor,
    PlainTensor,
    QuantizedTensor,
)
from pytest_quantguard.emulator.formats.minifloat import E2M1, E4M3

Group = Mapping[str, QuantizedTensor]
ScaleArray = npt.NDArray[Any]
"""Bit patterns or float32: [out_features, blocks], or a scale per block of rows and columns."""

_TILE_ROWS, _TILE_COLUMNS = 128, 4
_RANGE = 2688.0


def each(group: Group, change: Callable[[QuantizedTensor], QuantizedTensor]) -> dict[str, QuantizedTensor]:
    """The group with every tensor changed on its own."""
    return {name: change(tensor) for name, tensor in group.items()}


def nibble_swap(tensor: QuantizedTensor) -> QuantizedTensor:
    """The two values of each byte exchanged."""
    four = np.uint8(4)
    if isinstance(tensor, NVFP4Tensor):
        return replace(tensor, packed=(tensor.packed >> four) | (tensor.packed << four))
    if isinstance(tensor, MXTensor) and tensor.element is E2M1:
        return replace(tensor, codes=(tensor.codes >> four) | (tensor.codes << four))
    return tensor


def scale_swizzle(tensor: QuantizedTensor) -> QuantizedTensor:
    """Block scales in the 128x4-interleaved order of cuBLAS, read as if they lay row by row."""
    return _with_block_scales(tensor, _interleave)


def _interleave(scales: ScaleArray) -> ScaleArray:
    rows, columns = scales.shape
    tiles_down, tiles_across = -(-rows // _TILE_ROWS), -(-columns // _TILE_COLUMNS)
    padded = np.zeros((tiles_down * _TILE_ROWS, tiles_across * _TILE_COLUMNS), scales.dtype)
    padded[:rows, :columns] = scales
    # Element (row, column) of a tile lies at (row % 32) * 16 + (row // 32) * 4 + column.
    tiles = padded.reshape(tiles_down, 4, 32, tiles_across, _TILE_COLUMNS).transpose(0, 3, 2, 1, 4)
    interleaved: ScaleArray = tiles.reshape(-1)[: rows * columns].reshape(rows, columns)
    return interleaved


def block_scale_roll(tensor: QuantizedTensor) -> QuantizedTensor:
    """Block scales shifted by one block along the input dimension."""
    return _with_block_scales(tensor, lambda scales: np.roll(scales, 1, axis=1))


def shard_scale_mixup(tensor: QuantizedTensor) -> QuantizedTensor:
    """The second half of the input dimension uses the block scales of the first half."""

    def repeat_first_half(scales: ScaleArray) -> ScaleArray:
        mixed: ScaleArray = scales.copy()
        half = scales.shape[1] // 2
        mixed[:, scales.shape[1] - half :] = scales[:, :half]
        return mixed

    return _with_block_scales(tensor, repeat_first_half)


def scale_round(tensor: QuantizedTensor, direction: Literal["up", "down"]) -> QuantizedTensor:
    """Block scales rounded to a power of two, the values kept."""
    nearest = np.ceil if direction == "up" else np.floor

    def to_power_of_two(scales: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        positive = scales > 0
        exponents = nearest(np.log2(scales, where=positive, out=np.zeros_like(scales)))
        return np.where(positive, np.exp2(exponents), scales).astype(np.float32)

    if isinstance(tensor, NVFP4Tensor):
        return replace(tensor, block_scale=E4M3.encode(to_power_of_two(E4M3.decode(tensor.block_scale))))
    if isinstance(tensor, FP8Tensor) and tensor.granularity == "block":
        return replace(tensor, scale=to_power_of_two(tensor.scale))
    return tensor


def _with_block_scales(
    tensor: QuantizedTensor, change: Callable[[ScaleArray], ScaleArray]
) -> QuantizedTensor:
    if isinstance(tensor, NVFP4Tensor):
        return replace(tensor, block_scale=change(tensor.block_scale))
    if isinstance(tensor, MXTensor):
        return replace(tensor, scale=change(tensor.scale))
    if isinstance(tensor, FP8Tensor) and tensor.granularity == "block":
        return replace(tensor, scale=change(tensor.scale))
    return tensor


def with_global_scale(
    tensor: QuantizedTensor, change: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]
) -> QuantizedTensor:
    """The scale of the tensor (or of each channel, where channels have their own) changed, the rest kept."""
    if isinstance(tensor, NVFP4Tensor):
        return replace(tensor, global_scale=np.float32(change(np.full((1, 1), tensor.global_scale))[0, 0]))
    if isinstance(tensor, FP8Tensor) and tensor.granularity != "block":
        return replace(tensor, scale=change(tensor.scale).astype(np.float32))
    return tensor


def multiply_global_scale(tensor: QuantizedTensor, factor: float) -> QuantizedTensor:
    """Every weight off by `factor`."""
    return with_global_scale(tensor, lambda scale: scale * np.float32(factor))


def fused_scale_max(group: Group) -> dict[str, QuantizedTensor]:
    """s2 is the largest of the group's, but each member's block scales were made for its own."""
    own = _own_scales(group)
    largest = max(own.values(), default=1.0)
    return {name: multiply_global_scale(tensor, largest / own[name]) for name, tensor in group.items()}


def fused_scale_first(group: Group, ratio: float | None) -> dict[str, QuantizedTensor]:
    """The first member's s2 is used for the others; `ratio` replaces the weights' own ratio of scales."""
    own = _own_scales(group)
    first = next(iter(own.values()))
    return {
        name: tensor
        if index == 0
        else multiply_global_scale(tensor, first / own[name] if ratio is None else ratio)
        for index, (name, tensor) in enumerate(group.items())
    }


def _own_scales(group: Group) -> dict[str, float]:
    """What each member's s2 would be had it been quantized alone; 1.0 for zero weights."""
    amax = {name: float(np.abs(tensor.dequantize()).max(initial=0.0)) for name, tensor in group.items()}
    return {name: value / _RANGE if value else 1.0 for name, value in amax.items()}


def one_scale_for_fused(group: Group, ratio: float) -> dict[str, QuantizedTensor]:
    """Members share a scale that one of them, whose amax is `ratio` times theirs, dictates.

    Only the others are in this group, so the scale is simply `ratio` times too large, and values are rounded
    under it.
    """

    def coarsen(tensor: QuantizedTensor) -> QuantizedTensor:
        factor = np.float32(ratio)
        if isinstance(tensor, NVFP4Tensor):
            return NVFP4Tensor.quantize(tensor.dequantize(), tensor.global_scale * factor)
        if isinstance(tensor, FP8Tensor) and tensor.granularity == "tensor":
            return FP8Tensor.quantize(
                tensor.dequantize(), element=tensor.element, granularity="tensor", scale=tensor.scale * factor
            )
        return tensor

    return each(group, coarsen)


def requantize(tensor: QuantizedTensor, kind: str) -> QuantizedTensor:
    """The represented values, quantized as `kind` (a format's name)."""
    return FORMATS[kind].quantize([tensor.dequantize()])[0]


def zeros(tensor: QuantizedTensor) -> QuantizedTensor:
    """Weights that were never loaded."""
    return PlainTensor(np.zeros(tensor.shape, np.float32))
