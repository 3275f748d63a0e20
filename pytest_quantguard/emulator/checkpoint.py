"""Reads a model folder into the arrays that the emulator computes with.

Every linear layer's weights are kept once, dequantized to float32; layers that real kernels fuse (q, k, v;
gate, up) lie next to each other in one array. Weights can be read again, for some modules only, through a
hook that sees their quantized form: this is how faults of weights and scales are switched on and off in a
running engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pytest_quantguard.emulator.formats import FORMATS, PlainTensor, QuantizedTensor
from pytest_quantguard.emulator.layout import (
    EMBEDDING,
    LM_HEAD,
    Group,
    fused_groups,
    linear_shapes,
    tensor_shapes,
)
from pytest_quantguard.emulator.linear import ActivationQuantizer, Linear
from pytest_quantguard.emulator.model_config import ModelConfig
from pytest_quantguard.emulator.published import PublishedWeights
from pytest_quantguard.emulator.quantization_config import read_quantization_config
from pytest_quantguard.emulator.quantize import (
    KV_CACHE_KEY,
    QuantizationPlan,
    kv_cache_format,
    plan_quantization,
)
from pytest_quantguard.emulator.tensor_files import ComputeType, TensorFolder, read_plain_weight
from pytest_quantguard.errors import ModelError

__all__ = ["Checkpoint", "ModelConfig", "WeightHook", "load_checkpoint", "module_formats"]

Float32 = npt.NDArray[np.float32]

AS_STORED = "checkpoint"
"""The `quantization` that serves a quantized folder as its own config says; the default where it has one."""

WeightHook = Callable[[Mapping[str, QuantizedTensor]], Mapping[str, QuantizedTensor]]
"""Called once per group of fused modules (q, k, v; gate, up; every other module alone) with their quantized
weights by module name; returns what shall be used instead. The same object back means unchanged."""


class WeightSource(Protocol):
    """Where a checkpoint's linear layers come from."""

    def quantized(self, group: Group) -> dict[str, QuantizedTensor]:
        """The weights of a fused group's modules."""
        ...

    def activation(self, group: Group, module: str) -> ActivationQuantizer | None:
        """How the input of a module of the group is quantized."""
        ...

    def format_name(self, module: str) -> str:
        """The scheme of the module's weights and activations together."""
        ...


