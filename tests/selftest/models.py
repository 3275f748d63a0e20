"""Copies of the tiny model that are fragile in one place, and configs over them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file, save_file

MODELS = Path(__file__).parents[1] / "data" / "models"
TINY = MODELS / "bf16-tiny"
OUTLIER = 64.0


def tiny_config(model: Path = TINY, **changes: Any) -> dict[str, Any]:
    """A gate over the emulator with a tiny model; top-level keys replaced."""
    server = {"backend": "emulator", "model_path": str(model), "threads": 1}
    return {
        "version": 1,
        "name": "tiny",
        "reference": server,
        "candidate": {**server, "quantization": "nvfp4", "kv_cache_dtype": "fp8_e4m3"},
        "baseline": "baseline",
        "suite": {
            "prompts": "prompts.jsonl",
            "score_tokens": 8,
            "top_logprobs": 64,
            "batch_sizes": [1, 3],
            "repeats": 1,
        },
        "accuracy": {
            "kl_mean": {"max": 1.2},
            "drift": {"divergence": {"kl_mean": {"max": 0.001, "decision": "point"}}},
        },
        "self_consistency": {"batch": None},
        "speed": None,
        **changes,
    }


def write_config(folder: Path, config: dict[str, Any], *, prompts: int = 6) -> Path:
    """`gate.yaml` and its prompts, of random tokens and growing length."""
    generator = np.random.default_rng(0)
    lines = [
        json.dumps({"id": f"p{number}", "token_ids": generator.integers(3, 500, 12 + 9 * number).tolist()})
        for number in range(prompts)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    path = folder / "gate.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def with_outliers(folder: Path, layer: int) -> Path:
    """A copy of the tiny model whose `down_proj` of a layer has an outlier in each block of 16 inputs.

    The rows of `up_proj` that feed the outliers are scaled down by as much, so that the unquantized model
    computes the same as before (a power of two loses nothing).
    """
    shutil.copytree(TINY, folder)
    weights = load_bfloat16(folder / "model.safetensors")
    mlp = f"model.layers.{layer}.mlp"
    weights[f"{mlp}.down_proj.weight"][:, ::16] *= np.float32(OUTLIER)
    weights[f"{mlp}.up_proj.weight"][::16] /= np.float32(OUTLIER)
    save_file(weights, folder / "model.safetensors")
    return folder


def load_bfloat16(path: Path) -> dict[str, np.ndarray]:
    """A file's tensors as float32."""
    import ml_dtypes  # noqa: F401 - registers bfloat16 with numpy

    return {name: tensor.astype(np.float32) for name, tensor in load_file(path).items()}
