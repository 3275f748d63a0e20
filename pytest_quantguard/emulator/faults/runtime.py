"""Faults of kernels and of the key/value cache: defects that appear while a server computes.

Weights and scales: weights.py. Scheduling and answers: answers.py. Public reports are named by project
and number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

import numpy as np

from pytest_quantguard.emulator.batch import BatchEntry, ForwardBatch, Int32
from pytest_quantguard.emulator.faults.base import Fault, Severity
from pytest_quantguard.emulator.formats.minifloat import E4M3
from pytest_quantguard.emulator.hooks import Float32, Hooks, KeyValueScales
from pytest_quantguard.emulator.linear import ActivationQuantizer
from pytest_quantguard.emulator.quantize import KV_CACHE_KEY

Phases = Literal["all", "prefill", "decode"]


@dataclass(frozen=True)
class ModuleFault(Fault):
    """A fault of the kernels of the linear layers that match `module` (shell-style)."""

    module: str = "model.layers.1.mlp.down_proj"

    def applies_to(self, formats: Mapping[str, str]) -> bool:
        """Whether the model has such a layer."""
        return any(self._concerns(name) for name in formats)

    def _concerns(self, module: str) -> bool:
        return fnmatchcase(module, self.module)


@dataclass(frozen=True)
class CacheFault(Fault):
    """A fault that needs a quantized cache."""

    def applies_to(self, formats: Mapping[str, str]) -> bool:
        """Whether the cache is quantized."""
        return formats.get(KV_CACHE_KEY, "bf16") != "bf16"


@dataclass(frozen=True)
class ZeroRowNaN(ModuleFault):
    """every: the rows of tokens whose id is a multiple of it count as all zero."""

    name = "zero_row_nan"
    summary = "an all-zero activation row yields an infinite scale, then NaN"
    shows_in = "some positions, in every phase"
    source = "flashinfer pull request 5031"
    severity_by_default: ClassVar[Severity] = "catastrophic"
    every: int = 31

    def __post_init__(self) -> None:
        _require(self.every >= 1, f"every is {self.every}; a number from 1 on is needed")

    def register(self, hooks: Hooks) -> None:
        hooks.linear_output.append(self._act)

    def _act(self, module: str, values: Float32, batch: ForwardBatch) -> Float32:
        if self._concerns(module):
            values[batch.token_ids % self.every == 0] = np.nan
        return values


@dataclass(frozen=True)
class RowsZeroAtBatch(ModuleFault):
    """minimum: sequences per batch from which on it appears. every: the rows that are zero."""

    name = "rows_zero_at_batch"
    summary = "from a batch size on, every n-th row of one matrix product is zero"
    shows_in = "batch sizes from the minimum on"
    source = "flashinfer issue 3398"
    severity_by_default: ClassVar[Severity] = "clear"
    module: str = "model.layers.0.mlp.down_proj"
    minimum: int = 8
    every: int = 8

    def __post_init__(self) -> None:
        _require(self.every >= 1, f"every is {self.every}; a number from 1 on is needed")

    def register(self, hooks: Hooks) -> None:
        hooks.linear_output.append(self._act)

    def _act(self, module: str, values: Float32, batch: ForwardBatch) -> Float32:
        if self._concerns(module) and batch.size >= self.minimum:
            values[self.every - 1 :: self.every] = 0.0
        return values


@dataclass(frozen=True)
class PaddedRowsLeak(ModuleFault):
    """ratio: the stale rows' largest magnitude over that of the real rows. Batches are padded to powers
    of two."""

    name = "padded_rows_leak"
    summary = "when a batch is padded, activation scales take the largest value of stale rows"
    shows_in = "decode at batch sizes that are no power of two, where activations are quantized"
    source = "flashinfer issue 3057, vLLM pull request 37564"
    severity_by_default: ClassVar[Severity] = "clear"
    variants = ("ratio=65536",)
    module: str = "*"
    ratio: float = 4096.0

    def __post_init__(self) -> None:
        _require(self.ratio >= 1, f"ratio is {self.ratio}; a number from 1 on is needed")

    @property
    def severity(self) -> Severity:
        """Beyond the range of E4M3 most values vanish."""
        return "catastrophic" if self.ratio >= 32768 else "clear"

    def register(self, hooks: Hooks) -> None:
        quantized: set[str] = set()

        def remember(module: str, quantizer: ActivationQuantizer | None) -> ActivationQuantizer | None:
            if quantizer is not None and self._concerns(module):
                quantized.add(module)
            return quantizer

        def act(module: str, values: Float32, batch: ForwardBatch) -> Float32:
            padded = batch.phase == "decode" and batch.size & (batch.size - 1)
            return self._coarse(values) if padded and module in quantized else values

        hooks.activation.append(remember)
        hooks.linear_input.append(act)

    def _coarse(self, values: Float32) -> Float32:
        """The values on an E4M3 grid that reaches to the stale rows' largest magnitude."""
        scale = np.float32(np.abs(values).max() * self.ratio / E4M3.largest)
        return E4M3.round(values / scale) * scale if scale > 0 else values


