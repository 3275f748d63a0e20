"""Faults of weights and scales: each names the modules it concerns and the transform that damages them.

The arithmetic is in `weight_transforms.py`. Public reports are named by project and number.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import ClassVar, Literal

import numpy as np

from pytest_quantguard.emulator.batch import ForwardBatch
from pytest_quantguard.emulator.faults import weight_transforms as transforms
from pytest_quantguard.emulator.faults.base import Fault, Severity
from pytest_quantguard.emulator.faults.weight_transforms import Group
from pytest_quantguard.emulator.formats import PlainTensor, QuantizedTensor
from pytest_quantguard.emulator.hooks import Float32, Hooks, WeightRule
from pytest_quantguard.emulator.quantize import KV_CACHE_KEY

_BLOCK_SCALED = ("nvfp4*", "mxfp4*", "mxfp8", "fp8_block")
_GLOBALLY_SCALED = (
    "nvfp4*",
    "fp8",
    "fp8_per_tensor",
    "fp8_static",
    "fp8_w8a16",
    "fp8_e5m2",
    "fp8_per_channel",
)
_FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


@dataclass(frozen=True)
class WeightFault(Fault):
    """A fault that changes the quantized weights of the modules matching `module` (shell-style).

    formats: patterns of the formats that have what the fault damages; layers in other formats are left alone.
    """

    module: str = "*"
    formats: ClassVar[tuple[str, ...]] = ("*",)

    @abstractmethod
    def transform(self, group: Group) -> Mapping[str, QuantizedTensor]:
        """The damaged weights of a group of fused modules."""

    def concerns(self, module: str) -> bool:
        """Whether the fault may change this module."""
        return fnmatchcase(module, self.module)

    def applies_to(self, formats: Mapping[str, str]) -> bool:
        """Whether any layer has what the fault damages. formats: by module name, and of the cache."""
        return any(
            name != KV_CACHE_KEY
            and self.concerns(name)
            and any(map(partial(fnmatchcase, kind), self.formats))
            for name, kind in formats.items()
        )

    def register(self, hooks: Hooks) -> None:
        hooks.weight.append(WeightRule(self.concerns, self._damage))

    def _damage(self, group: Group) -> Mapping[str, QuantizedTensor]:
        damaged = self.transform(group)
        return {name: damaged[name] if self.concerns(name) else tensor for name, tensor in group.items()}


@dataclass(frozen=True)
class NibbleSwap(WeightFault):
    name = "nibble_swap"
    summary = "the two 4-bit values of each byte are exchanged"
    shows_in = "all phases and batch sizes"
    source = "SGLang pull request 23625"
    severity_by_default: ClassVar[Severity] = "catastrophic"
    variants = ("module=*.down_proj", "module=model.layers.0.self_attn.q_proj")
    formats = ("nvfp4*", "mxfp4*")

    @property
    def severity(self) -> Severity:
        return "clear" if self.module.startswith("model.layers.") else "catastrophic"

    def transform(self, group: Group) -> Mapping[str, QuantizedTensor]:
        return transforms.each(group, transforms.nibble_swap)


@dataclass(frozen=True)
class ScaleSwizzle(WeightFault):
    name = "scale_swizzle"
    summary = "128x4-interleaved block scales are read as if linear"
    shows_in = "all phases and batch sizes"
    source = "SGLang pull request 23625"
    severity_by_default: ClassVar[Severity] = "catastrophic"
    variants = ("module=model.layers.0.self_attn.q_proj",)
    formats = _BLOCK_SCALED

    @property
    def severity(self) -> Severity:
        return "catastrophic" if self.module == "*" else "subtle"

    def transform(self, group: Group) -> Mapping[str, QuantizedTensor]:
        return transforms.each(group, transforms.scale_swizzle)


@dataclass(frozen=True)
class BlockScaleRoll(WeightFault):
    name = "block_scale_roll"
    summary = "block scales are shifted by one block along the input dimension"
    shows_in = "all phases and batch sizes"
    source = "SGLang issue 29038"
    severity_by_default: ClassVar[Severity] = "catastrophic"
    formats = _BLOCK_SCALED

    def transform(self, group: Group) -> Mapping[str, QuantizedTensor]:
        return transforms.each(group, transforms.block_scale_roll)


@dataclass(frozen=True)
class ShardScaleMixup(WeightFault):
    name = "shard_scale_mixup"
    summary = "the second half of the input dimension uses the block scales of the first half"
    shows_in = "all phases and batch sizes"
    source = "vLLM issue 36583"
    severity_by_default: ClassVar[Severity] = "clear"
    formats = _BLOCK_SCALED

    def transform(self, group: Group) -> Mapping[str, QuantizedTensor]:
        return transforms.each(group, transforms.shard_scale_mixup)


@dataclass(frozen=True)
class ScaleRoundUp(WeightFault):
    name = "scale_round_up"
    summary = "block scales are rounded up to a power of two, the values kept"
    shows_in = "all phases and batch sizes"
    source = "transformers issue 47030"
    severity_by_default: ClassVar[Severity] = "catastrophic"
    formats = ("nvfp4*", "fp8_block")

    def transform(self, group: Group) -> Mapping[str, QuantizedTensor]:
        return transforms.each(group, lambda tensor: transforms.scale_round(tensor, "up"))


@dataclass(frozen=True)
class ScaleRoundDown(WeightFault):
    name = "scale_round_down"
    summary = "block scales are rounded down to a power of two, the values kept"
    shows_in = "all phases and batch sizes"
    source = "SGLang issue 39193"
    severity_by_default: ClassVar[Severity] = "clear"
    formats = ("nvfp4*", "fp8_block")

    def transform(self, group: Group) -> Mapping[str, QuantizedTensor]:
        return transforms.each(group, lambda tensor: transforms.scale_round(tensor, "down"))


@dataclass(frozen=True)
class FusedScaleMax(WeightFault):
    name = "fused_scale_max"
    summary = "q/k/v and gate/up get the largest of their global scales without rescaling the block scales"
    shows_in = "all phases and batch sizes"
    source = "TensorRT-LLM pull request 14199, llm-compressor pull request 1869"
    severity_by_default: ClassVar[Severity] = "clear"
    formats = _GLOBALLY_SCALED

    def concerns(self, module: str) -> bool:
        return super().concerns(module) and module.endswith(_FUSED)

    def transform(self, group: Group) -> Mapping[str, QuantizedTensor]:
        return transforms.fused_scale_max(group)


@dataclass(frozen=True)
class FusedScaleFirst(WeightFault):
    """ratio: the first scale divided by the others'; None takes what the weights give."""

    ratio: float | None = None
    name = "fused_scale_first"
    summary = "the first shard's global scale is used for the others of q/k/v and gate/up"
    shows_in = "all phases and batch sizes"
    source = "vLLM issue 54974"
    severity_by_default: ClassVar[Severity] = "clear"
    variants = ("ratio=8",)
    formats = _GLOBALLY_SCALED

    @property
    def severity(self) -> Severity:
        return "clear" if self.ratio is None else "catastrophic"

    def concerns(self, module: str) -> bool:
        return super().concerns(module) and module.endswith(_FUSED)

    def transform(self, group: Group) -> Mapping[str, QuantizedTensor]:
        return transforms.fused_scale_first(group, self.ratio)


