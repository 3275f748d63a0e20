"""A plain float32 forward pass over a checkpoint, to compare loaded models with reference logits.

Independent of the emulator's engine: no cache, no batching, every position computed from the formula.
"""

from __future__ import annotations

import numpy as np

from pytest_quantguard.emulator.checkpoint import Checkpoint
from pytest_quantguard.emulator.formats import KV_CACHE_FORMATS


def forward(checkpoint: Checkpoint, input_ids: np.ndarray) -> np.ndarray:
    """input_ids: int [batch, tokens] -> logits, float32 [batch, tokens, vocabulary]."""
    config, tensors = checkpoint.config, checkpoint.tensors
    batch, tokens = input_ids.shape
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
    cache = KV_CACHE_FORMATS[checkpoint.kv_cache_format]

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        mean_square = (x.astype(np.float64) ** 2).mean(-1, keepdims=True)
        return (x / np.sqrt(mean_square + config.rms_norm_eps)).astype(np.float32) * weight

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        layer = checkpoint.linears[name]
        y = (x if layer.activation is None else layer.activation(x)) @ layer.weight.T
        return y if layer.bias is None else y + layer.bias

    angles = np.outer(np.arange(tokens), config.rotary_inverse_frequencies())
    cosine, sine = (np.tile(f(angles).astype(np.float32), 2)[:, None] for f in (np.cos, np.sin))

    def rotate(x: np.ndarray) -> np.ndarray:
        turned = np.concatenate([-x[..., width // 2 :], x[..., : width // 2]], -1)
        return x * cosine + turned * sine

    def through_cache(x: np.ndarray, scale: float) -> np.ndarray:
        return np.repeat(cache.load(cache.store(x, scale), scale), heads // kv_heads, axis=2)

    def project(name: str, x: np.ndarray, count: int) -> np.ndarray:
        return linear(name, x).reshape(batch, tokens, count, width)

    x = tensors["model.embed_tokens"][input_ids].reshape(batch * tokens, -1)
    causal = np.tri(tokens, dtype=bool)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        attention = f"{prefix}.self_attn"
        h = norm(x, tensors[f"{prefix}.input_layernorm"])
        q, k = project(f"{attention}.q_proj", h, heads), project(f"{attention}.k_proj", h, kv_heads)
        if config.qk_norm:
            q, k = norm(q, tensors[f"{attention}.q_norm"]), norm(k, tensors[f"{attention}.k_norm"])
        k_scale, v_scale = checkpoint.kv_scales[index]
        k = through_cache(rotate(k), k_scale)
        v = through_cache(project(f"{attention}.v_proj", h, kv_heads), v_scale)
        scores = np.einsum("bthd,bshd->bhts", rotate(q), k) / np.float32(np.sqrt(width))
        scores = np.where(causal, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("bhts,bshd->bthd", weights, v).reshape(batch * tokens, -1).astype(np.float32)
        x = x + linear(f"{attention}.o_proj", mixed)
        h = norm(x, tensors[f"{prefix}.post_attention_layernorm"])
        gate = linear(f"{prefix}.mlp.gate_proj", h)
        h = gate / (1 + np.exp(-gate)) * linear(f"{prefix}.mlp.up_proj", h)
        x = x + linear(f"{prefix}.mlp.down_proj", h)
    return linear("lm_head", norm(x, tensors["model.norm"])).reshape(batch, tokens, -1)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64 over the last axis."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def mean_kl(reference: np.ndarray, other: np.ndarray) -> float:
    """Mean over positions of KL(reference || other), from full logits."""
    p, q = log_softmax(reference), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def kl_by_prompt(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """float64 [batch]: the same mean for each prompt, ascending.

    Kernels of another processor sum in another order. That moves an activation to the next step of its grid
    once in thousands of times, and attention carries it on to the prompt's end: most prompts are exact, but
    which ones depends on the machine.
    """
    return np.sort([mean_kl(one, two) for one, two in zip(reference, other, strict=True)])
