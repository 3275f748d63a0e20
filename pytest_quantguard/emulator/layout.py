"""Names and shapes of a model's modules, and which of them kernels fuse; derived from its config alone."""

from __future__ import annotations

from pytest_quantguard.emulator.model_config import ModelConfig

Group = tuple[str, ...]
"""Modules that share an input and that kernels compute as one: q, k, v; gate, up; every other one alone."""

EMBEDDING = "model.embed_tokens"
LM_HEAD = "lm_head"


def fused_groups(config: ModelConfig) -> list[Group]:
    """All linear layers, in the order of the forward pass."""
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
