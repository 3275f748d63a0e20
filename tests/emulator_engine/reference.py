"""A decoder written from the definitions, in float64, one token and one head at a time: slow and
obviously right.

No cache, no batching. It reads the same checkpoint arrays as the model under test. With `round_` it
rounds at the places that docs/emulator.md lists, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pytest_quantguard.emulator.checkpoint import Checkpoint, ModelConfig

Array = np.ndarray


def log_softmax(logits: Array) -> Array:
    """float64, over the last axis."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def reference_logits(
    checkpoint: Checkpoint, token_ids: list[int], round_: Callable[[Array], Array] | None = None
) -> Array:
    """float64 [tokens, vocabulary]: the logits after each token."""
    return _Decoder(checkpoint, round_).logits(token_ids)


@dataclass
class _Decoder:
    checkpoint: Checkpoint
    round_: Callable[[Array], Array] | None

    def rounded(self, x: Array) -> Array:
        if self.round_ is None:
            return x
        return self.round_(np.ascontiguousarray(x, np.float32)).astype(np.float64)

    def tensor(self, name: str) -> Array:
        return self.checkpoint.tensors[name].astype(np.float64)

    def linear(self, name: str, x: Array) -> Array:
        linear = self.checkpoint.linears[name]
        if linear.activation is not None:
            x = linear.activation(x[None].astype(np.float32))[0].astype(np.float64)
        result = linear.weight.astype(np.float64) @ x
        return self.rounded(result if linear.bias is None else result + linear.bias)

    def norm(self, x: Array, name: str) -> Array:
        epsilon = self.checkpoint.config.rms_norm_eps
        return self.rounded(x / math.sqrt(float(np.mean(x * x)) + epsilon) * self.tensor(name))

    def logits(self, token_ids: list[int]) -> Array:
        states = [self.tensor("model.embed_tokens")[token] for token in token_ids]
        branches = [np.zeros_like(state) for state in states]
        for index in range(self.checkpoint.config.num_layers):
            states, branches = self.layer(f"model.layers.{index}", states, branches)
        finals = [state + branch for state, branch in zip(states, branches, strict=True)]
        return np.stack([self.linear("lm_head", self.norm(final, "model.norm")) for final in finals])

    def layer(
        self, prefix: str, states: list[Array], branches: list[Array]
    ) -> tuple[list[Array], list[Array]]:
        """One decoder layer; the branch of its MLP is added by whoever comes next, since norms see
        unrounded sums."""
        sums = [state + branch for state, branch in zip(states, branches, strict=True)]
        attended = self.attention(
            f"{prefix}.self_attn", [self.norm(x, f"{prefix}.input_layernorm") for x in sums]
        )
        sums = [self.rounded(x) + branch for x, branch in zip(sums, attended, strict=True)]
        branches = []
        for x in sums:
            normed = self.norm(x, f"{prefix}.post_attention_layernorm")
            gate, up = (
                self.linear(f"{prefix}.mlp.gate_proj", normed),
                self.linear(f"{prefix}.mlp.up_proj", normed),
            )
            active = self.rounded(gate / (1 + np.exp(-gate)) * up)
            branches.append(self.linear(f"{prefix}.mlp.down_proj", active))
        return [self.rounded(x) for x in sums], branches

    def attention(self, prefix: str, inputs: list[Array]) -> list[Array]:
        config = self.checkpoint.config
        queries, keys, values = [], [], []
        for position, x in enumerate(inputs):
            query, key, value = (
                list(self.linear(f"{prefix}.{name}_proj", x).reshape(-1, config.head_dim)) for name in "qkv"
            )
            if config.qk_norm:
                query = [self.norm(head, f"{prefix}.q_norm") for head in query]
                key = [self.norm(head, f"{prefix}.k_norm") for head in key]
            queries.append([self.rounded(_rotate(config, head, position)) for head in query])
            keys.append([self.rounded(_rotate(config, head, position)) for head in key])
            values.append(value)
        outputs = []
        for position in range(len(inputs)):
            heads = []
            for head, query in enumerate(queries[position]):
                shared = head // (config.num_heads // config.num_kv_heads)
                scores = [
                    float(query @ keys[t][shared]) / math.sqrt(config.head_dim) for t in range(position + 1)
                ]
                weights = [math.exp(score - max(scores)) for score in scores]
                used = self.rounded(np.array(weights))
                mixed = sum(weight * values[t][shared] for t, weight in enumerate(used))
                heads.append(self.rounded(mixed / sum(weights)))
            outputs.append(self.linear(f"{prefix}.o_proj", np.concatenate(heads)))
        return outputs


def _rotate(config: ModelConfig, head: Array, position: int) -> Array:
    """Rotate pairs (i, i + head_dim / 2) by position * theta_i, as complex numbers."""
    half = config.head_dim // 2
    result = np.empty_like(head, dtype=np.float64)
    for pair in range(half):
        angle = position * _frequency(config, pair)
        turned = complex(head[pair], head[pair + half]) * complex(math.cos(angle), math.sin(angle))
        result[pair], result[pair + half] = turned.real, turned.imag
    return result


def _frequency(config: ModelConfig, pair: int) -> float:
    frequency = config.rope_theta ** (-2 * pair / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    wavelength = 2 * math.pi / frequency
    longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
    shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
    if wavelength < shortest:
        return frequency
    if wavelength > longest:
        return frequency / scaling.factor
    smooth = (scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency
