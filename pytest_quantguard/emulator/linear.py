"""The quantized linear layer, as the checkpoint reader makes it and the model uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


class ActivationQuantizer(Protocol):
    """Fake quantization of a linear layer's input: returns the values that the format can represent."""

    def __call__(self, x: Float32) -> Float32:
        """x: float32 [rows, in_features] -> the same shape, quantized and dequantized."""
        ...


@dataclass(slots=True)
class Linear:
    """y = quantize(x) @ weight.T + bias, in float32; the caller rounds the result to the compute type.

    weight: float32 [out_features, in_features], already dequantized.
    """

    name: str
    weight: Float32
    bias: Float32 | None = None
    activation: ActivationQuantizer | None = None
    format: str = "bf16"
