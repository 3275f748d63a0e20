"""A running sequence: its tokens, its place in the cache, and the log-probabilities gathered so far.

Used by the engine's thread only; `snapshot` may be called from any thread, since lists only grow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pytest_quantguard.emulator.cache import Slot
from pytest_quantguard.emulator.hooks import Float32
from pytest_quantguard.emulator.sampling import RowScores, sample
from pytest_quantguard.emulator.sequences import LogprobRows, Sequence, SequenceRequest, SequenceResult


class ActiveSequence:
    """One sequence between admission and its end."""

    def __init__(self, handle: Sequence, request: SequenceRequest, slot: Slot) -> None:
        """request: the handle's, unless a fault changed it."""
        self.handle = handle
        self.request = request
        self.slot = slot
        self.tokens = np.zeros(len(request.input_ids) + request.new_tokens, np.int32)
        self.tokens[: len(request.input_ids)] = request.input_ids
        self.cached_tokens = 0
        self.chunks = 0
        self.finish_reason: dict[str, Any] | None = None
        self._generator = np.random.default_rng(request.seed)
        self._output_ids: list[int] = []
        self._prompt_scores: list[RowScores] = []
        self._output_scores: list[RowScores] = []

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.input_ids)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self._output_ids)

    @property
    def prefill_left(self) -> int:
        """Prompt tokens whose keys and values are still to be computed."""
        return max(0, self.prompt_tokens - self.slot.length)

    def first_wanted(self, start: int) -> int:
        """The first position from `start` on whose logits are needed; at the latest the prompt's last."""
        wanted = self.request.prompt_start
        last = self.prompt_tokens - 1
        return last if wanted is None else min(max(start, wanted), last)

    def next_token(self, logits: Float32) -> int:
        """The forced token, else the best, else a drawn one. logits: float32 [vocabulary] / temperature."""
        request = self.request
        if request.forced_ids is not None and self.generated < len(request.forced_ids):
            return request.forced_ids[self.generated]
        if request.temperature == 0.0:
            return int(np.argmax(logits))
        return sample(logits, request.top_p, request.top_k, self._generator)

    def add_prompt_scores(self, scores: RowScores) -> None:
        """Rows of consecutive prompt positions, each for the token after it."""
        self._prompt_scores.append(scores)

    def add_output(self, token: int, scores: RowScores | None, eos_token_ids: tuple[int, ...]) -> None:
        """The next token and, where asked for, its row of scores; may end the sequence."""
        request = self.request
        if scores is not None:
            self._output_scores.append(scores)
        if request.new_tokens:
            self.tokens[self.prompt_tokens + self.generated] = token
            self._output_ids.append(token)
        ends = not request.ignore_eos and request.forced_ids is None
        if ends and self.generated and (token in eos_token_ids or token in request.stop_token_ids):
            self.finish_reason = {"type": "stop", "matched": token}
        elif self.generated == request.new_tokens:
            self.finish_reason = {"type": "length", "length": self.generated}

    def snapshot(self) -> Callable[[], SequenceResult]:
        """A function that makes the result as it stands now, whenever it is called."""
        return partial(self._result, self.generated, len(self._output_scores), self.finish_reason)

    def _result(self, generated: int, scored: int, finish_reason: dict[str, Any] | None) -> SequenceResult:
        request = self.request
        output_ids = self._output_ids[:generated]
        prompt = output = None
        if request.prompt_start is not None:
            prompt = self._rows(
                list(request.input_ids[request.prompt_start :]), self._prompt_scores, null_prefix=1
            )
        if request.return_logprob:
            output = self._rows(output_ids, self._output_scores[:scored], null_prefix=0)
        return SequenceResult(
            rid=request.rid,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_ids=tuple(output_ids),
            finish_reason=finish_reason,
            prompt=prompt,
            output=output,
        )

    def _rows(self, token_ids: list[int], parts: list[RowScores], *, null_prefix: int) -> LogprobRows:
        """Join scores into rows, the first `null_prefix` of which have no prediction."""
        null_prefix = min(null_prefix, len(token_ids))
        width, selected = self.request.top_logprobs_num, len(self.request.token_ids_logprob)
        nothing = RowScores(
            normalizer=np.zeros(null_prefix, np.float32),
            target=np.full(null_prefix, np.nan, np.float32),
            top_ids=np.full((null_prefix, width), -1, np.int32),
            top=np.full((null_prefix, width), np.nan, np.float32),
            selected=np.full((null_prefix, selected), np.nan, np.float32),
        )
        joined = [nothing, *parts]
        return LogprobRows(
            token_ids=np.array(token_ids, np.int32),
            logprobs=np.concatenate([part.target for part in joined])[: len(token_ids)],
            top_ids=np.concatenate([part.top_ids for part in joined]),
            top_logprobs=np.concatenate([part.top for part in joined]),
            selected_logprobs=np.concatenate([part.selected for part in joined]),
            null_prefix=null_prefix,
        )