@dataclass
class Checkpoint:
    """A model, read.

    tensors: float32 arrays of embeddings and norms by name without ".weight". linears: all linear layers by
    name; with tied embeddings `lm_head` shares the embedding's array. fused: for each fused group of names
    the float32 array [sum of out_features, in_features] of which their weights are consecutive row slices.
    kv_scales: by layer (k_scale, v_scale), 1.0 where the checkpoint has none. bits_per_weight: by linear
    layer, as stored.
    """

    folder: Path
    config: ModelConfig
    dtype: ComputeType
    tensors: dict[str, Float32]
    linears: dict[str, Linear]
    fused: dict[Group, Float32]
    kv_scales: dict[int, tuple[float, float]]
    kv_cache_format: str
    bits_per_weight: dict[str, float]
    _source: WeightSource = field(repr=False)

    def reload(self, modules: Iterable[str] | None = None, weight_hook: WeightHook | None = None) -> None:
        """Read the weights of `modules` (default: all) and of what is fused with them again, through
        `weight_hook`.

        Arrays are overwritten in place, so views of them stay valid; only a tied `lm_head` gets an array of
        its own while a hook changes it. Raises ModelError if a module is unknown or the hook returns another
        shape.
        """
        wanted = set(self.linears if modules is None else modules)
        unknown = sorted(wanted - set(self.linears))
        if unknown:
            raise ModelError(
                f"{self.folder}: no linear layer {unknown[0]}; for example: {next(iter(self.linears))}"
            )
        for group in fused_groups(self.config):
            if wanted.intersection(group):
                self._load(group, weight_hook)

    def quantized(self, modules: Iterable[str]) -> dict[str, QuantizedTensor]:
        """The stored form of the weights of `modules` and of what is fused with them, from the folder."""
        wanted = set(modules)
        return {
            name: tensor
            for group in fused_groups(self.config)
            if wanted.intersection(group)
            for name, tensor in self._stored(group).items()
        }

    def describe(self) -> str:
        """Formats of the layers and the cache in one line."""
        counts = Counter(linear.format for linear in self.linears.values())
        layers = ", ".join(f"{count} x {name}" for name, count in counts.most_common())
        weights = {name: linear.weight.size for name, linear in self.linears.items() if name != LM_HEAD}
        bits = sum(self.bits_per_weight[name] * size for name, size in weights.items()) / sum(
            weights.values()
        )
        return (
            f"{self.config.architecture}, {self.config.num_layers} layers, linear layers {layers} "
            f"({bits:.2f} bits per weight without {LM_HEAD}), key/value cache {self.kv_cache_format}, "
            f"compute type {self.dtype}"
        )

    def _stored(self, group: Group) -> dict[str, QuantizedTensor]:
        shared = group == (LM_HEAD,) and self.config.tie_word_embeddings
        if shared and self._source.format_name(LM_HEAD) == "bf16":
            return {LM_HEAD: PlainTensor(self.tensors[EMBEDDING])}
        return self._source.quantized(group)

    def _load(self, group: Group, weight_hook: WeightHook | None) -> None:
        stored = self._stored(group)
        used = stored if weight_hook is None else weight_hook(stored)
        for name in group:
            self._fill(self.linears[name], used[name], changed=used[name] is not stored[name])

    def _fill(self, linear: Linear, tensor: QuantizedTensor, *, changed: bool) -> None:
        if tensor.shape != linear.weight.shape:
            raise ModelError(
                f"{linear.name}: a weight hook returned {list(tensor.shape)}, not {list(linear.weight.shape)}"
            )
        if linear.name == LM_HEAD and self.config.tie_word_embeddings:
            shared = isinstance(tensor, PlainTensor) and not changed
            linear.weight = self.tensors[EMBEDDING] if shared else tensor.dequantize()
        else:
            tensor.dequantize(out=linear.weight)
        linear.format = tensor.format if changed else self._source.format_name(linear.name)
        self.bits_per_weight[linear.name] = tensor.bits_per_weight


def load_checkpoint(
    folder: Path,
    *,
    quantization: str | Mapping[str, str] | None = None,
    kv_cache_dtype: str = "auto",
    dtype: ComputeType = "bfloat16",
    weight_hook: WeightHook | None = None,
    progress: Callable[[str], None] | None = None,
) -> Checkpoint:
    """Read a Hugging Face folder.

    quantization: as in `plan_quantization`; None or "checkpoint" for a quantized folder. kv_cache_dtype:
    "auto" takes what the folder or the patterns say, else BF16. dtype: what unquantized weights are rounded
    to. weight_hook: sees the quantized weights before they are used. progress: called with a line per group
    of layers.

    Raises ModelError for everything that is wrong with the folder, naming file and tensor, and ConfigError
    for an unknown format or pattern.
    """
    config = ModelConfig.from_folder(folder)
    files = TensorFolder(folder)
    groups = fused_groups(config)
    source, kv_scales, stored_cache = _open_weights(files, config, dtype, quantization)
    cache = stored_cache if kv_cache_dtype == "auto" else kv_cache_format(kv_cache_dtype, "kv_cache_dtype")
    checkpoint = Checkpoint(
        folder=folder,
        config=config,
        dtype=dtype,
        tensors={
            name: files.plain(f"{name}.weight", shape, dtype) for name, shape in tensor_shapes(config).items()
        },
        linears={},
        fused={},
        kv_scales=kv_scales,
        kv_cache_format=cache,
        bits_per_weight={},
        _source=source,
    )
    shapes = linear_shapes(config)
    for group in groups:
        if progress is not None:
            progress(f"loading {group[0].rpartition('.')[0] or group[0]}")
        _allocate(checkpoint, group, shapes, files)
        checkpoint._load(group, weight_hook)
    return checkpoint


