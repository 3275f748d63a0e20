"""What `config.json` of a Hugging Face folder says about a model, checked and in one shape for all
architectures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from pytest_quantguard.errors import ModelError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""All are pre-norm decoders with RMSNorm, rotary embeddings, grouped-query attention and a SwiGLU MLP."""

ROPE_TYPES = ("default", "linear", "llama3")
_Number = TypeVar("_Number", int, float)
_LARGEST_NUMBER = 1e9
_MOST_LAYERS = 1000


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context of pre-training."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a model; names as in Hugging Face configs.

    attention_bias: q, k and v projections have biases. qk_norm: RMSNorm over each head of q and k before the
    rotary embedding. max_position_embeddings: the context length, not above a sliding window (inside which
    attention is the full one).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read `config.json` and, for the end-of-sequence tokens, `generation_config.json`.

        Raises ModelError naming the file and key for a missing file, an architecture that is not supported,
        and a value that no such model can have.
        """
        raw = read_json(folder, "config.json")
        reader = _Reader(raw, folder / "config.json")
        architecture = _architecture(raw, folder)
        hidden_size = reader.positive("hidden_size", int)
        num_heads = reader.positive("num_attention_heads", int)
        num_kv_heads = reader.positive("num_key_value_heads", int, num_heads)
        if num_heads % num_kv_heads:
            raise reader.error(
                "num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads = {num_heads}"
            )
        if raw.get("head_dim") is None and hidden_size % num_heads:
            raise reader.error("num_attention_heads", num_heads, f"a divisor of hidden_size = {hidden_size}")
        activation = raw.get("hidden_act", "silu")
        if activation != "silu":
            raise reader.error("hidden_act", activation, "'silu'")
        num_layers = reader.positive("num_hidden_layers", int)
        if num_layers > _MOST_LAYERS:
            raise reader.error("num_hidden_layers", num_layers, f"at most {_MOST_LAYERS}")
        theta, scaling = _rope(reader)
        return cls(
            architecture=architecture,
            vocab_size=reader.positive("vocab_size", int),
            hidden_size=hidden_size,
            intermediate_size=reader.positive("intermediate_size", int),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=reader.positive("head_dim", int, hidden_size // num_heads),
            rms_norm_eps=reader.positive("rms_norm_eps", float, 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=architecture == "Qwen2ForCausalLM" or bool(raw.get("attention_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            max_position_embeddings=_context_length(reader),
            eos_token_ids=_eos_token_ids(raw, folder),
        )

    def rotary_inverse_frequencies(self) -> npt.NDArray[np.float32]:
        """float32 [head_dim / 2]: radians per position of each pair of a head's elements.

        llama3: as in Llama 3.1's model card: wavelengths above original / low_freq_factor are stretched by
        `factor`, those below original / high_freq_factor are kept, and those between are interpolated.
        """
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        frequencies = 1.0 / self.rope_theta**exponents
        scaling = self.rope_scaling
        if scaling is None:
            return frequencies.astype(np.float32)
        if scaling.kind == "linear":
            return (frequencies / scaling.factor).astype(np.float32)
        turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
        smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return ((1 - smooth) * frequencies / scaling.factor + smooth * frequencies).astype(np.float32)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of a model folder. Raises ModelError if there is none or it is damaged."""
    path = folder / name
    if not folder.is_dir():
        raise ModelError(
            f"{folder}: expected a model folder with {name} and safetensors files, found no folder"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder}: expected a model folder, but it has no {name}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


@dataclass(frozen=True)
class _Reader:
    """Reads checked values of one JSON object."""

    raw: Mapping[str, Any]
    path: Path

    def error(self, key: str, found: object, expected: str) -> ModelError:
        return ModelError(f"{self.path}: key {key!r}: expected {expected}, found {found!r}")

    def positive(self, key: str, kind: type[_Number], default: _Number | None = None) -> _Number:
        value = self.raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.path}: key {key!r} is missing")
        allowed = (int,) if kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed) or not 0 < value <= _LARGEST_NUMBER:
            raise self.error(key, value, "a positive whole number" if kind is int else "a positive number")
        return kind(value)


def _architecture(raw: Mapping[str, Any], folder: Path) -> str:
    found = raw.get("architectures") or [raw.get("model_type", "none")]
    name = str(found[0]) if isinstance(found, list) else str(found)
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{folder / 'config.json'}: architecture {name} is not supported by the emulator; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    return name


def _rope(reader: _Reader) -> tuple[float, RopeScaling | None]:
    """Both spellings: `rope_theta` + `rope_scaling`, and transformers 5's `rope_parameters`."""
    raw = reader.raw
    section = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    parameters = raw.get(section) or {}
    if not isinstance(parameters, dict):
        raise reader.error(section, parameters, "an object")
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        raise reader.error("partial_rotary_factor", partial, "1.0")
    inner = _Reader(
        {**parameters, "rope_theta": parameters.get("rope_theta", raw.get("rope_theta"))}, reader.path
    )
    theta = inner.positive("rope_theta", float, 10000.0)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ROPE_TYPES:
        raise reader.error(f"{section}.rope_type", kind, f"one of {', '.join(ROPE_TYPES)}")
    factor = inner.positive("factor", float)
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    low, high = inner.positive("low_freq_factor", float), inner.positive("high_freq_factor", float)
    if low >= high:
        raise reader.error(f"{section}.high_freq_factor", high, f"more than low_freq_factor = {low:g}")
    return theta, RopeScaling(
        "llama3", factor, low, high, inner.positive("original_max_position_embeddings", int)
    )


def _context_length(reader: _Reader) -> int:
    length = reader.positive("max_position_embeddings", int)
    window = reader.raw.get("sliding_window")
    if window is None or not reader.raw.get("use_sliding_window", True):
        return length
    return min(length, reader.positive("sliding_window", int))


def _eos_token_ids(raw: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """The union of both files', as servers stop at either."""
    found: list[int] = []
    sources = {"config.json": raw}
    if (folder / "generation_config.json").is_file():
        sources["generation_config.json"] = read_json(folder, "generation_config.json")
    for name, source in sources.items():
        value = source.get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in values):
            raise _Reader(source, folder / name).error("eos_token_id", value, "a token id or a list of them")
        found.extend(token for token in values if token not in found)
    return tuple(found)
