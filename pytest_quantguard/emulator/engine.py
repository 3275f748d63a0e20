"""Continuous batching: one thread that turns submitted sequences into forward passes.

Not here: the arithmetic (model.py), where keys and values live (cache.py), HTTP (server.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as SequenceOf

from pytest_quantguard.emulator.hooks import Hooks
from pytest_quantguard.emulator.model import Model
from pytest_quantguard.emulator.sequences import LogprobRows, Sequence, SequenceRequest, SequenceResult

__all__ = ["Engine", "LogprobRows", "Sequence", "SequenceRequest", "SequenceResult"]


class Engine:
    """Runs a model on its own thread; every method may be called from any thread."""

    def __init__(
        self,
        model: Model,
        *,
        max_running_requests: int = 48,
        chunked_prefill_size: int = 4096,
        radix_cache: bool = True,
        page_size: int = 1,
        hooks: Hooks | None = None,
        rebuild: Callable[[Hooks], Model] | None = None,
    ) -> None:
        """rebuild: makes the model again under other weight hooks; needed only to switch weight faults at run time."""
        raise NotImplementedError

    def submit(
        self, request: SequenceRequest, on_progress: Callable[[Sequence], None] | None = None
    ) -> Sequence:
        """Queue one sequence. Raises RequestRejectedError for a request that could not run, before anything runs."""
        raise NotImplementedError

    def submit_batch(
        self, requests: SequenceOf[SequenceRequest], on_progress: Callable[[Sequence], None] | None = None
    ) -> list[Sequence]:
        """Queue sequences that enter the same forward passes; all are checked before any is queued."""
        raise NotImplementedError

    def abort(self, rid: str) -> bool:
        """End a sequence early with finish reason "abort"; False if no such sequence is queued or running."""
        raise NotImplementedError

    def flush_cache(self) -> bool:
        """Forget all prefixes; False (and nothing done) while sequences are queued or running, as SGLang answers."""
        raise NotImplementedError

    def switch_hooks(self, hooks: Hooks) -> None:
        """Wait until nothing runs, then serve with other hooks: the prefix cache is emptied, weights are rebuilt if needed."""
        raise NotImplementedError

    def load(self) -> tuple[int, int]:
        """(running, queued) sequences."""
        raise NotImplementedError

    def stop(self) -> None:
        """End the thread; sequences that still run fail with ServerError."""
        raise NotImplementedError
