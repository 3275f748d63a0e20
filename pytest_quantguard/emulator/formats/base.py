"""What every number format offers: a quantized weight matrix, and the rule that makes one.

A format pairs how weights are stored with how the layer's input is quantized before the product.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pytest_quantguard.emulator.linear import ActivationQuantizer

Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]


class QuantizedTensor(ABC):
    """A weight matrix [out_features, in_features] as its format stores it. Instances are never changed in
    place."""

    @property
    @abstractmethod
    def format(self) -> str:
        """The format's name without its activation rule: bf16, nvfp4, fp8, mxfp4, mxfp8, int8."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features) of the matrix that `dequantize` gives."""

    @property
    @abstractmethod
    def stored_bytes(self) -> int:
        """Size of values and scales together."""

    @abstractmethod
    def dequantize(self, out: Float32 | None = None) -> Float32:
        """The represented values, float32 [out_features, in_features]; written into `out` where given."""

    @property
    def bits_per_weight(self) -> float:
        """Scales included."""
        rows, columns = self.shape
        return 8 * self.stored_bytes / (rows * columns)

    def describe(self) -> str:
        """One line for logs and reports."""
        rows, columns = self.shape
        return f"{self.format} [{rows}, {columns}], {self.bits_per_weight:.3g} bits per weight"


class Format(ABC):
    """A named way to store weights and to quantize activations."""

    name: str
    description: str
    activation: ActivationQuantizer | None
    block_columns: int = 1
    """The input dimension must be a multiple of this."""

    def describe(self) -> str:
        """One line for help texts and reports."""
        return f"{self.name}: {self.description}"

    @abstractmethod
    def quantize(self, weights: Sequence[Float32]) -> list[QuantizedTensor]:
        """Quantize the matrices of one fused group (q, k, v; gate, up; or a single one) together.

        weights: float32 [out_features, in_features] each. Formats whose kernels hold one scale for the whole
        group (the global scale of NVFP4) share it here.
        """


@dataclass(frozen=True, eq=False)
class PlainTensor(QuantizedTensor):
    """Unquantized weights: already at the precision of the compute type."""

    values: Float32
    format: ClassVar[str] = "bf16"

    @property
    def shape(self) -> tuple[int, int]:
        return (self.values.shape[0], self.values.shape[1])

    @property
    def stored_bytes(self) -> int:
        return 2 * self.values.size

    def dequantize(self, out: Float32 | None = None) -> Float32:
        if out is None:
            return self.values
        np.copyto(out, self.values)
        return out


class PlainFormat(Format):
    """No quantization."""

    name = "bf16"
    description = "weights and activations at the precision of the compute type"
    activation = None

    def quantize(self, weights: Sequence[Float32]) -> list[QuantizedTensor]:
        return [PlainTensor(weight) for weight in weights]