@dataclass(frozen=True)
class FusedScaleUninitialised(WeightFault):
    """value: what the memory happens to hold; `random` differs at every load."""

    value: Literal["large", "zero", "nan", "random"] = "large"
    name = "fused_scale_uninitialised"
    summary = "the global scale of one shard of q/k/v and gate/up is arbitrary memory"
    shows_in = "all phases and batch sizes; from run to run"
    source = "SGLang pull request 29151, vLLM pull request 35693"
    severity_by_default: ClassVar[Severity] = "catastrophic"
    variants = ("value=zero", "value=nan", "value=random")
    formats = _GLOBALLY_SCALED

    def concerns(self, module: str) -> bool:
        return super().concerns(module) and module.endswith(("k_proj", "up_proj"))

    def transform(self, group: Group) -> Mapping[str, QuantizedTensor]:
        factor = {"large": 1000.0, "zero": 0.0, "nan": float("nan")}.get(self.value)
        if factor is None:
            factor = float(10.0 ** np.random.default_rng().uniform(-3, 3))
        return transforms.each(group, lambda tensor: transforms.multiply_global_scale(tensor, factor))


@dataclass(frozen=True)
class GlobalScaleInverted(WeightFault):
    name = "global_scale_inverted"
    summary = "the global scale is used as its inverse"
    shows_in = "all phases and batch sizes"
    source = "llama.cpp pull request 23629"
    severity_by_default: ClassVar[Severity] = "catastrophic"
    formats = _GLOBALLY_SCALED

    def transform(self, group: Group) -> Mapping[str, QuantizedTensor]:
        return transforms.each(group, lambda tensor: transforms.with_global_scale(tensor, np.reciprocal))


@dataclass(frozen=True)
class GlobalScaleMissing(WeightFault):
    name = "global_scale_missing"
    summary = "the global scale is 1"
    shows_in = "all phases and batch sizes"
    source = "llama.cpp pull request 23629"
    severity_by_default: ClassVar[Severity] = "catastrophic"
    formats = _GLOBALLY_SCALED

    def transform(self, group: Group) -> Mapping[str, QuantizedTensor]:
        return transforms.each(group, lambda tensor: transforms.with_global_scale(tensor, np.ones_like))


@dataclass(frozen=True)
class GlobalScaleDrift(WeightFault):
    """percent: how much too large the global scale is."""

    percent: float = 2.0
    name = "global_scale_drift"
    summary = "the global scale is a little off, as after another calibration"
    shows_in = "drift against an accepted run only"
    source = "a variant of our own"
    severity_by_default: ClassVar[Severity] = "subtle"
    formats = _GLOBALLY_SCALED

    def transform(self, group: Group) -> Mapping[str, QuantizedTensor]:
        factor = 1 + self.percent / 100
        return transforms.each(group, lambda tensor: transforms.multiply_global_scale(tensor, factor))


