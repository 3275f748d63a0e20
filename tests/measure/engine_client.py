"""The emulator's engine as a client in this process: real arithmetic, no HTTP, faults switched between
cells.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pytest_quantguard.emulator.checkpoint import load_checkpoint
from pytest_quantguard.emulator.engine import Engine
from pytest_quantguard.emulator.faults import FAULTS
from pytest_quantguard.emulator.faults.base import hooks_for, parse_fault
from pytest_quantguard.emulator.model import Model
from pytest_quantguard.emulator.sequences import LogprobRows, SequenceRequest, SequenceResult
from pytest_quantguard.logprobs.arrays import TopLogprobs
from pytest_quantguard.serving.answers import Answer, GenerateRequest

_NUMBER = itertools.count()


class EngineClient:
    """Answers as the HTTP client does; a batch enters the engine together."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self.engine = engine
        self.vocab_size = vocab_size

    def switch_faults(self, *specifications: str) -> None:
        self.engine.switch_hooks(hooks_for([parse_fault(name, FAULTS) for name in specifications]))

    def flush_cache(self) -> bool:
        return self.engine.flush_cache()

    def tokenize(self, text: str) -> list[int]:
        return [ord(character) % self.vocab_size for character in text]

    def generate(self, batch: Sequence[GenerateRequest], *, top_logprobs: int = 0) -> list[Answer]:
        handles = self.engine.submit_batch([_as_sequence(request, top_logprobs) for request in batch])
        return [
            self._answer(request, handle.result()) for request, handle in zip(batch, handles, strict=True)
        ]

    def _answer(self, request: GenerateRequest, result: SequenceResult) -> Answer:
        return Answer(
            output_ids=result.output_ids,
            text="",
            finish_reason=str((result.finish_reason or {}).get("type")),
            prompt_tokens=result.prompt_tokens,
            completion_tokens=len(result.output_ids),
            cached_tokens=result.cached_tokens,
            prompt=None if request.logprob_start_len is None else self._rows(result.prompt, 1),
            output=self._rows(result.output, 0) if result.output_ids else None,
        )

    def _rows(self, rows: LogprobRows | None, skip: int) -> TopLogprobs:
        assert rows is not None
        return TopLogprobs(
            token_ids=rows.top_ids[skip:].astype(np.int32),
            logprobs=rows.top_logprobs[skip:],
            chosen_ids=rows.token_ids[skip:].astype(np.int32),
            vocab_size=self.vocab_size,
            chosen_logprobs=rows.logprobs[skip:],
        )


def _as_sequence(request: GenerateRequest, top_logprobs: int) -> SequenceRequest:
    steps = len(request.forced_ids) if request.forced_ids is not None else request.max_new_tokens
    start = request.logprob_start_len
    return SequenceRequest(
        rid=f"measure-{next(_NUMBER)}",
        input_ids=request.input_ids,
        max_new_tokens=steps,
        ignore_eos=request.ignore_eos,
        return_logprob=True,
        logprob_start_len=-1 if start is None else start,
        top_logprobs_num=top_logprobs,
        forced_ids=request.forced_ids,
    )


@contextmanager
def engine_client(
    folder: Path,
    *,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    dtype: str = "bfloat16",
    faults: Iterable[str] = (),
    threads: int = 1,
    **engine: int | bool,
) -> Iterator[EngineClient]:
    """A client of a fresh engine, which is stopped at the end."""
    hooks = hooks_for([parse_fault(name, FAULTS) for name in faults])
    checkpoint = load_checkpoint(
        folder,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        dtype=dtype,
        weight_hook=hooks.apply_weights if hooks.weight else None,
    )
    running = Engine(Model(checkpoint, threads=threads, hooks=hooks), **engine)
    try:
        yield EngineClient(running, checkpoint.config.vocab_size)
    finally:
        running.stop()
