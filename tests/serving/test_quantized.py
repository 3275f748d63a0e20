"""Signs of quantization in what a server says and in its model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_quantguard.serving.answers import Capabilities
from pytest_quantguard.serving.quantized import why_unquantized


def says(folder: Path, *, cache: str | None = "auto", **arguments: Any) -> Capabilities:
    return Capabilities(
        kind="sglang",
        version="0.5.23",
        model_path=str(folder),
        dtype="bfloat16",
        quantization=arguments.get("quantization"),
        kv_cache_dtype=cache,
        vocab_size=100,
        context_length=100,
        flat_logprobs=True,
        forced_decode=None,
        deterministic=None,
        radix_cache=None,
        chunked_prefill_size=None,
        device="cuda",
        server_args={"quantization": None, "load_format": "auto"} | arguments,
    )


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A model folder without quantization."""
    (tmp_path / "config.json").write_text(
        json.dumps({"vocab_size": 100, "torch_dtype": "bfloat16"}), encoding="utf-8"
    )
    return tmp_path


def test_neither_the_server_nor_the_folder_shows_any(plain: Path) -> None:
    evidence = why_unquantized(says(plain))
    assert evidence is not None
    assert "quantization None and KV cache 'auto'" in evidence
    assert str(plain) in evidence


@pytest.mark.parametrize(
    "sign",
    [
        {"quantization": "fp8"},
        {"cache": "fp8_e4m3"},
        {"torchao_config": "int4wo-128"},
        {"load_format": "gguf"},
        {"load_format": "bitsandbytes"},
    ],
    ids=str,
)
def test_what_the_server_says_is_a_sign(plain: Path, sign: dict[str, str]) -> None:
    assert why_unquantized(says(plain, **sign)) is None  # type: ignore[arg-type]


def test_a_quantized_folder_is_a_sign(plain: Path) -> None:
    (plain / "hf_quant_config.json").write_text("{}", encoding="utf-8")
    assert why_unquantized(says(plain)) is None
    (plain / "hf_quant_config.json").unlink()
    (plain / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "fp8"}}), encoding="utf-8"
    )
    assert why_unquantized(says(plain)) is None


def test_without_the_folder_nothing_is_claimed(tmp_path: Path) -> None:
    assert why_unquantized(says(tmp_path)) is None
    assert why_unquantized(says(tmp_path / "absent")) is None
