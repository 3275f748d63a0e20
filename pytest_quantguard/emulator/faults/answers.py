"""Faults of scheduling and of the answer path: the model computes rightly, and something else goes
wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from pytest_quantguard.emulator.batch import ForwardBatch
from pytest_quantguard.emulator.faults.base import Fault, Severity
from pytest_quantguard.emulator.hooks import Float32, Hooks
from pytest_quantguard.emulator.sequences import LogprobRows, SequenceRequest, SequenceResult

_LOWEST = np.float32(np.finfo(np.float32).min)
_PAGE = 16


@dataclass(frozen=True)
class CachedPageStale(Fault):
    """page: which 16-token page of a reused prefix is wrong. content: zeros, or what another request had
    there."""

    name = "cached_page_stale"
    summary = "one 16-token page of a reused prefix is zero, or another request's"
    shows_in = "warm cache"
    source = "SGLang issues 22819 and 38319"
    severity_by_default: ClassVar[Severity] = "clear"
    variants = ("content=other",)
    page: int = 1
    content: Literal["zero", "other"] = "zero"

    def __post_init__(self) -> None:
        if self.page < 0:
            raise ValueError(f"page is {self.page}; a number from 0 on is needed")

    def register(self, hooks: Hooks) -> None:
        hooks.prefix.append(self._zero if self.content == "zero" else self._other())

    def _place(self) -> slice:
        return slice(self.page * _PAGE, (self.page + 1) * _PAGE)

    def _zero(self, keys: Float32, values: Float32) -> None:
        keys[:, :, self._place()] = 0.0
        values[:, :, self._place()] = 0.0

    def _other(self) -> Callable[[Float32, Float32], None]:
        """The page of the prefix that was reused before this one; zeros for the first."""
        place, previous = self._place(), [np.float32(0.0), np.float32(0.0)]

        def act(keys: Float32, values: Float32) -> None:
            page = keys[:, :, place], values[:, :, place]
            if page[0].shape[2] == _PAGE:
                mine = [part.copy() for part in page]
                for part, stale in zip(page, previous, strict=True):
                    part[...] = stale
                previous[:] = mine

        return act


@dataclass(frozen=True)
class LogprobTemperature(Fault):
    """temperature: what logits are divided by before the log-softmax."""

    name = "logprob_temperature"
    summary = "log-probabilities are those of logits / 0.8; the best token is unchanged"
    shows_in = "answers"
    source = "SGLang pull request 8375"
    severity_by_default: ClassVar[Severity] = "clear"
    temperature: float = 0.8

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; a number above 0 is needed")

    def register(self, hooks: Hooks) -> None:
        hooks.logits.append(self._act)

    def _act(self, logits: Float32, _batch: ForwardBatch) -> Float32:
        logits /= np.float32(self.temperature)
        return logits


@dataclass(frozen=True)
class LogprobSentinel(Fault):
    """The values that a masked sampler leaves behind."""

    name = "logprob_sentinel"
    summary = "the chosen token has log-probability 0.0, all others -3.4e38"
    shows_in = "answers"
    source = "SGLang issue 5761"
    severity_by_default: ClassVar[Severity] = "catastrophic"

    def register(self, hooks: Hooks) -> None:
        hooks.result.append(lambda _request, result: _map_rows(result, self._act))

    def _act(self, rows: LogprobRows) -> LogprobRows:
        known = slice(rows.null_prefix, None)
        logprobs, top = rows.logprobs.copy(), rows.top_logprobs.copy()
        logprobs[known] = 0.0
        top[known] = _LOWEST
        top[known, :1] = 0.0
        return replace(
            rows,
            logprobs=logprobs,
            top_logprobs=top,
            selected_logprobs=np.full_like(rows.selected_logprobs, _LOWEST),
        )


@dataclass(frozen=True)
class LogprobShift(Fault):
    """steps: by how many positions the log-probabilities are late."""

    name = "logprob_shift"
    summary = "log-probabilities are one position late"
    shows_in = "answers"
    source = "SGLang pull request 193"
    severity_by_default: ClassVar[Severity] = "catastrophic"
    steps: int = 1

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; a number from 1 on is needed")

    def register(self, hooks: Hooks) -> None:
        hooks.result.append(lambda _request, result: _map_rows(result, self._act))

    def _act(self, rows: LogprobRows) -> LogprobRows:
        def late(length: int) -> list[int]:
            first = min(rows.null_prefix, max(length - 1, 0))
            return [index if index < first else max(index - self.steps, first) for index in range(length)]

        tops = late(len(rows.top_ids))
        return replace(
            rows,
            logprobs=rows.logprobs[late(len(rows.logprobs))],
            top_ids=rows.top_ids[tops],
            top_logprobs=rows.top_logprobs[tops],
            selected_logprobs=rows.selected_logprobs[tops],
        )


@dataclass(frozen=True)
class RowsPermuted(Fault):
    """shift: every answer goes to the request this many places later."""

    name = "rows_permuted"
    summary = "the answers of a batch come back in another order"
    shows_in = "batch sizes above 1"
    source = "a variant of our own"
    severity_by_default: ClassVar[Severity] = "catastrophic"
    shift: int = 1

    def register(self, hooks: Hooks) -> None:
        hooks.batch_result.append(self._act)

    def _act(self, results: list[SequenceResult]) -> list[SequenceResult]:
        count = len(results)
        return [results[(place - self.shift) % count] for place in range(count)]


@dataclass(frozen=True)
class DoubleBOS(Fault):
    """token: the id that is put before every prompt. counted: whether prompt_tokens tells."""

    name = "double_bos"
    summary = "the server puts a second beginning-of-sequence token before the prompt"
    shows_in = "prompts"
    source = "SGLang pull request 888"
    severity_by_default: ClassVar[Severity] = "clear"
    variants = ("counted=false",)
    token: int = 1
    counted: bool = True

    def __post_init__(self) -> None:
        if self.token < 0:
            raise ValueError(f"token is {self.token}; a token id is needed")

    @property
    def severity(self) -> Severity:
        """A count that is off gives the fault away."""
        return "clear" if self.counted else "subtle"

    def register(self, hooks: Hooks) -> None:
        hooks.request.append(self._prepend)
        if not self.counted:
            hooks.result.append(lambda request, result: replace(result, prompt_tokens=len(request.input_ids)))

    def _prepend(self, request: SequenceRequest) -> SequenceRequest:
        start = request.logprob_start_len
        return replace(
            request,
            input_ids=(self.token, *request.input_ids),
            logprob_start_len=start + 1 if start >= 0 else start,
        )


@dataclass(frozen=True)
class SlowStep(Fault):
    """share: of each pass's time that is added as a pause. phase: which passes."""

    name = "slow_step"
    summary = "forward passes take longer than they should"
    shows_in = "speed"
    source = "a variant of our own: any kernel that lost its fast path"
    severity_by_default: ClassVar[Severity] = "clear"
    share: float = 0.3
    phase: Literal["all", "prefill", "decode"] = "all"

    def __post_init__(self) -> None:
        if self.share < 0:
            raise ValueError(f"share is {self.share}; a number from 0 on is needed")

    def register(self, hooks: Hooks) -> None:
        hooks.step.append(self._act)

    def _act(self, batch: ForwardBatch, seconds: float) -> None:
        if self.phase in ("all", batch.phase):
            time.sleep(self.share * seconds)


@dataclass(frozen=True)
class Runaway(Fault):
    """Generation runs on to its token limit."""

    name = "runaway"
    summary = "the end-of-sequence token is never chosen"
    shows_in = "generation"
    source = "a variant of our own: a chat template or stop-token list that lost the end token"
    severity_by_default: ClassVar[Severity] = "catastrophic"

    def register(self, hooks: Hooks) -> None:
        hooks.select.append(self._act)

    def _act(self, logits: Float32, eos_token_ids: tuple[int, ...]) -> Float32:
        changed: Float32 = logits.copy()
        changed[list(eos_token_ids)] = -np.inf
        return changed


def _map_rows(result: SequenceResult, change: Callable[[LogprobRows], LogprobRows]) -> SequenceResult:
    return replace(
        result,
        prompt=None if result.prompt is None else change(result.prompt),
        output=None if result.output is None else change(result.output),
    )


ANSWER_FAULTS: tuple[type[Fault], ...] = (
    CachedPageStale,
    LogprobTemperature,
    LogprobSentinel,
    LogprobShift,
    RowsPermuted,
    DoubleBOS,
    SlowStep,
    Runaway,
)
