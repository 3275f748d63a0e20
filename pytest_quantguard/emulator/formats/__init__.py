"""The number formats, by the names that configs and command lines use."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pytest_quantguard.emulator.formats.base import Format, PlainFormat, PlainTensor, QuantizedTensor
from pytest_quantguard.emulator.formats.fp8 import FP8Activation, FP8Format, FP8Tensor
from pytest_quantguard.emulator.formats.int8 import Int8Activation, Int8Format, Int8Tensor
from pytest_quantguard.emulator.formats.kv_cache import KV_CACHE_FORMATS, KVCacheFormat
from pytest_quantguard.emulator.formats.microscaling import MXActivation, MXFormat, MXTensor
from pytest_quantguard.emulator.formats.minifloat import E2M1, E4M3, E5M2
from pytest_quantguard.emulator.formats.nvfp4 import NVFP4Activation, NVFP4Format, NVFP4Tensor

__all__ = [
    "FORMATS",
    "KV_CACHE_FORMATS",
    "FP8Activation",
    "FP8Format",
    "FP8Tensor",
    "Format",
    "Int8Activation",
    "Int8Format",
    "Int8Tensor",
    "KVCacheFormat",
    "MXActivation",
    "MXFormat",
    "MXTensor",
    "NVFP4Activation",
    "NVFP4Format",
    "NVFP4Tensor",
    "PlainFormat",
    "PlainTensor",
    "QuantizedTensor",
]

_PER_TOKEN = FP8Activation("token")

_ALL: tuple[Format, ...] = (
    PlainFormat(),
    NVFP4Format("nvfp4", "W4A4; activation scales per 16 elements under one per token", NVFP4Activation()),
    NVFP4Format("nvfp4_w4a16", "NVFP4 weights, 16-bit activations", None),
    FP8Format("fp8", "E4M3; weights per tensor, activations per token", "tensor", _PER_TOKEN),
    FP8Format(
        "fp8_per_tensor",
        "E4M3; weights and whole activation batches per tensor",
        "tensor",
        FP8Activation("tensor"),
    ),
    FP8Format("fp8_per_channel", "E4M3; weights per channel, activations per token", "channel", _PER_TOKEN),
    FP8Format("fp8_block", "E4M3; weights per 128x128, activations per 128", "block", FP8Activation("block")),
    FP8Format("fp8_w8a16", "E4M3 weights per tensor, 16-bit activations", "tensor", None),
    FP8Format(
        "fp8_e5m2",
        "E5M2; weights per tensor, activations per token",
        "tensor",
        FP8Activation("token", element=E5M2),
        E5M2,
    ),
    MXFormat("mxfp4", "W4A4; E2M1 under power-of-two scales per 32", E2M1, MXActivation(E2M1)),
    MXFormat("mxfp4_w4a16", "MXFP4 weights, 16-bit activations", E2M1, None),
    MXFormat("mxfp8", "W8A8; E4M3 under power-of-two scales per 32", E4M3, MXActivation(E4M3)),
    Int8Format("int8", "W8A8; weights per channel, activations per token", Int8Activation()),
    Int8Format("int8_w8a16", "INT8 weights per channel, 16-bit activations", None),
)

FORMATS: Mapping[str, Format] = MappingProxyType({kind.name: kind for kind in _ALL})