@dataclass(frozen=True)
class OneScaleForFused(WeightFault):
    """ratio: between the amax of the shard that dictates the scale and that of the others."""

    ratio: float = 50.0
    name = "one_scale_for_fused"
    summary = "fused shards share the scale of one whose amax is many times theirs"
    shows_in = "all phases and batch sizes"
    source = "vLLM issue 41022"
    severity_by_default: ClassVar[Severity] = "subtle"
    variants = ("ratio=1000",)
    formats = ("nvfp4*", "fp8", "fp8_per_tensor", "fp8_static", "fp8_w8a16", "fp8_e5m2")

    def __post_init__(self) -> None:
        if not self.ratio >= 1:
            raise ValueError(f"parameter ratio: expected at least 1, found {self.ratio}")

    @property
    def severity(self) -> Severity:
        return "subtle" if self.ratio <= 1000 else "clear"

    def concerns(self, module: str) -> bool:
        return super().concerns(module) and module.endswith(_FUSED)

    def transform(self, group: Group) -> Mapping[str, QuantizedTensor]:
        return transforms.one_scale_for_fused(group, self.ratio)


@dataclass(frozen=True)
class LmHeadQuantized(WeightFault):
    module: str = "lm_head"
    format: Literal["nvfp4", "fp8"] = "nvfp4"
    name = "lm_head_quantized"
    summary = "the output layer is quantized although the config excludes it"
    shows_in = "all phases and batch sizes"
    source = "transformers pull request 45734"
    severity_by_default: ClassVar[Severity] = "clear"
    variants = ("format=fp8",)
    formats = ("bf16",)

    @property
    def severity(self) -> Severity:
        return "clear" if self.format == "nvfp4" else "subtle"

    def transform(self, group: Group) -> Mapping[str, QuantizedTensor]:
        def change(tensor: QuantizedTensor) -> QuantizedTensor:
            return transforms.requantize(tensor, self.format) if isinstance(tensor, PlainTensor) else tensor

        return transforms.each(group, change)


@dataclass(frozen=True)
class LmHeadZero(WeightFault):
    module: str = "lm_head"
    name = "lm_head_zero"
    summary = "the output layer is zero: always token 0"
    shows_in = "all phases and batch sizes"
    source = "SGLang issue 35358"
    severity_by_default: ClassVar[Severity] = "catastrophic"

    def transform(self, group: Group) -> Mapping[str, QuantizedTensor]:
        return transforms.each(group, transforms.zeros)


@dataclass(frozen=True)
class LayerWrongFormat(WeightFault):
    """format: `auto` takes NVFP4 for a layer of 8 or more bits and MXFP4 for one that is NVFP4 already."""

    module: str = "model.layers.0.*"
    format: Literal["auto", "nvfp4", "mxfp4", "fp8"] = "auto"
    name = "layer_wrong_format"
    summary = "one layer is quantized in a coarser format than the config says"
    shows_in = "all phases and batch sizes"
    source = "vLLM pull request 47318"
    severity_by_default: ClassVar[Severity] = "subtle"
    variants = ("module=*.down_proj",)

    @property
    def severity(self) -> Severity:
        return "subtle" if self.module.startswith("model.layers.") else "clear"

    def transform(self, group: Group) -> Mapping[str, QuantizedTensor]:
        def change(tensor: QuantizedTensor) -> QuantizedTensor:
            coarser = "mxfp4" if tensor.format == "nvfp4" else "nvfp4"
            return transforms.requantize(tensor, coarser if self.format == "auto" else self.format)

        return transforms.each(group, change)


@dataclass(frozen=True)
class InputScaleZero(Fault):
    """module: the layer whose input scale is 0. every: one of so many token ids is routed through it."""

    module: str = "model.layers.1.mlp.down_proj"
    every: int = 29
    name = "input_scale_zero"
    summary = "an activation scale is 0 and makes NaN of every token that reaches it"
    shows_in = "some prompts"
    source = "vLLM issue 45212"
    severity_by_default: ClassVar[Severity] = "catastrophic"

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"parameter every: expected at least 1, found {self.every}")

    def register(self, hooks: Hooks) -> None:
        hooks.linear_input.append(self._divide_by_zero)

    def _divide_by_zero(self, module: str, values: Float32, batch: ForwardBatch) -> Float32:
        if fnmatchcase(module, self.module):
            values[batch.token_ids % self.every == 0] = np.nan
        return values


WEIGHT_FAULTS: tuple[type[Fault], ...] = (
    NibbleSwap,
    ScaleSwizzle,
    BlockScaleRoll,
    ShardScaleMixup,
    ScaleRoundUp,
    ScaleRoundDown,
    FusedScaleMax,
    FusedScaleFirst,
    FusedScaleUninitialised,
    GlobalScaleInverted,
    GlobalScaleMissing,
    GlobalScaleDrift,
    OneScaleForFused,
    LmHeadQuantized,
    LmHeadZero,
    LayerWrongFormat,
    InputScaleZero,
)
"""The catalogue's part that concerns weights and scales."""
