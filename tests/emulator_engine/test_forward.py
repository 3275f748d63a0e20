"""The forward pass against implementations that share nothing with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulator_formats.folders import STORED, random_model
from emulator_formats.forward import kl_by_prompt, mean_kl

from pytest_quantguard.emulator.checkpoint import load_checkpoint
from pytest_quantguard.emulator.formats.rounding import round_bfloat16
from pytest_quantguard.emulator.hooks import Hooks

from .conftest import Running, full_rows
from .models import MODELS, REFERENCE_IDS, REFERENCE_SCALE
from .reference import log_softmax, reference_logits

ARCHITECTURES = Path(__file__).parents[1] / "data" / "architectures" / "logits.npz"
Start = Callable[..., Running]
Tokens = Callable[..., list[int]]


@pytest.mark.parametrize("model", MODELS)
def test_float32_prefill_equals_the_definition(running: Start, tokens: Tokens, model: str) -> None:
    one = running(model)
    ids = tokens(23)
    np.testing.assert_allclose(
        one.score(ids), log_softmax(reference_logits(one.checkpoint, ids)), atol=2e-5, rtol=0
    )


@pytest.fixture(scope="module")
def transformers_rows() -> dict[str, np.ndarray]:
    """Log-probabilities that the transformers library computed, by model; see make_reference.py there."""
    with np.load(ARCHITECTURES) as logits:
        return {name: log_softmax(logits[name].astype(np.float64)) for name in logits.files}


@pytest.mark.parametrize("model", MODELS)
def test_every_architecture_equals_transformers(
    tmp_path: Path, transformers_rows: dict[str, np.ndarray], model: str
) -> None:
    folder = random_model(tmp_path / model, scale=REFERENCE_SCALE, **MODELS[model])
    one = Running(load_checkpoint(folder, dtype="float32"))
    try:
        rows = one.score(REFERENCE_IDS)
    finally:
        one.engine.stop()
    np.testing.assert_allclose(rows, transformers_rows[model], atol=5e-5, rtol=0)


def test_the_architectures_differ_by_more_than_the_tolerance(
    transformers_rows: dict[str, np.ndarray],
) -> None:
    plain = transformers_rows["llama"]
    for name in ("llama3_rope", "linear_rope"):  # the same weights
        assert np.abs(transformers_rows[name] - plain).max() > 0.05


@pytest.mark.parametrize("model", MODELS)
def test_float32_decode_equals_the_definition(running: Start, tokens: Tokens, model: str) -> None:
    one = running(model)
    prompts = [tokens(count, seed=count) for count in (3, 17, 9)]
    for ids, result in zip(prompts, one.run(prompts, max_new_tokens=6, ignore_eos=True), strict=True):
        assert result.output is not None
        whole = [*ids, *result.output_ids]
        expected = log_softmax(reference_logits(one.checkpoint, whole))
        values = result.output.top_logprobs
        np.testing.assert_allclose(
            values,
            np.take_along_axis(expected[len(ids) - 1 : -1], result.output.top_ids, 1),
            atol=2e-5,
            rtol=0,
        )
        assert list(result.output_ids) == expected[len(ids) - 1 : -1].argmax(1).tolist()


@pytest.mark.parametrize("model", ["llama", "qwen2_biases", "qwen3_norms"])
def test_bfloat16_rounds_where_the_documentation_says(running: Start, tokens: Tokens, model: str) -> None:
    """A float64 pass that rounds at the documented places differs by rare flips of a last bit only; one
    that does not round is farther away."""
    one = running(model, dtype="bfloat16")
    ids = tokens(24)
    ours = one.score(ids)
    rounded = log_softmax(reference_logits(one.checkpoint, ids, round_=round_bfloat16))
    unrounded = log_softmax(reference_logits(one.checkpoint, ids))
    same = np.isclose(ours, rounded, atol=1e-5, rtol=0).mean()
    assert same > 0.5
    assert np.abs(ours - rounded).mean() < 0.4 * np.abs(ours - unrounded).mean()


def test_bfloat16_logits_are_bfloat16(running: Start, tokens: Tokens) -> None:
    one = running(dtype="bfloat16")
    seen = []
    hooks = Hooks(logits=[lambda logits, _batch: seen.append(logits.copy()) or logits])
    one.engine.switch_hooks(hooks)
    one.score(tokens(9))
    np.testing.assert_array_equal(seen[0], round_bfloat16(seen[0]))
    assert seen[0].shape == (9, 80)


EXPORTS = ("modelopt-nvfp4-tiny", "modelopt-nvfp4-fp8kv-tiny", "modelopt-fp8-tiny")


@dataclass
class Published:
    """A checkpoint that ModelOpt exported, and transformers' logits with ModelOpt's fake quantization.

    own: mean KL from the BF16 model to the quantized one, both by transformers in float32.
    """

    name: str

    def __post_init__(self) -> None:
        with np.load(STORED / self.name / "reference.npz") as reference:
            self.prompts: list[list[int]] = reference["input_ids"].tolist()
            self.expected = log_softmax(reference["quantized_logits"])
            self.own = mean_kl(reference["bf16_weights_logits"], reference["quantized_logits"])

    @contextlib.contextmanager
    def engine(self, dtype: Any) -> Iterator[Running]:
        one = Running(load_checkpoint(STORED / self.name, dtype=dtype))
        try:
            yield one
        finally:
            one.engine.stop()


@pytest.mark.parametrize("name", EXPORTS)
def test_published_checkpoints_give_the_exporters_logits(name: str) -> None:
    published = Published(name)
    with published.engine("float32") as one:
        rows = np.stack([one.score(ids) for ids in published.prompts])
    found = kl_by_prompt(published.expected, rows) / published.own
    assert found[1] < 1e-4, "two prompts of four at least"
    assert found.mean() < 0.02
    assert np.mean(np.abs(rows - published.expected).max(axis=-1) < 1e-3) >= 0.8


@pytest.mark.parametrize("name", EXPORTS)
def test_decode_of_a_published_checkpoint_gives_them_too(name: str) -> None:
    """Token by token. Products of one row sum in another order than those of many."""
    published = Published(name)
    rows = []
    with published.engine("float32") as one:
        for ids in published.prompts:
            (result,) = one.run([ids[:8]], forced_ids=tuple(ids[8:]), max_new_tokens=len(ids))
            rows.append(full_rows(result)[7:])
    expected = published.expected[:, 7:-1]
    assert kl_by_prompt(expected, np.stack(rows)).mean() < 0.02 * published.own
    assert np.mean(np.abs(np.stack(rows) - expected).max(axis=-1) < 1e-3) >= 0.5


@pytest.mark.parametrize("name", EXPORTS)
def test_bfloat16_moves_a_published_checkpoint_as_documented(name: str) -> None:
    """Half as far as its own quantization, and no farther from BF16 than that (docs/formats.md)."""
    published = Published(name)
    with published.engine("bfloat16") as one:
        rows = np.stack([one.score(ids) for ids in published.prompts])
    assert 0.25 < mean_kl(published.expected, rows) / published.own < 0.6
    with np.load(STORED / name / "reference.npz") as reference:
        assert 0.8 < mean_kl(reference["bf16_weights_logits"], rows) / published.own < 1.25


def test_thread_count_does_not_change_the_answer(running: Start, tokens: Tokens) -> None:
    ids = tokens(200)
    one, two = running(dtype="bfloat16"), running(dtype="bfloat16", threads=2)
    np.testing.assert_array_equal(one.score(ids), two.score(ids))
    prompts = [tokens(5, seed) for seed in range(9)]
    for left, right in zip(
        one.run(prompts, max_new_tokens=4), two.run(prompts, max_new_tokens=4), strict=True
    ):
        np.testing.assert_array_equal(left.output.top_logprobs, right.output.top_logprobs)


@pytest.mark.parametrize("quantization", [None, "nvfp4", "fp8_per_tensor"])
def test_the_mlp_in_parts_equals_the_mlp_at_once(
    running: Start, tokens: Tokens, monkeypatch: pytest.MonkeyPatch, quantization: str | None
) -> None:
    """Most of all where one activation scale covers the whole batch."""
    prompts = [tokens(30, 1), tokens(21, 2)]
    whole = running(quantization=quantization).run(prompts, max_new_tokens=0)
    monkeypatch.setattr("pytest_quantguard.emulator.model._MLP_ROWS", 8)
    parts = running(quantization=quantization).run(prompts, max_new_tokens=0)
    for left, right in zip(whole, parts, strict=True):
        np.testing.assert_allclose(full_rows(left), full_rows(right), atol=2e-5)


def test_one_activation_scale_per_module_when_fused_layers_differ(folder: Callable[[str], Path]) -> None:
    """up in NVFP4 and gate in BF16: each quantizes its input in its own way, though they share one
    product."""
    patterns = {"*": "bf16", "*.up_proj": "nvfp4"}
    one = Running(load_checkpoint(folder("llama"), quantization=patterns, dtype="float32"))
    try:
        ids = list(range(3, 20))
        expected = log_softmax(reference_logits(one.checkpoint, ids))
        np.testing.assert_allclose(one.score(ids), expected, atol=5e-5, rtol=0)
        plain = log_softmax(reference_logits(load_checkpoint(folder("llama")), ids))
        assert np.abs(expected - plain).max() > 1e-3
    finally:
        one.engine.stop()
