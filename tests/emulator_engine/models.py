"""The random models of these tests, one for each kind of architecture that is supported."""

from typing import Any

import numpy as np

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3_rope": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "linear_rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "mistral_one_kv_head": {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "qwen2_biases": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3_norms": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
}

REFERENCE_IDS = [int(token) for token in np.random.default_rng(7).integers(3, 80, 50)]
"""The prompt of `data/architectures/logits.npz`."""
REFERENCE_SCALE = 0.5
"""Of its weights: large enough for every part of a layer to leave a mark on the logits."""
