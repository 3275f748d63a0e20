"""Reads a model folder into the arrays that the emulator computes with.

Every linear layer's weights are kept once, dequantized to float32; layers that real kernels fuse (q, k, v; gate, up)
lie next to each other in one array. Weights can be read again, for some modules only, through a hook that sees their
quantized form: this is how faults of weights and scales are switched on and off in a running engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from pytest_quantguard.emulator.formats import FORMATS, PlainTensor, QuantizedTensor
from pytest_quantguard.emulator.formats.rounding import round_bfloat16
from pytest_quantguard.emulator.linear import ActivationQuantizer, Linear
from pytest_quantguard.emulator.model_config import ModelConfig
from pytest_quantguard.emulator.quantize import QuantizationPlan, kv_cache_format, plan_quantization
from pytest_quantguard.emulator.tensor_files import TensorFolder
from pytest_quantguard.errors import ModelError

__all__ = ["Checkpoint", "ModelConfig", "WeightHook", "load_checkpoint"]

Float32 = npt.NDArray[np.float32]
ComputeType = Literal["bfloat16", "float32"]
Group = tuple[str, ...]

WeightHook = Callable[[Mapping[str, QuantizedTensor]], Mapping[str, QuantizedTensor]]
"""Called once per group of fused modules (q, k, v; gate, up; every other module alone) with their quantized weights
by module name; returns what shall be used instead. The same object back means unchanged."""

EMBEDDING = "model.embed_tokens"
LM_HEAD = "lm_head"


class WeightSource(Protocol):
    """Where a checkpoint's linear layers come from."""

    def quantized(self, group: Group) -> dict[str, QuantizedTensor]:
        """The weights of a fused group's modules."""
        ...

    def activation(self, module: str) -> ActivationQuantizer | None:
        """How the module's input is quantized."""
        ...


@dataclass
class Checkpoint:
    """A model, read.

    tensors: float32 arrays of embeddings and norms by name without ".weight". linears: all linear layers by name;
    with tied embeddings `lm_head` shares the embedding's array. fused: for each fused group of names the float32
    array [sum of out_features, in_features] of which their weights are consecutive row slices. kv_scales: by layer
    (k_scale, v_scale), 1.0 where the checkpoint has none. bits_per_weight: by linear layer, as stored.
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
        """Read the weights of `modules` (default: all) and of what is fused with them again, through `weight_hook`.

        Arrays are overwritten in place, so views of them stay valid; only a tied `lm_head` gets an array of its own
        while a hook changes it. Raises ModelError if a module is unknown or the hook returns another shape.
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
        """The stored form of the weights of `modules` and of what is fused with them, read from the folder."""
        wanted = set(modules)
        return {
            name: tensor
            for group in fused_groups(self.config)
            if wanted.intersection(group)
            for name, tensor in self._source.quantized(group).items()
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

    def _load(self, group: Group, weight_hook: WeightHook | None) -> None:
        stored = self._source.quantized(group)
        used = stored if weight_hook is None else weight_hook(stored)
        for name in group:
            self._fill(self.linears[name], used[name], changed=used[name] is not stored[name])

    def _fill(self, linear: Linear, tensor: QuantizedTensor, *, changed: bool) -> None:
        if tensor.shape != linear.weight.shape:
            raise ModelError(
                f"{linear.name}: a weight hook returned {list(tensor.shape)} instead of {list(linear.weight.shape)}"
            )
        if linear.name == LM_HEAD and self.config.tie_word_embeddings:
            shared = isinstance(tensor, PlainTensor) and not changed
            linear.weight = self.tensors[EMBEDDING] if shared else tensor.dequantize()
        else:
            tensor.dequantize(out=linear.weight)
        linear.format = tensor.format
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

    quantization: as in `plan_quantization`. kv_cache_dtype: "auto" takes what the patterns say, else BF16. dtype:
    what unquantized weights are rounded to. weight_hook: sees the quantized weights before they are used. progress:
    called with a line per layer.

    Raises ModelError for everything that is wrong with the folder, naming file and tensor, and ConfigError for an
    unknown format or pattern.
    """
    config = ModelConfig.from_folder(folder)
    files = TensorFolder(folder)
    groups = fused_groups(config)
    plan = plan_quantization(quantization, [name for group in groups for name in group])
    source = _OnTheFly(files, config, dtype, plan)
    cache = (
        plan.kv_cache or "bf16"
        if kv_cache_dtype == "auto"
        else kv_cache_format(kv_cache_dtype, "kv_cache_dtype")
    )
    checkpoint = Checkpoint(
        folder=folder,
        config=config,
        dtype=dtype,
        tensors=_read_tensors(files, config, dtype),
        linears={},
        fused={},
        kv_scales={layer: (1.0, 1.0) for layer in range(config.num_layers)},
        kv_cache_format=cache,
        bits_per_weight={},
        _source=source,
    )
    shapes = linear_shapes(config)
    for group in groups:
        if progress is not None:
            progress(f"loading {group[0].rpartition('.')[0] or group[0]}")
        _allocate(checkpoint, group, shapes, files, source)
        checkpoint._load(group, weight_hook)
    return checkpoint


def fused_groups(config: ModelConfig) -> list[Group]:
    """All linear layers in order, those that kernels fuse together."""
    groups: list[Group] = []
    for layer in range(config.num_layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        groups.append((f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"))
        groups.append((f"{attention}.o_proj",))
        groups.append((f"{mlp}.gate_proj", f"{mlp}.up_proj"))
        groups.append((f"{mlp}.down_proj",))
    return [*groups, (LM_HEAD,)]


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of every linear layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    kinds = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        LM_HEAD: (config.vocab_size, hidden),
    }
    return {name: kinds[name.rpartition(".")[2]] for group in fused_groups(config) for name in group}


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of everything that is not a linear layer: embeddings and norms, by name without ".weight"."""
    hidden = (config.hidden_size,)
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        "model.norm": hidden,
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm"] = shapes[f"{prefix}.post_attention_layernorm"] = hidden
        if config.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm"] = shapes[f"{prefix}.self_attn.k_norm"] = (config.head_dim,)
    return shapes


def _read_plain(files: TensorFolder, tensor: str, shape: Sequence[int], dtype: ComputeType) -> Float32:
    """A 16- or 32-bit tensor, rounded to the compute type."""
    entry = files.entry(tensor)
    if entry.shape != tuple(shape):
        raise ModelError(
            f"{entry.path}: tensor {tensor} has shape {list(entry.shape)}, config.json makes it {list(shape)}"
        )
    values = files.float32(tensor)
    return values if dtype == "float32" or entry.dtype == "BF16" else round_bfloat16(values, out=values)


def _read_tensors(files: TensorFolder, config: ModelConfig, dtype: ComputeType) -> dict[str, Float32]:
    return {
        name: _read_plain(files, f"{name}.weight", shape, dtype)
        for name, shape in tensor_shapes(config).items()
    }


def _allocate(
    checkpoint: Checkpoint,
    group: Group,
    shapes: Mapping[str, tuple[int, int]],
    files: TensorFolder,
    source: WeightSource,
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
            bias=_read_plain(files, bias, (rows,), checkpoint.dtype) if bias in files else None,
            activation=source.activation(name),
        )
        start += rows


@dataclass(frozen=True)
class _OnTheFly:
    """Quantizes an unquantized folder while reading it."""

    files: TensorFolder
    config: ModelConfig
    dtype: ComputeType
    plan: QuantizationPlan

    def quantized(self, group: Group) -> dict[str, QuantizedTensor]:
        shapes = linear_shapes(self.config)
        result: dict[str, QuantizedTensor] = {}
        for kind in dict.fromkeys(self.plan.formats[name] for name in group):
            names = [name for name in group if self.plan.formats[name] == kind]
            for name in names:
                _check_blocks(name, shapes[name], kind)
            weights = [self._weight(name, shapes[name]) for name in names]
            result.update(zip(names, FORMATS[kind].quantize(weights), strict=True))
        return result

    def activation(self, module: str) -> ActivationQuantizer | None:
        return FORMATS[self.plan.formats[module]].activation

    def _weight(self, name: str, shape: tuple[int, int]) -> Float32:
        tied = name == LM_HEAD and self.config.tie_word_embeddings
        return _read_plain(self.files, f"{EMBEDDING if tied else name}.weight", shape, self.dtype)


def _check_blocks(name: str, shape: tuple[int, int], kind: str) -> None:
    """Raises ModelError where the format's blocks do not fit the matrix."""
    chosen = FORMATS[kind]
    if not chosen.ragged and (shape[1] % chosen.block_columns or shape[0] % chosen.block_rows):
        raise ModelError(
            f"{name} {list(shape)} cannot be stored as {kind}: its input dimension must be a multiple of "
            f"{chosen.block_columns}; give it another format with a pattern"
        )
