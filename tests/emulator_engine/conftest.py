"""Engines on small random models, ended after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulator_formats.folders import random_model

from pytest_quantguard.emulator.checkpoint import Checkpoint, load_checkpoint
from pytest_quantguard.emulator.engine import Engine, Sequence, SequenceRequest, SequenceResult
from pytest_quantguard.emulator.faults import FAULTS, hooks_for, parse_fault
from pytest_quantguard.emulator.model import Model

from .models import MODELS


class Running:
    """An engine and short ways to use it."""

    def __init__(self, checkpoint: Checkpoint, faults: tuple[str, ...] = (), **options: Any) -> None:
        hooks = hooks_for(parse_fault(text, FAULTS) for text in faults)
        self.checkpoint = checkpoint
        self.model = Model(checkpoint, threads=options.pop("threads", 1))
        self.model.switch_hooks(hooks)
        self.engine = Engine(self.model, **options)
        self._count = 0

    def request(self, ids: list[int], **fields: Any) -> SequenceRequest:
        """A request with a fresh id; scored over its whole prompt and with all log-probabilities unless
        told."""
        self._count += 1
        vocabulary = self.checkpoint.config.vocab_size
        defaults = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": vocabulary}
        return SequenceRequest(f"r{self._count}", tuple(ids), **{**defaults, **fields})

    def start(self, prompts: list[list[int]], **fields: Any) -> list[Sequence]:
        """Submit one batch."""
        return self.engine.submit_batch([self.request(ids, **fields) for ids in prompts])

    def run(self, prompts: list[list[int]], **fields: Any) -> list[SequenceResult]:
        """One batch, to its end."""
        return [sequence.result(60) for sequence in self.start(prompts, **fields)]

    def score(self, ids: list[int], **fields: Any) -> np.ndarray:
        """float32 [tokens, vocabulary]: log-probabilities by token id after each token of one prompt."""
        return full_rows(self.run([ids], max_new_tokens=0, **fields)[0])


def full_rows(result: SequenceResult) -> np.ndarray:
    """Prompt rows that have a prediction, then output rows, each in the order of token ids."""
    assert result.prompt is not None
    assert result.output is not None
    prompt = slice(result.prompt.null_prefix, None)
    ids = np.concatenate([result.prompt.top_ids[prompt], result.output.top_ids])
    values = np.concatenate([result.prompt.top_logprobs[prompt], result.output.top_logprobs])
    by_id = np.empty_like(values)
    np.put_along_axis(by_id, ids, values, axis=1)
    return by_id


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of one of `MODELS`, made once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = random_model(tmp_path_factory.mktemp(name), seed=len(made), **MODELS[name])
        return made[name]

    return get


@pytest.fixture
def running(folder: Callable[[str], Path]) -> Iterator[Callable[..., Running]]:
    """running(model="llama", dtype="float32", quantization=None, kv_cache_dtype="auto", faults=(),
    **engine options)."""
    started: list[Running] = []

    def start(
        model: str = "llama",
        dtype: Any = "float32",
        quantization: Any = None,
        kv_cache_dtype: str = "auto",
        **options: Any,
    ) -> Running:
        checkpoint = load_checkpoint(
            folder(model), quantization=quantization, kv_cache_dtype=kv_cache_dtype, dtype=dtype
        )
        started.append(Running(checkpoint, **options))
        return started[-1]

    yield start
    for one in started:
        one.engine.stop()
        one.model.close()


@pytest.fixture
def tokens() -> Callable[..., list[int]]:
    """tokens(count, seed): random token ids of the small models."""

    def make(count: int, seed: int = 0) -> list[int]:
        return np.random.default_rng(seed).integers(3, 80, count).tolist()

    return make
