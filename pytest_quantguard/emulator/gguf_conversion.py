"""Turn a GGUF file of a Llama model into a Hugging Face folder with BF16 weights.

Reads the file with the `gguf` package, dequantizes every tensor, undoes llama.cpp's rotary permutation and
writes `model.safetensors`, `config.json`, `generation_config.json`, `tokenizer.json` and
`tokenizer_config.json`, which transformers and SGLang load as well. It neither fetches nor caches anything:
`models.py` does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pytest_quantguard.errors import ModelError

BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
CONTROL_TOKEN = 3
"""GGUF's `tokenizer.ggml.token_type` of tokens such as <|im_start|>, matched in text before anything else."""


def convert_gguf(source: Path, destination: Path, *, progress: Callable[[str], None] | None = None) -> None:
    """Write the model in `source` to the existing, empty folder `destination`.

    Raises ModelError when the file is not a Llama model with a byte-level BPE tokenizer.
    """
    reader = GGUFReader(source)
    metadata = Metadata(reader, source)
    if metadata["general.architecture"] != "llama":
        raise ModelError(
            f"{source}: architecture {metadata['general.architecture']!r} is not supported (only 'llama')"
        )
    tell = progress or (lambda _: None)
    tell("writing the tokenizer")
    write_tokenizer(metadata, destination)
    tell(f"converting {len(reader.tensors)} tensors to BF16")
    names = write_weights(reader, metadata, destination)
    write_config(metadata, destination, tied="lm_head.weight" not in names)


class Metadata:
    """The key-value pairs of a GGUF file."""

    def __init__(self, reader: GGUFReader, source: Path) -> None:
        self._reader = reader
        self._source = source

    def __getitem__(self, key: str) -> Any:
        """The value under `key`; ModelError if the file does not have it."""
        field = self._reader.get_field(key)
        if field is None:
            raise ModelError(f"{self._source}: the GGUF file has no {key!r}")
        return field.contents()

    def get(self, key: str, default: Any = None) -> Any:
        """The value under `key`, or `default`."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()


def write_weights(reader: GGUFReader, metadata: Metadata, destination: Path) -> set[str]:
    """Write `model.safetensors` with every tensor in BF16; returns their Hugging Face names."""
    heads = {
        "self_attn.q_proj.weight": int(metadata["llama.attention.head_count"]),
        "self_attn.k_proj.weight": int(metadata["llama.attention.head_count_kv"]),
    }
    tensors: dict[str, npt.NDArray[Any]] = {}
    for tensor in reader.tensors:
        name = hugging_face_name(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for ending, count in heads.items():
            if name.endswith(ending):
                values = undo_rotary_permutation(values, count)
        tensors[name] = np.ascontiguousarray(values.astype(ml_dtypes.bfloat16))
    path = destination / "model.safetensors"
    path.touch()
    mode = path.stat().st_mode  # The library's own file is its owner's alone; a cache may be shared.
    save_file(tensors, path, {"format": "pt"})
    path.chmod(mode)
    return set(tensors)


def hugging_face_name(name: str) -> str:
    """'blk.3.attn_q.weight' -> 'model.layers.3.self_attn.q_proj.weight'."""
    if name in OTHER_TENSORS:
        return OTHER_TENSORS[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in BLOCK_TENSORS:
        raise ModelError(f"the GGUF tensor {name!r} belongs to no module of a Llama model")
    return f"model.layers.{match[1]}.{BLOCK_TENSORS[match[2]]}.{match[3]}"


def undo_rotary_permutation(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of a q or k projection in Hugging Face's order; float32 [heads * head_dim, hidden] both ways.

    llama.cpp pairs neighbouring rows for the rotary embedding, Hugging Face pairs row i with row
    i + head_dim/2; llama.cpp's converter (`LlamaModel.permute`) interleaves the two halves of each head.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def write_config(metadata: Metadata, destination: Path, *, tied: bool) -> None:
    """Write `config.json` and `generation_config.json`."""
    hidden_size = int(metadata["llama.embedding_length"])
    heads = int(metadata["llama.attention.head_count"])
    special = {
        f"{role}_token_id": int(metadata[f"tokenizer.ggml.{key}_token_id"])
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": int(metadata.get("llama.rope.dimension_count", hidden_size // heads)),
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": int(metadata["llama.feed_forward_length"]),
        "max_position_embeddings": int(metadata["llama.context_length"]),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": int(metadata["llama.block_count"]),
        "num_key_value_heads": int(metadata["llama.attention.head_count_kv"]),
        "rms_norm_eps": shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_scaling": None,
        "rope_theta": shortest(metadata["llama.rope.freq_base"]),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": int(metadata["llama.vocab_size"]),
        **special,
    }
    write_json(destination / "config.json", config)
    write_json(destination / "generation_config.json", {"_from_model_config": True, **special})


def write_tokenizer(metadata: Metadata, destination: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    if metadata["tokenizer.ggml.model"] != "gpt2" or metadata["tokenizer.ggml.pre"] != "smollm":
        raise ModelError(
            f"tokenizer {metadata['tokenizer.ggml.model']!r} with pre-tokenizer "
            f"{metadata['tokenizer.ggml.pre']!r} is not supported (only byte-level BPE 'gpt2' with 'smollm')"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(destination / "tokenizer.json"))
    names = {
        f"{role}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    write_json(
        destination / "tokenizer_config.json",
        {
            # The generic class: GPT2Tokenizer would drop the splitting of digits.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(metadata["llama.context_length"]),
            "chat_template": metadata.get("tokenizer.chat_template"),
            **names,
        },
    )


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 is 1e-05."""
    return float(str(np.float32(value)))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write indented UTF-8 JSON."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
