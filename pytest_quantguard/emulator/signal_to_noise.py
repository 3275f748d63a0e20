"""How far a checkpoint's dequantized weights are from the unquantized ones, and which are further than the
rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pytest_quantguard.emulator.formats.base import Float32
from pytest_quantguard.emulator.layout import linear_shapes, tensor_shapes
from pytest_quantguard.emulator.model_config import ModelConfig
from pytest_quantguard.emulator.published import PublishedWeights
from pytest_quantguard.emulator.tensor_files import TensorFolder, read_plain_weight
from pytest_quantguard.errors import ModelError

_FLOORS = {"nvfp4": 12.0, "fp8": 22.0}
"""Decibels below which no sound quantization of ordinary weights lies: normal weights give 20 and 31."""

_LEAST_DROP = 1.5
_DEVIATIONS = 6.0
_MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True)
class TensorNoise:
    """decibels: 10 log10(sum of squared weights / sum of squared errors); infinite for equal tensors."""

    tensor: str
    format: str
    decibels: float


def compare_with_reference(
    weights: PublishedWeights, modules: Sequence[str], reference: Path, progress: Callable[[str], None]
) -> tuple[tuple[TensorNoise, ...], list[tuple[TensorNoise, str]]]:
    """The noise of every tensor, and those that stand out with the reason.

    modules: the linear layers to compare. Raises ModelError if the reference has other shapes.
    """
    config = ModelConfig.from_folder(reference)
    if (linear_shapes(config), tensor_shapes(config)) != (
        linear_shapes(weights.config),
        tensor_shapes(weights.config),
    ):
        raise ModelError(
            f"{reference}: is not the model that {weights.files.folder} was made from: shapes differ"
        )
    files = TensorFolder(reference)
    items: list[TensorNoise] = []
    for module in modules:
        progress(f"comparing {module}")
        original = read_plain_weight(files, module, linear_shapes(config)[module], config, "float32")
        stored = weights.quantized((module,))[module].dequantize()
        items.append(TensorNoise(module, weights.format_name(module), decibels(original, stored)))
    for name, shape in tensor_shapes(config).items():
        tensor = f"{name}.weight"
        if tensor in weights.files and weights.files.entry(tensor).shape == shape:
            original, stored = files.float32(tensor), weights.files.float32(tensor)
            items.append(TensorNoise(name, "bf16", decibels(original, stored)))
    return tuple(items), suspicious(items)


def decibels(original: Float32, stored: Float32) -> float:
    """The signal-to-noise ratio; minus infinity for non-finite weights."""
    signal = float(np.square(original, dtype=np.float64).sum())
    noise = float(np.square(original.astype(np.float64) - stored).sum())
    if not np.isfinite(noise):
        return float("-inf")
    if noise == 0:
        return float("inf")
    return float(10 * np.log10(signal / noise)) if signal else float("-inf")


def suspicious(items: Sequence[TensorNoise]) -> list[tuple[TensorNoise, str]]:
    """Quantized tensors below their format's floor, or far below the median of their format."""
    found: list[tuple[TensorNoise, str]] = []
    for kind in dict.fromkeys(item.format for item in items if item.format != "bf16"):
        members = [item for item in items if item.format == kind]
        finite = np.array([item.decibels for item in members if np.isfinite(item.decibels)] or [0.0])
        median = float(np.median(finite))
        spread = _MAD_TO_SIGMA * float(np.median(np.abs(finite - median)))
        limit = median - max(_LEAST_DROP, _DEVIATIONS * spread)
        floor = _FLOORS["nvfp4" if kind.startswith("nvfp4") else "fp8"]
        for item in members:
            if item.decibels < floor:
                found.append(
                    (
                        item,
                        f"{item.decibels:.1f} dB to the reference; {kind} should give at least {floor:g} dB",
                    )
                )
            elif item.decibels < limit:
                found.append(
                    (
                        item,
                        f"{item.decibels:.1f} dB to the reference, the median of {kind} is {median:.1f} dB",
                    )
                )
    return found