def module_formats(
    folder: Path,
    *,
    quantization: str | Mapping[str, str] | None = None,
    kv_cache_dtype: str = "auto",
    dtype: ComputeType = "bfloat16",
) -> dict[str, str]:
    """The format of every linear layer by name, and that of the key/value cache by "kv_cache", without
    reading a weight. Arguments and errors as of `load_checkpoint`.
    """
    config = ModelConfig.from_folder(folder)
    source, _, stored_cache = _open_weights(TensorFolder(folder), config, dtype, quantization)
    cache = stored_cache if kv_cache_dtype == "auto" else kv_cache_format(kv_cache_dtype, "kv_cache_dtype")
    formats = {name: source.format_name(name) for name in linear_shapes(config)}
    return formats | {KV_CACHE_KEY: cache}


def _open_weights(
    files: TensorFolder, config: ModelConfig, dtype: ComputeType, quantization: str | Mapping[str, str] | None
) -> tuple[WeightSource, dict[int, tuple[float, float]], str]:
    """Where the weights come from, the key/value scales by layer, and the cache format for them."""
    modules = list(linear_shapes(config))
    layers = range(config.num_layers)
    published = read_quantization_config(files.folder, modules)
    if published is None:
        if quantization == AS_STORED:
            raise ModelError(
                f"{files.folder}: quantization {AS_STORED!r} serves a quantized folder as its config says, "
                f"but this one has no quantization config; choose a format: {', '.join(FORMATS)}"
            )
        plan = plan_quantization(quantization, modules)
        return (
            OnTheFly(files, config, dtype, plan),
            dict.fromkeys(layers, (1.0, 1.0)),
            plan.kv_cache or "bf16",
        )
    if quantization not in (None, AS_STORED):
        raise ModelError(
            f"{files.folder}: already quantized ({published.method}, {published.path.name}), cannot become "
            f"{quantization!r}; leave `quantization` out, or use the unquantized model"
        )
    weights = PublishedWeights(files, config, dtype, published)
    return weights, {layer: weights.kv_scales(layer) for layer in layers}, published.kv_cache


def _allocate(
    checkpoint: Checkpoint, group: Group, shapes: Mapping[str, tuple[int, int]], files: TensorFolder
) -> None:
    """Make the group's linear layers with uninitialised weights."""
    if group == (LM_HEAD,) and checkpoint.config.tie_word_embeddings:
        weights = checkpoint.tensors[EMBEDDING]
    else:
        weights = np.empty((sum(shapes[name][0] for name in group), shapes[group[0]][1]), np.float32)
    if len(group) > 1:
        checkpoint.fused[group] = weights
    start = 0
    for name in group:
        rows = shapes[name][0]
        bias = f"{name}.bias"
        checkpoint.linears[name] = Linear(
            name=name,
            weight=weights[start : start + rows],
            bias=files.plain(bias, (rows,), checkpoint.dtype) if bias in files else None,
            activation=checkpoint._source.activation(group, name),
        )
        start += rows


@dataclass(frozen=True)
class OnTheFly:
    """Quantizes an unquantized folder while reading it."""

    files: TensorFolder
    config: ModelConfig
    dtype: ComputeType
    plan: QuantizationPlan

    def quantized(self, group: Group) -> dict[str, QuantizedTensor]:
        """Members of one format are quantized together. Raises ModelError where blocks do not fit."""
        shapes = linear_shapes(self.config)
        result: dict[str, QuantizedTensor] = {}
        for kind in dict.fromkeys(self.plan.formats[name] for name in group):
            names = [name for name in group if self.plan.formats[name] == kind]
            for name in names:
                _check_blocks(name, shapes[name], kind)
            weights = [
                read_plain_weight(self.files, name, shapes[name], self.config, self.dtype) for name in names
            ]
            result.update(zip(names, FORMATS[kind].quantize(weights), strict=True))
        return result

    def activation(self, group: Group, module: str) -> ActivationQuantizer | None:  # noqa: ARG002
        """The format's own rule; its scales are dynamic."""
        return FORMATS[self.plan.formats[module]].activation

    def format_name(self, module: str) -> str:
        """The plan's format."""
        return self.plan.formats[module]


def _check_blocks(name: str, shape: tuple[int, int], kind: str) -> None:
    width = FORMATS[kind].block_columns
    if shape[1] % width:
        raise ModelError(
            f"{name} {list(shape)} cannot be stored as {kind}: its input dimension must be a multiple of "
            f"{width}; give it another format with a pattern"
        )
