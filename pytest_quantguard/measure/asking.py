"""Asks a server for one batch at a time, counts what it cost, and checks that the answer fits.

Everything that measures goes through an `Asker`: what was asked is then counted in one place. It knows
nothing of phases; prefill and decode are in their own modules.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from pytest_quantguard.baseline.recording import PromptRecord
from pytest_quantguard.errors import InvalidAnswerError
from pytest_quantguard.logprobs.arrays import Int32, TopLogprobs
from pytest_quantguard.measure.waiting import Progress, awaited
from pytest_quantguard.serving.answers import Answer, GenerateRequest


class AnsweringClient(Protocol):
    """What measuring needs of a client; `serving` has the real one."""

    def generate(self, batch: Sequence[GenerateRequest], *, top_logprobs: int = 0) -> list[Answer]:
        """Send one HTTP request with all prompts of `batch`; answers come back in the same order."""

    def flush_cache(self) -> object:
        """Empty the server's prefix cache."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a measurement asked of the server.

    requests: HTTP requests. sequences: prompts sent in them. input_tokens, cached_tokens, output_tokens: as
    the server counted them. seconds: wall-clock time inside the requests.
    """

    requests: int = 0
    sequences: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0


class Asker:
    """Sends batches to one client and adds up what they cost. progress: hears of requests that take long."""

    def __init__(
        self, client: AnsweringClient, *, top_logprobs: int, progress: Progress | None = None
    ) -> None:
        self._client, self._progress = client, progress
        self.top_logprobs = top_logprobs
        self.cost = Cost()

    def flush(self) -> None:
        """Empty the server's prefix cache."""
        self._client.flush_cache()

    def ask(self, batch: Sequence[GenerateRequest], *, asked: str, prompt_ids: Sequence[str]) -> list[Answer]:
        """One HTTP request.

        asked: what is measured, prompt_ids: the batch's prompts by name; an `InvalidAnswerError` of the
            client, which knows neither, is raised again with both.
        """
        start = time.perf_counter()
        try:
            answers = awaited(
                lambda: self._client.generate(batch, top_logprobs=self.top_logprobs), asked, self._progress
            )
        except InvalidAnswerError as error:
            named = ", ".join(f"{number} = {name}" for number, name in enumerate(prompt_ids))
            raise InvalidAnswerError(f"{asked}: {error} (prompts of this batch: {named})") from error
        seconds = time.perf_counter() - start
        cost = self.cost
        self.cost = Cost(
            requests=cost.requests + 1,
            sequences=cost.sequences + len(batch),
            input_tokens=cost.input_tokens + sum(answer.prompt_tokens for answer in answers),
            cached_tokens=cost.cached_tokens + sum(answer.cached_tokens for answer in answers),
            output_tokens=cost.output_tokens + sum(answer.completion_tokens for answer in answers),
            seconds=cost.seconds + seconds,
        )
        return answers


def check_cache(
    prompts: Sequence[PromptRecord], answers: Sequence[Answer], *, warm: bool, asked: str
) -> None:
    """Raise `InvalidAnswerError` where the prefix cache did not do what the measurement supposes.

    Rows computed on top of cached keys and values measure the cache as well, and which prompts meet it
    depends on what was asked before: a cold measurement must meet none of it, a warm one must prove that it
    met some.
    """
    hits = [
        f"{prompt.id} ({answer.cached_tokens} of {answer.prompt_tokens} tokens)"
        for prompt, answer in zip(prompts, answers, strict=True)
        if answer.cached_tokens > 0
    ]
    if hits and not warm:
        raise InvalidAnswerError(
            f"{asked}: a cold measurement met the server's prefix cache although it was flushed just "
            f"before: {shorten(hits)}. Prompts of one batch share a beginning, somebody else uses the "
            "server, or the flush had no effect. Start the server without its prefix cache: "
            "`server_args: {disable_radix_cache: true}`."
        )
    if warm and not hits:
        raise InvalidAnswerError(
            f"{asked}: a warm measurement met no prefix cache: the same prompts were sent just before, "
            "but the server reports cached_tokens 0 for each of them. The server runs without a prefix "
            "cache (remove `disable_radix_cache` from server_args), or switch the warm-cache check off."
        )


def span_rows(prompt: PromptRecord, rows: TopLogprobs | None, *, asked: str) -> TopLogprobs:
    """`rows`, which must be those of the prompt's scored span; else `InvalidAnswerError`."""
    wanted = prompt.span_ids
    if rows is None or rows.positions != wanted.size:
        found = 0 if rows is None else rows.positions
        raise InvalidAnswerError(
            f"{asked}: prompt {prompt.id}: {wanted.size} positions were asked, {found} came back."
        )
    if not np.array_equal(rows.chosen_ids, wanted):
        position = int(np.flatnonzero(rows.chosen_ids != wanted)[0])
        raise InvalidAnswerError(
            f"{asked}: prompt {prompt.id}, position {position} of its scored span: the row belongs to "
            f"token {int(rows.chosen_ids[position])}, the baseline's token is {int(wanted[position])}. "
            "The server scored another text than it was sent, or rows of another prompt came back."
        )
    return rows


def take_rows(rows: TopLogprobs, index: np.typing.NDArray[np.intp]) -> TopLogprobs:
    """The rows at `index`, in that order."""
    return replace(
        rows,
        token_ids=rows.token_ids[index],
        logprobs=rows.logprobs[index],
        chosen_ids=rows.chosen_ids[index],
        chosen_logprobs=rows.chosen_logprobs[index],
    )


def join_rows(parts: Sequence[TopLogprobs]) -> TopLogprobs:
    """The parts one after the other, at the width of the narrowest."""
    width = min(part.width for part in parts)
    return TopLogprobs(
        token_ids=np.concatenate([part.token_ids[:, :width] for part in parts]),
        logprobs=np.concatenate([part.logprobs[:, :width] for part in parts]),
        chosen_ids=np.concatenate([part.chosen_ids for part in parts]),
        vocab_size=parts[0].vocab_size,
        chosen_logprobs=np.concatenate([part.chosen_logprobs for part in parts]),
    )


def narrow_rows(rows: TopLogprobs, width: int) -> TopLogprobs:
    """The best `width` tokens of every row."""
    if rows.width == width:
        return rows
    return replace(rows, token_ids=rows.token_ids[:, :width], logprobs=rows.logprobs[:, :width])


def with_chosen(rows: TopLogprobs, chosen_ids: Int32) -> TopLogprobs:
    """The same distributions, scored for `chosen_ids` int32 [T] instead of the tokens that were emitted."""
    found = rows.token_ids == chosen_ids[:, np.newaxis]
    looked_up = np.where(
        found.any(axis=1),
        np.take_along_axis(rows.logprobs, found.argmax(axis=1)[:, np.newaxis], axis=1)[:, 0],
        np.nan,
    )
    same = rows.chosen_ids == chosen_ids
    chosen_logprobs = np.where(same, rows.chosen_logprobs, looked_up).astype(np.float32)
    return replace(rows, chosen_ids=chosen_ids, chosen_logprobs=chosen_logprobs)


def shorten(items: Sequence[str], most: int = 5) -> str:
    """The first items of a list that may be long, for a message."""
    more = len(items) - most
    return ", ".join(items[:most]) + (f" and {more} more" if more > 0 else "")
