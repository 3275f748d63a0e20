"""A loaded model with everything that serving it needs, and the switching of its faults."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, cast

from pytest_quantguard.emulator.batch import ForwardBatch
from pytest_quantguard.emulator.checkpoint import load_checkpoint
from pytest_quantguard.emulator.engine import Engine
from pytest_quantguard.emulator.faults import FAULTS
from pytest_quantguard.emulator.faults.base import hooks_for, parse_fault
from pytest_quantguard.emulator.hooks import Hooks
from pytest_quantguard.emulator.model import Model
from pytest_quantguard.emulator.models import resolve_model
from pytest_quantguard.emulator.options import EmulatorOptions
from pytest_quantguard.emulator.sequences import SequenceRequest
from pytest_quantguard.emulator.server_info import ServedModel
from pytest_quantguard.emulator.threads import available_threads
from pytest_quantguard.emulator.tokenizer import TextTokenizer, load_tokenizer
from pytest_quantguard.errors import ModelError

DECODE_LOG_INTERVAL = 40
"""Decode passes per log line, as in SGLang."""


@dataclass(slots=True)
class RunningModel:
    """An engine, its tokenizer and what is said of them. faults: the specifications of those switched on."""

    engine: Engine
    tokenizer: TextTokenizer | None
    served: ServedModel
    faults: tuple[str, ...]
    log: logging.Logger
    switching: threading.Lock = field(default_factory=threading.Lock)

    def switch_faults(self, specifications: Iterable[str]) -> None:
        """Replace the faults that are on. Raises ConfigError, changing nothing, for one that is unknown."""
        names, hooks = faulty_hooks(specifications, self.log)
        with self.switching:
            self.engine.switch_hooks(hooks)
            self.faults = names
        self.log.info(f"Faults switched: {', '.join(names) or 'none'}")


def load(options: EmulatorOptions, log: logging.Logger) -> RunningModel:
    """Fetch, read and start a model. Raises ModelError or ConfigError."""
    names, hooks = faulty_hooks(options.faults, log)
    folder = resolve_model(options.model, progress=log.info)
    log.info(f"Load weight begin. folder={folder}")
    checkpoint = load_checkpoint(
        folder,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        dtype=cast(Literal["bfloat16", "float32"], options.dtype),
        weight_hook=hooks.apply_weights if hooks.weight else None,
    )
    log.info(f"Load weight end. {checkpoint.describe()}")
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        log.info("The folder has no tokenizer.json: requests must send input_ids, texts stay empty.")
    context = context_length(options, checkpoint.config.max_position_embeddings)
    engine = Engine(
        Model(checkpoint, threads=options.threads or available_threads(), hooks=hooks),
        max_running_requests=options.max_running_requests,
        chunked_prefill_size=options.chunked_prefill_size,
        radix_cache=not options.disable_radix_cache,
        page_size=options.page_size,
    )
    warm_up(engine)
    served = ServedModel(
        folder=str(folder),
        architecture=checkpoint.config.architecture,
        vocab_size=checkpoint.config.vocab_size,
        context_length=context,
        has_tokenizer=tokenizer is not None,
        description=checkpoint.describe(),
    )
    log.info(
        f"chunked_prefill_size={options.chunked_prefill_size}, "
        f"max_running_requests={options.max_running_requests}, context_len={context}, faults={list(names)}"
    )
    return RunningModel(engine, tokenizer, served, names, log)


def warm_up(engine: Engine) -> None:
    """Generate one token, so that the first request does not pay for what is done once."""
    engine.submit(SequenceRequest(rid="warm-up", input_ids=(0,), max_new_tokens=1, ignore_eos=True)).result()
    engine.flush_cache()


def context_length(options: EmulatorOptions, limit: int) -> int:
    """Tokens that prompt and answer may have together. Raises ModelError above what the model knows."""
    if options.context_length is not None and options.context_length > limit:
        raise ModelError(
            f"--context-length {options.context_length} is more than the {limit} positions of {options.model}"
        )
    return options.context_length or limit


def faulty_hooks(specifications: Iterable[str], log: logging.Logger) -> tuple[tuple[str, ...], Hooks]:
    """The faults by their full names, and the hooks of an engine that has them and logs its passes."""
    faults = [parse_fault(specification, FAULTS) for specification in specifications]
    hooks = hooks_for(faults)
    hooks.step.append(PassLog(log).line)
    return tuple(fault.specification for fault in faults), hooks


class PassLog:
    """Writes SGLang's lines about forward passes: every prefill, and every fortieth decode."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._decodes = 0
        self._tokens = 0
        self._seconds = 0.0

    def line(self, batch: ForwardBatch, seconds: float) -> None:
        """Called by the engine after a pass."""
        if batch.phase == "prefill":
            new = [entry for entry in batch.entries if entry.chunk == 0]
            cached = sum(entry.context_length for entry in new)
            self._log.info(
                f"Prefill batch, #new-seq: {len(new)}, #new-token: {batch.rows}, #cached-token: {cached}, "
                f"input throughput (token/s): {batch.rows / max(seconds, 1e-9):.2f}"
            )
            return
        self._decodes += 1
        self._tokens += batch.rows
        self._seconds += seconds
        if self._decodes == DECODE_LOG_INTERVAL:
            self._log.info(
                f"Decode batch, #running-req: {batch.size}, "
                f"gen throughput (token/s): {self._tokens / max(self._seconds, 1e-9):.2f}"
            )
            self._decodes, self._tokens, self._seconds = 0, 0, 0.0
