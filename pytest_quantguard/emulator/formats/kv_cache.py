"""Formats of the key/value cache: what a stored key (after the rotary embedding) or value becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from pytest_quantguard.emulator.formats.base import Float32
from pytest_quantguard.emulator.formats.minifloat import E4M3, E5M2, MiniFloat


@dataclass(frozen=True)
class KVCacheFormat:
    """element None stores keys and values at the precision of the compute type."""

    name: str
    element: MiniFloat | None
    bits: int

    def store(self, x: Float32, scale: Float32 | float = 1.0) -> Float32:
        """The element values that the cache holds for x, float32, x's shape: x / scale, rounded and
        saturating.

        scale: a number, or an array that broadcasts against x. What is read back is `store(x, scale) *
        scale`. Without an element type x comes back unchanged and the scale is not used, as in a BF16 cache.
        """
        if self.element is None:
            return x
        largest = np.float32(self.element.largest)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            stored = np.divide(x, np.asarray(scale, np.float32))
        np.clip(stored, -largest, largest, out=stored)
        self.element.snap(stored)
        return stored

    def load(self, stored: Float32, scale: Float32 | float = 1.0) -> Float32:
        """Undo the scale of `store`; the identity where the cache is not quantized."""
        return stored if self.element is None else np.multiply(stored, np.asarray(scale, np.float32))


KV_CACHE_FORMATS: Mapping[str, KVCacheFormat] = MappingProxyType(
    {
        "bf16": KVCacheFormat("bf16", None, 16),
        "fp8_e4m3": KVCacheFormat("fp8_e4m3", E4M3, 8),
        "fp8_e5m2": KVCacheFormat("fp8_e5m2", E5M2, 8),
    }
)
