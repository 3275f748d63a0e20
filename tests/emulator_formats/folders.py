"""Model folders for tests: the stored ones, and small ones written from arrays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pytest_quantguard.emulator.tensor_files import TensorFolder

STORED = Path(__file__).parents[1] / "data" / "models"

Tensors = dict[str, tuple[str, np.ndarray]]
"""By name: the safetensors type and the elements; BF16 and FP8 as bit patterns."""


def read_tensors(folder: Path) -> Tensors:
    """Everything in a folder's safetensors files."""
    files = TensorFolder(folder)
    return {name: (entry.dtype, np.array(files.raw(name))) for name, entry in files.entries.items()}


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """The format by hand: length, JSON header, data."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def copy_folder(name: str, target: Path) -> Path:
    """A stored model folder that may be changed."""
    return Path(shutil.copytree(STORED / name, target / name))


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; a value of None removes the key."""
    content = json.loads(path.read_text(encoding="utf-8"))
    for key, value in changes.items():
        if value is None:
            content.pop(key, None)
        else:
            content[key] = value
    path.write_text(json.dumps(content), encoding="utf-8")


def bf16(array: np.ndarray) -> tuple[str, np.ndarray]:
    """A BF16 tensor of these values."""
    return "BF16", np.asarray(array).astype(ml_dtypes.bfloat16).view(np.uint16)


def f32(array: Any) -> tuple[str, np.ndarray]:
    """An F32 tensor."""
    return "F32", np.asarray(array, np.float32)


def damage(folder: Path, changes: Mapping[str, tuple[str, np.ndarray] | None]) -> None:
    """Replace tensors of a single-file folder; None removes one."""
    tensors = read_tensors(folder)
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    write_safetensors(folder / "model.safetensors", tensors)


def random_model(folder: Path, seed: int = 0, scale: float = 0.1, **config: Any) -> Path:
    """A folder of random BF16 weights that fit `config` (merged over a tiny Llama's)."""
    merged = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 80,
        "max_position_embeddings": 256,
        "eos_token_id": 2,
        **config,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(merged), encoding="utf-8")
    architecture = merged["architectures"][0]
    hidden, inner, vocabulary = merged["hidden_size"], merged["intermediate_size"], merged["vocab_size"]
    head = merged.get("head_dim", hidden // merged["num_attention_heads"])
    queries, keys = head * merged["num_attention_heads"], head * merged["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocabulary, hidden), "model.norm": (hidden,)}
    if not merged.get("tie_word_embeddings"):
        shapes["lm_head"] = (vocabulary, hidden)
    biases = {}
    for layer in range(merged["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, shape in {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            shapes[f"{prefix}.{name}"] = shape
            if architecture == "Qwen2ForCausalLM" and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                biases[f"{prefix}.{name}.bias"] = (shape[0],)
        shapes[f"{prefix}.input_layernorm"] = shapes[f"{prefix}.post_attention_layernorm"] = (hidden,)
        if architecture == "Qwen3ForCausalLM":
            shapes[f"{prefix}.self_attn.q_norm"] = shapes[f"{prefix}.self_attn.k_norm"] = (head,)
    rng = np.random.default_rng(seed)
    tensors = {f"{name}.weight": bf16(scale * rng.standard_normal(shape)) for name, shape in shapes.items()}
    tensors.update({name: bf16(scale * rng.standard_normal(shape)) for name, shape in biases.items()})
    write_safetensors(folder / "model.safetensors", tensors)
    return folder
