"""Decode: distributions that the server generates itself, conditioned on the reference's tokens.

Two ways lead there. `forced` makes the server emit the reference's tokens, one request per batch. `resync`
needs nothing of the server but greedy decoding: as long as it picks the reference's tokens its
distributions are conditioned as we want, up to and including the first position where it picks another;
from there it is asked again with the reference's prefix one token further on.

A request's first token comes out of the forward pass over its prompt, so its row is a prefill row under
another name. `DecodedSpan.decoded` says which rows a decode step really made: all but the first under
`forced`, all but the first after each restart under `resync`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from pytest_quantguard.baseline.recording import PromptRecord
from pytest_quantguard.errors import ConfigError, InvalidAnswerError
from pytest_quantguard.logprobs.arrays import TopLogprobs
from pytest_quantguard.measure.asking import Asker, check_cache, join_rows, span_rows, take_rows, with_chosen
from pytest_quantguard.serving.answers import Answer, Capabilities, GenerateRequest

DecodeMode = Literal["forced", "resync"]

LEAST_REACH = 4
"""Tokens that a resync request asks for at least, however early the last one diverged."""


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """How decode is measured on a server, and why.

    context_length: most tokens that the server takes per sequence; None if it does not say.
    note: a sentence for the result, where the choice needs one.
    """

    mode: DecodeMode
    context_length: int | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class DecodedSpan:
    """One prompt's scored span as decode saw it.

    rows: one row per position of the span. decoded: bool [T], False where the row came out of the forward
    pass over a request's prompt rather than out of a decode step.
    """

    rows: TopLogprobs
    decoded: npt.NDArray[np.bool_]


def choose_decode(setting: Literal["auto", "forced", "resync"], capabilities: Capabilities) -> DecodeChoice:
    """Turn `suite.decode_mode` into what the server offers; `ConfigError` for `forced` if it does not."""
    context_length = capabilities.context_length
    if setting == "resync":
        return DecodeChoice("resync", context_length)
    if capabilities.forced_decode is not None:
        return DecodeChoice("forced", context_length)
    how = (
        "start SGLang with `server_args: {enable_custom_logit_processor: true}`"
        if capabilities.kind != "emulator"
        else "use an emulator of this version"
    )
    if setting == "forced":
        raise ConfigError(
            f"suite.decode_mode is 'forced', but the server (a {capabilities.kind} server, version "
            f"{capabilities.version or 'unknown'}) does not offer forced decoding: {how}, "
            "or set suite.decode_mode to 'auto' or 'resync'."
        )
    note = f"decode measured by resync: the server does not offer forced decoding ({how})"
    return DecodeChoice("resync", context_length, note)


def decode_forced(
    asker: Asker, prompts: Sequence[PromptRecord], *, warm: bool, asked: str
) -> list[DecodedSpan]:
    """One request: every prompt starts from what precedes its span and emits the span's tokens."""
    answers = asker.ask(
        [
            GenerateRequest(
                input_ids=token_tuple(prompt.prefix_ids),
                max_new_tokens=int(prompt.span_ids.size),
                forced_ids=token_tuple(prompt.span_ids),
            )
            for prompt in prompts
        ],
        asked=asked,
        prompt_ids=[prompt.id for prompt in prompts],
    )
    check_cache(prompts, answers, warm=warm, asked=asked)
    spans = []
    for prompt, answer in zip(prompts, answers, strict=True):
        rows = span_rows(prompt, answer.output, asked=asked)
        decoded = np.ones(rows.positions, dtype=np.bool_)
        decoded[0] = False
        spans.append(DecodedSpan(rows, decoded))
    return spans


def decode_resync(
    asker: Asker, prompts: Sequence[PromptRecord], *, warm: bool, context_length: int | None, asked: str
) -> list[DecodedSpan]:
    """Requests until every span position was measured once; at most one per position of the longest span.

    All prompts of the batch are in every request, so that the batch size stays what it should be: a prompt
    whose span is measured already goes along from a point from which it generates as long as the others. The
    first request asks for the whole span, later ones for twice what the last one could keep: most of what a
    candidate generates after it has left the reference's text would be thrown away.
    """
    walks = [_Walk(prompt) for prompt in prompts]
    ids = [prompt.id for prompt in prompts]
    reach = max(walk.remaining for walk in walks)
    first = True
    while remaining := max(walk.remaining for walk in walks):
        steps = min(reach, remaining)
        answers = asker.ask(
            [walk.request(steps, context_length) for walk in walks], asked=asked, prompt_ids=ids
        )
        if first:
            check_cache(prompts, answers, warm=warm, asked=asked)
            first = False
        kept = [
            walk.take(answer, asked=asked)
            for walk, answer in zip(walks, answers, strict=True)
            if walk.remaining
        ]
        reach = max(LEAST_REACH, 2 * max(kept))
    return [walk.span() for walk in walks]


@dataclass(slots=True)
class _Walk:
    """How far one prompt's span has been measured by resync."""

    prompt: PromptRecord
    done: int = 0
    parts: list[TopLogprobs] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        return int(self.prompt.span_ids.size) - self.done

    def request(self, steps: int, context_length: int | None) -> GenerateRequest:
        """Generate `steps` tokens from the reference's prefix, or fewer where the context may end before."""
        tokens = self.prompt.token_ids
        if self.remaining == 0:
            start = max(self.prompt.span_start, tokens.size - steps)
            return GenerateRequest(input_ids=token_tuple(tokens[:start]), max_new_tokens=steps)
        start = self.prompt.span_start + self.done
        room = self.remaining if context_length is None else context_length - start
        return GenerateRequest(input_ids=token_tuple(tokens[:start]), max_new_tokens=min(steps, room))

    def take(self, answer: Answer, *, asked: str) -> int:
        """Keep the rows up to and including the first position where the server left the reference's text.

        Returns how many that are.
        """
        wanted = self.prompt.span_ids[self.done :]
        rows = answer.output
        if rows is None or rows.positions == 0:
            raise InvalidAnswerError(
                f"{asked}: prompt {self.prompt.id}, position {self.done} of its scored span: the server "
                f"generated nothing (finish reason {answer.finish_reason!r}) although ignore_eos was set."
            )
        emitted = np.asarray(answer.output_ids[: rows.positions], dtype=np.int32)[: wanted.size]
        differs = np.flatnonzero(emitted != wanted[: emitted.size])
        kept = int(differs[0]) + 1 if differs.size else int(emitted.size)
        self.restarts.append(self.done)
        self.parts.append(with_chosen(take_rows(rows, np.arange(kept)), wanted[:kept]))
        self.done += kept
        return kept

    def span(self) -> DecodedSpan:
        rows = join_rows(self.parts)
        decoded = np.ones(rows.positions, dtype=np.bool_)
        decoded[self.restarts] = False
        return DecodedSpan(rows, decoded)


def token_tuple(ids: npt.NDArray[np.int32]) -> tuple[int, ...]:
    return tuple(int(token) for token in ids)
