"""config.json: what is understood, and what each mistake says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_quantguard.emulator.model_config import ModelConfig, RopeScaling
from pytest_quantguard.errors import ModelError

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def write(folder: Path, **changes: Any) -> Path:
    config = {key: value for key, value in {**BASE, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_defaults(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(write(tmp_path))
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.eos_token_ids) == (
        4,
        16,
        10000.0,
        (),
    )
    assert not config.attention_bias
    assert not config.qk_norm
    assert config.rope_scaling is None


def test_architectures_differ_in_biases_and_norms(tmp_path: Path) -> None:
    qwen2 = ModelConfig.from_folder(write(tmp_path, architectures=["Qwen2ForCausalLM"]))
    qwen3 = ModelConfig.from_folder(write(tmp_path, architectures=["Qwen3ForCausalLM"], head_dim=128))
    assert (qwen2.attention_bias, qwen2.qk_norm) == (True, False)
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)


def test_end_tokens_of_both_files(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}), encoding="utf-8")
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (2, 7)


def test_a_sliding_window_bounds_the_context(tmp_path: Path) -> None:
    assert ModelConfig.from_folder(write(tmp_path, sliding_window=100)).max_position_embeddings == 100
    unused = write(tmp_path, sliding_window=100, use_sliding_window=False)
    assert ModelConfig.from_folder(unused).max_position_embeddings == 512


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}},
    ],
)
def test_linear_scaling_divides_frequencies(tmp_path: Path, spelling: dict[str, Any]) -> None:
    config = ModelConfig.from_folder(write(tmp_path, **spelling))
    assert config.rope_scaling == RopeScaling("linear", 4.0)
    expected = [5e5 ** (-2 * index / 16) / 4 for index in range(8)]
    assert config.rotary_inverse_frequencies() == pytest.approx(expected, rel=1e-6)


def test_default_frequencies(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(write(tmp_path, rope_theta=10000))
    frequencies = config.rotary_inverse_frequencies()
    assert frequencies.dtype == np.float32
    assert frequencies == pytest.approx([10000 ** (-2 * index / 16) for index in range(8)], rel=1e-6)


def test_llama3_scaling_by_wavelength(tmp_path: Path) -> None:
    """Long wavelengths are stretched, short ones kept, those between blended (as Llama 3.1 formulates it)."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    config = ModelConfig.from_folder(write(tmp_path, rope_theta=500.0, rope_scaling=scaling))
    expected = []
    for index in range(8):
        frequency = 500.0 ** (-2 * index / 16)
        wavelength = 2 * math.pi / frequency
        if wavelength < 128 / 4:
            expected.append(frequency)
        elif wavelength > 128:
            expected.append(frequency / 8)
        else:
            smooth = (128 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    assert len({round(a / 500.0 ** (-2 * i / 16), 3) for i, a in enumerate(expected)}) >= 3
    assert config.rotary_inverse_frequencies() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            "architecture GemmaForCausalLM is not supported by the emulator; supported: LlamaForCausalLM, "
            "MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        ({"hidden_size": "absent"}, "key 'hidden_size' is missing"),
        ({"vocab_size": -5}, "key 'vocab_size': expected a positive whole number, found -5"),
        ({"num_hidden_layers": 2.5}, "key 'num_hidden_layers': expected a positive whole number, found 2.5"),
        ({"num_key_value_heads": 3}, "expected a divisor of num_attention_heads = 4, found 3"),
        ({"hidden_size": 66}, "expected a divisor of hidden_size = 66, found 4"),
        ({"hidden_act": "gelu"}, "key 'hidden_act': expected 'silu', found 'gelu'"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4}},
            "key 'rope_scaling.rope_type': expected one of default, linear, llama3, found 'yarn'",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "key 'factor' is missing"),
        ({"num_hidden_layers": 5000}, "key 'num_hidden_layers': expected at most 1000, found 5000"),
        ({"eos_token_id": "x"}, "key 'eos_token_id': expected a token id or a list of them, found 'x'"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                    "original_max_position_embeddings": 8192,
                }
            },
            "key 'rope_scaling.high_freq_factor': expected more than low_freq_factor = 4, found 4",
        ),
        ({"partial_rotary_factor": 0.5}, "key 'partial_rotary_factor': expected 1.0, found 0.5"),
    ],
)
def test_bad_values_name_file_key_and_expectation(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_folder(write(tmp_path, **changes))
    assert str(tmp_path / "config.json") in str(caught.value)
    assert message in str(caught.value)


def test_missing_and_damaged_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"expected a model folder, but it has no config\.json"):
        ModelConfig.from_folder(tmp_path)
    with pytest.raises(ModelError, match="found no folder"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelError, match="expected a JSON object, found list"):
        ModelConfig.from_folder(tmp_path)