@dataclass(frozen=True)
class NaNAtBatch(ModuleFault):
    """minimum, maximum: the batch sizes at which it appears; a maximum of 0 means no limit."""

    name = "nan_at_batch"
    summary = "one matrix product gives NaN at some decode batch sizes"
    shows_in = "decode at those batch sizes"
    source = "vLLM issue 57017, SGLang pull request 25733"
    severity_by_default: ClassVar[Severity] = "catastrophic"
    variants = ("minimum=1,maximum=1",)
    minimum: int = 3
    maximum: int = 0

    def register(self, hooks: Hooks) -> None:
        hooks.linear_output.append(self._act)

    def _act(self, module: str, values: Float32, batch: ForwardBatch) -> Float32:
        affected = batch.size >= self.minimum and not 0 < self.maximum < batch.size
        if affected and batch.phase == "decode" and self._concerns(module):
            values[...] = np.nan
        return values


@dataclass(frozen=True)
class DecodeGain(ModuleFault):
    """gain: what the product is multiplied with."""

    name = "decode_gain"
    summary = "one matrix product is off by a factor for decode rows only"
    shows_in = "decode"
    source = "a variant of our own"
    severity_by_default: ClassVar[Severity] = "subtle"
    gain: float = 0.85

    def register(self, hooks: Hooks) -> None:
        hooks.linear_output.append(self._act)

    def _act(self, module: str, values: Float32, batch: ForwardBatch) -> Float32:
        if batch.phase == "decode" and self._concerns(module):
            values *= np.float32(self.gain)
        return values


@dataclass(frozen=True)
class KVFnuz(CacheFault):
    """factor: E4M3 bit patterns of one variant read as the other are off by 2 or by 1/2."""

    name = "kv_fnuz"
    summary = "cached values are off by a factor of 2 (E4M3 fn against fnuz)"
    shows_in = "all phases and batch sizes"
    source = "vLLM pull request 31713"
    severity_by_default: ClassVar[Severity] = "catastrophic"
    variants = ("factor=2",)
    factor: float = 0.5

    def register(self, hooks: Hooks) -> None:
        hooks.kv_scale.append(self._act)

    def _act(self, _layer: int, _batch: ForwardBatch, scales: KeyValueScales) -> KeyValueScales:
        return replace(scales, k_read=scales.k_read * self.factor, v_read=scales.v_read * self.factor)


@dataclass(frozen=True)
class KVScaleOne(CacheFault):
    """amplify: how much larger the model's keys are than this checkpoint's; above 448 they clip."""

    name = "kv_scale_one"
    summary = "keys are stored with a scale of 1 where their range needs another, so that large ones clip"
    shows_in = "all phases, where keys exceed 448; harmless below"
    source = "TensorRT-LLM issue 4218, Model-Optimizer issue 20"
    severity_by_default: ClassVar[Severity] = "none"
    variants = ("amplify=128",)
    amplify: float = 1.0

    def __post_init__(self) -> None:
        _require(self.amplify > 0, f"amplify is {self.amplify}; a number above 0 is needed")

    @property
    def severity(self) -> Severity:
        """Without clipping, a scale is only an exponent."""
        return "clear" if self.amplify > 1 else "none"

    def register(self, hooks: Hooks) -> None:
        hooks.kv_scale.append(self._act)

    def _act(self, _layer: int, _batch: ForwardBatch, scales: KeyValueScales) -> KeyValueScales:
        return replace(scales, k_write=1.0 / self.amplify, k_read=1.0 / self.amplify)


@dataclass(frozen=True)
class KVReadUnscaled(CacheFault):
    """k_scale, v_scale: the server's scales, taken relative to the checkpoint's. read: "one" reads
    without scales; "key_scale" reads values with the keys' scale. phase: where the wrong kernel runs."""

    name = "kv_read_unscaled"
    summary = "keys and values are stored scaled and read with 1.0, or values with the keys' scale"
    shows_in = "decode; prefill too where it reads the cache"
    source = "SGLang issue 18818"
    severity_by_default: ClassVar[Severity] = "catastrophic"
    variants = ("phase=all", "read=key_scale")
    k_scale: float = 0.25
    v_scale: float = 0.2
    read: Literal["one", "key_scale"] = "one"
    phase: Phases = "decode"

    def __post_init__(self) -> None:
        _require(self.k_scale > 0 and self.v_scale > 0, "k_scale and v_scale must be above 0")

    @property
    def severity(self) -> Severity:
        """Values that are off by a small factor leave the attention pattern intact."""
        return "catastrophic" if self.read == "one" else "clear"

    def register(self, hooks: Hooks) -> None:
        hooks.kv_read.append(self._act)

    def _act(
        self,
        _layer: int,
        batch: ForwardBatch,
        _entries: tuple[BatchEntry, ...],
        keys: Float32,
        values: Float32,
    ) -> tuple[Float32, Float32]:
        if self.phase not in ("all", batch.phase):
            return keys, values
        if self.read == "key_scale":
            return keys, values * np.float32(self.k_scale / self.v_scale)
        return keys / np.float32(self.k_scale), values / np.float32(self.v_scale)


