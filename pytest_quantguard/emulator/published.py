"""Reads the weights and scales of published quantized checkpoints, as `quantization_config.py` describes
them.

Tensor names by method, for a module M: modelopt: M.weight (packed or FP8), M.weight_scale, M.weight_scale_2
(NVFP4), M.input_scale; k_proj.k_scale, v_proj.v_scale. compressed-tensors: M.weight_packed, M.weight_scale,
M.weight_global_scale and M.input_global_scale (both the inverse of ModelOpt's) for NVFP4; M.weight,
M.weight_scale, M.input_scale for FP8; self_attn.k_scale, self_attn.v_scale. fp8: M.weight, M.weight_scale_inv
(which is multiplied with, in spite of its name).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pytest_quantguard.emulator.formats import (
    FP8Activation,
    FP8Tensor,
    NVFP4Activation,
    NVFP4Tensor,
    PlainTensor,
    QuantizedTensor,
)
from pytest_quantguard.emulator.formats.base import Float32, UInt8
from pytest_quantguard.emulator.formats.fp8 import BLOCK as FP8_BLOCK_SIZE
from pytest_quantguard.emulator.formats.minifloat import E4M3
from pytest_quantguard.emulator.formats.nvfp4 import BLOCK
from pytest_quantguard.emulator.layout import Group, linear_shapes
from pytest_quantguard.emulator.linear import ActivationQuantizer
from pytest_quantguard.emulator.model_config import ModelConfig
from pytest_quantguard.emulator.quantization_config import QuantizationConfig, StoredScheme
from pytest_quantguard.emulator.tensor_files import ComputeType, TensorFolder, read_plain_weight
from pytest_quantguard.errors import ModelError


@dataclass(frozen=True)
class TensorNames:
    """The parts of one stored linear layer. Names of scales that the scheme does not have are None."""

    weight: str
    weight_scale: str
    global_scale: str | None
    input_scale: str | None
    inverse: bool
    """Global scales are stored as 1 / scale."""


def tensor_names(module: str, scheme: StoredScheme, method: str) -> TensorNames:
    """Where a checkpoint of `method` keeps the parts of `module`."""
    static = scheme.activation == "static"
    if method == "compressed-tensors" and scheme.weights == "nvfp4":
        return TensorNames(
            f"{module}.weight_packed",
            f"{module}.weight_scale",
            f"{module}.weight_global_scale",
            f"{module}.input_global_scale" if static else None,
            inverse=True,
        )
    return TensorNames(
        f"{module}.weight",
        f"{module}.weight_scale_inv" if method == "fp8" else f"{module}.weight_scale",
        f"{module}.weight_scale_2" if scheme.weights == "nvfp4" else None,
        f"{module}.input_scale" if static else None,
        inverse=False,
    )


def kv_scale_names(files: TensorFolder, layer: int, method: str) -> tuple[str, str]:
    """Names of a layer's k_scale and v_scale; where the folder has neither spelling, the method's own."""
    attention = f"model.layers.{layer}.self_attn"
    spellings = [
        (f"{attention}.k_proj.k_scale", f"{attention}.v_proj.v_scale"),
        (f"{attention}.k_scale", f"{attention}.v_scale"),
    ]
    if method == "compressed-tensors":
        spellings.reverse()
    present = [names for names in spellings if any(name in files for name in names)]
    return (present or spellings)[0]


@dataclass(frozen=True)
class PublishedWeights:
    """The linear layers of a quantized folder, as stored."""

    files: TensorFolder
    config: ModelConfig
    dtype: ComputeType
    quantization: QuantizationConfig

    def quantized(self, group: Group) -> dict[str, QuantizedTensor]:
        """The stored weights. Raises ModelError naming the tensor that is missing or of another shape or
        type."""
        shapes = linear_shapes(self.config)
        return {name: self._read(name, shapes[name]) for name in group}

    def activation(self, group: Group, module: str) -> ActivationQuantizer | None:
        """Static scales become the largest of the fused group, as servers load them."""
        scheme = self.quantization.schemes[module]
        if scheme is None or scheme.activation == "none":
            return None
        scale = None
        if scheme.activation == "static":
            members = [name for name in group if self.quantization.schemes[name] == scheme]
            scale = max(self._input_scale(name, scheme) for name in members)
        if scheme.weights == "nvfp4":
            return NVFP4Activation(scale)
        return FP8Activation("block" if scheme.granularity == "block" else "token", scale)

    def format_name(self, module: str) -> str:
        """The scheme's name, `bf16` where the module is not quantized."""
        scheme = self.quantization.schemes[module]
        return "bf16" if scheme is None else scheme.name

    def kv_scales(self, layer: int) -> tuple[float, float]:
        """(k_scale, v_scale), 1.0 where the checkpoint has none."""
        names = kv_scale_names(self.files, layer, self.quantization.method)
        k_scale, v_scale = (self.files.positive_scalar(name) if name in self.files else 1.0 for name in names)
        return k_scale, v_scale

    def _read(self, module: str, shape: tuple[int, int]) -> QuantizedTensor:
        scheme = self.quantization.schemes[module]
        if scheme is None:
            return PlainTensor(read_plain_weight(self.files, module, shape, self.config, self.dtype))
        names = tensor_names(module, scheme, self.quantization.method)
        if scheme.weights == "nvfp4":
            return self._nvfp4(names, shape)
        codes = self._expect(names.weight, "F8_E4M3", shape)
        scale = self.files.float32(names.weight_scale)
        return FP8Tensor(
            codes, _fp8_scale(self.files, names.weight_scale, scale, scheme, shape), E4M3, scheme.granularity
        )

    def _nvfp4(self, names: TensorNames, shape: tuple[int, int]) -> NVFP4Tensor:
        rows, columns = shape
        packed = self._expect(names.weight, "U8", (rows, columns // 2))
        block_scale = self._expect(names.weight_scale, "F8_E4M3", (rows, columns // BLOCK))
        assert names.global_scale is not None
        stored = np.float32(self.files.positive_scalar(names.global_scale))
        return NVFP4Tensor(packed, block_scale, np.float32(1.0) / stored if names.inverse else stored)

    def _expect(self, name: str, dtype: str, shape: tuple[int, ...]) -> UInt8:
        entry = self.files.entry(name)
        if entry.dtype != dtype or entry.shape != shape:
            raise ModelError(
                f"{entry.path}: tensor {name}: {self.quantization.path.name} makes it {dtype} {list(shape)}, "
                f"found {entry.dtype} {list(entry.shape)}"
            )
        return np.array(self.files.raw(name))

    def _input_scale(self, module: str, scheme: StoredScheme) -> float:
        names = tensor_names(module, scheme, self.quantization.method)
        assert names.input_scale is not None
        stored = np.float32(self.files.positive_scalar(names.input_scale))
        return float(np.float32(1.0) / stored if names.inverse else stored)


def _fp8_scale(
    files: TensorFolder, name: str, scale: Float32, scheme: StoredScheme, shape: tuple[int, int]
) -> Float32:
    """The scale in the shape that FP8Tensor keeps."""
    rows, columns = shape
    expected = {
        "tensor": (1, 1),
        "channel": (rows, 1),
        "block": (-(-rows // FP8_BLOCK_SIZE), -(-columns // FP8_BLOCK_SIZE)),
    }[scheme.granularity]
    if scale.size != expected[0] * expected[1] or not np.isfinite(scale).all():
        raise ModelError(
            f"{files.entry(name).path}: tensor {name}: expected {list(expected)} finite scales, found "
            f"{list(scale.shape)}"
        )
    return scale.reshape(expected)
