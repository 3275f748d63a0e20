"""What is asked of the engine for one sequence, and what it hands back.

A `Sequence` is the caller's handle: events while tokens come, a result at the end, an error if there is
one. It knows nothing of models or scheduling.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One prompt, as token ids, and how to continue it.

    max_new_tokens: 0 scores the prompt without generating. ignore_eos: go on past the model's
    end-of-sequence tokens and past `stop_token_ids`. temperature: 0 is greedy, ties to the lowest id;
    above 0 samples, reproducibly if `seed` is given. Log-probabilities of generated tokens are those of
    logits / temperature, as SGLang reports them. logprob_start_len: -1 asks nothing about the prompt; s
    in 0 .. n asks for rows of tokens s .. n-1, the first of which has no prediction. token_ids_logprob:
    ids whose log-probabilities are reported at every row. forced_ids: tokens that decoding emits whatever
    the model prefers; the distributions stay the model's own, no token ends the sequence, and decoding
    stops after the last one. batch_group: a name that messages may show.
    """

    rid: str
    input_ids: tuple[int, ...]
    max_new_tokens: int = 128
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    forced_ids: tuple[int, ...] | None = None
    batch_group: str | None = None

    @property
    def new_tokens(self) -> int:
        """The largest number of tokens that can be generated."""
        return (
            self.max_new_tokens if self.forced_ids is None else min(self.max_new_tokens, len(self.forced_ids))
        )

    @property
    def prompt_start(self) -> int | None:
        """The first prompt position that is reported; None where nothing about the prompt is."""
        return self.logprob_start_len if self.return_logprob and self.logprob_start_len >= 0 else None


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities at consecutive positions; natural logarithms.

    token_ids: int32 [rows], the token at each position. logprobs: float32 [rows], its log-probability
    given what stands before; NaN for the first `null_prefix` rows, which have no prediction. top_ids
    int32 [top_rows, k], top_logprobs float32 [top_rows, k]: the k most probable tokens, best first, ties
    by lowest id; the first `null_prefix` rows are -1 and NaN. top_rows equals rows, except when
    `max_new_tokens` is 0: then the output side has no token but one top row, the distribution of the next
    token. selected_logprobs: float32 [top_rows, ids], for `token_ids_logprob`.
    """

    token_ids: Int32
    logprobs: Float32
    top_ids: Int32
    top_logprobs: Float32
    selected_logprobs: Float32
    null_prefix: int


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """What a sequence has come to, whole or so far.

    finish_reason: {"type": "length", "length": n}, {"type": "stop", "matched": token_id},
        {"type": "abort", "message": text}, or None while it runs.
    prompt, output: None unless `return_logprob`; `prompt` is None too when `logprob_start_len` is -1.
    cached_tokens: prompt tokens whose keys and values came from the prefix cache.
    """

    rid: str
    prompt_tokens: int
    cached_tokens: int
    output_ids: tuple[int, ...]
    finish_reason: dict[str, Any] | None
    prompt: LogprobRows | None
    output: LogprobRows | None


class Sequence:
    """The handle of a submitted request. Safe to use from any thread."""

    def __init__(
        self, request: SequenceRequest, on_progress: Callable[[Sequence], None] | None = None
    ) -> None:
        """on_progress is called on the engine's thread after each new token and once at the end; it must
        not block."""
        self.request = request
        self._on_progress = on_progress
        self._changed = threading.Condition()
        self._tokens = 0
        nothing = SequenceResult(request.rid, len(request.input_ids), 0, (), None, None, None)
        self._snapshot: Callable[[], SequenceResult] = lambda: nothing
        self._error: Exception | None = None
        self._done = False

    @property
    def done(self) -> bool:
        """Whether `result` returns (or raises) at once."""
        return self._done

    @property
    def failed(self) -> bool:
        """Whether the sequence ended with an error."""
        return self._error is not None

    def partial(self) -> SequenceResult:
        """The result so far, without waiting; `finish_reason` is None while the sequence runs."""
        with self._changed:
            if self._error is not None:
                raise self._error
            snapshot = self._snapshot
        return snapshot()

    def result(self, timeout: float | None = None) -> SequenceResult:
        """Wait for the end. Raises the error that ended the sequence, or TimeoutError after `timeout`
        seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._done, timeout):
                raise TimeoutError(f"sequence {self.request.rid} still runs after {timeout} s")
        return self.partial()

    def events(self) -> Iterator[SequenceResult]:
        """The result so far, each time it has grown, and the final one; blocks in between. Slow readers
        skip steps."""
        seen, done = 0, False
        while not done:
            with self._changed:
                while not (self._done or self._tokens > seen):
                    self._changed.wait()
                seen, done = self._tokens, self._done
            yield self.partial()

    def publish(self, tokens: int, snapshot: Callable[[], SequenceResult], *, final: bool) -> None:
        """For the engine: `tokens` tokens have come; `snapshot` makes the result, whenever somebody
        asks."""
        with self._changed:
            self._tokens = tokens
            self._snapshot = snapshot
            self._done = final
            self._changed.notify_all()
        if self._on_progress is not None:
            self._on_progress(self)

    def fail(self, error: Exception) -> None:
        """For the engine: the sequence ends with `error`, which `result` raises."""
        with self._changed:
            self._error = error
            self._done = True
            self._changed.notify_all()
        if self._on_progress is not None:
            self._on_progress(self)