@dataclass(frozen=True)
class ChunkKVUnscaled(CacheFault):
    """scale: the server's scale, taken relative to the checkpoint's."""

    name = "chunk_kv_unscaled"
    summary = "keys and values of the second prefill chunk and later ones are stored without their scale"
    shows_in = "prompts longer than a prefill chunk"
    source = "a variant of our own"
    severity_by_default: ClassVar[Severity] = "catastrophic"
    scale: float = 8.0

    def __post_init__(self) -> None:
        _require(self.scale > 0, f"scale is {self.scale}; a number above 0 is needed")

    def register(self, hooks: Hooks) -> None:
        hooks.kv_scale.append(self._act)

    def _act(self, _layer: int, batch: ForwardBatch, scales: KeyValueScales) -> KeyValueScales:
        factor = np.ones((batch.rows, 1, 1), np.float32)
        if batch.phase == "prefill":
            for entry in batch.entries:
                if entry.chunk:
                    factor[entry.row_start : entry.row_stop] = self.scale
        return replace(scales, k_read=scales.k_read * factor, v_read=scales.v_read * factor)


@dataclass(frozen=True)
class DecodeTailPrecision(Fault):
    """position: the first key whose weight is damaged. bits: mantissa bits that its weight keeps."""

    name = "decode_tail_precision"
    summary = "attention weights of late keys lose precision while decoding"
    shows_in = "decode, late positions"
    source = "SGLang issue 25790"
    severity_by_default: ClassVar[Severity] = "subtle"
    position: int = 96
    bits: int = 1

    def __post_init__(self) -> None:
        _require(0 <= self.bits <= 22, f"bits is {self.bits}; 0 to 22 are possible")

    def register(self, hooks: Hooks) -> None:
        hooks.attention_weights.append(self._act)

    def _act(self, _layer: int, batch: ForwardBatch, weights: Float32, _positions: Int32) -> None:
        if batch.phase == "decode":
            late = weights[..., self.position :].view(np.uint32)
            late &= np.uint32(0xFFFFFFFF << (23 - self.bits) & 0xFFFFFFFF)


@dataclass(frozen=True)
class LongContextDrop(Fault):
    """position: of the first query that it strikes. keys: how many first keys are ignored."""

    name = "long_context_drop"
    summary = "from a position on, the first keys of the sequence are ignored"
    shows_in = "long prompts"
    source = "vLLM issue 40018"
    severity_by_default: ClassVar[Severity] = "subtle"
    position: int = 128
    keys: int = 32

    def __post_init__(self) -> None:
        _require(0 < self.keys <= self.position, "keys must be above 0 and no larger than position")

    def register(self, hooks: Hooks) -> None:
        hooks.attention_scores.append(self._act)

    def _act(self, _layer: int, _batch: ForwardBatch, scores: Float32, positions: Int32) -> None:
        struck = (positions >= self.position)[:, None, None, :, None]
        np.copyto(scores[..., : self.keys], np.float32(-np.inf), where=struck)


@dataclass(frozen=True)
class DecodePositionOffByOne(Fault):
    """offset: what is added to the position of generated tokens."""

    name = "decode_position_off_by_one"
    summary = "the rotary position is one too large from the first decoded token on"
    shows_in = "decode"
    source = "SGLang pull request 37505"
    severity_by_default: ClassVar[Severity] = "subtle"
    offset: int = 1

    def register(self, hooks: Hooks) -> None:
        hooks.positions.append(self._act)

    def _act(self, batch: ForwardBatch, positions: Int32) -> Int32:
        return positions + np.int32(self.offset) if batch.phase == "decode" else positions


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


RUNTIME_FAULTS: tuple[type[Fault], ...] = (
    ZeroRowNaN,
    RowsZeroAtBatch,
    PaddedRowsLeak,
    NaNAtBatch,
    DecodeGain,
    KVFnuz,
    KVScaleOne,
    KVReadUnscaled,
    ChunkKVUnscaled,
    DecodeTailPrecision,
    LongContextDrop,
    DecodePositionOffByOne,
)
