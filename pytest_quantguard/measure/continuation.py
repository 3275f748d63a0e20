"""Turns prompts into scored texts: tokens from the reference's tokenizer, a greedy continuation, a span.

Done once, at capture. From then on only the stored token ids are used, by every server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pytest_quantguard.baseline.recording import PromptRecord, plan_batches
from pytest_quantguard.errors import BaselineError
from pytest_quantguard.measure.asking import AnsweringClient, Asker, shorten
from pytest_quantguard.measure.waiting import Progress
from pytest_quantguard.prompts.prompt import Prompt
from pytest_quantguard.serving.answers import GenerateRequest


class CapturingClient(AnsweringClient, Protocol):
    """What capturing needs of a client beyond asking."""

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, special tokens as the server adds them."""


def continue_prompts(
    client: CapturingClient,
    prompts: Sequence[Prompt],
    *,
    score_tokens: int,
    batch_size: int,
    context_length: int | None = None,
    progress: Progress | None = None,
) -> tuple[PromptRecord, ...]:
    """Each prompt with up to `score_tokens` tokens that the server adds greedily, and its span.

    A continuation ends early where the server ends it (its end-of-sequence token included, if it reports
    it); the span then reaches into the prompt. Raises `BaselineError` naming the prompts where prompt and
    continuation have no `score_tokens` predictable tokens, or do not fit into the context.
    """
    tokens = [
        tuple(prompt.token_ids if prompt.token_ids is not None else client.tokenize(prompt.text or ""))
        for prompt in prompts
    ]
    _require_room(prompts, tokens, score_tokens, context_length)
    asker = Asker(client, top_logprobs=0, progress=progress)
    continuations: list[tuple[int, ...]] = []
    batches = plan_batches(len(prompts), batch_size)
    for number, batch in enumerate(batches, start=1):
        if progress is not None:
            progress(f"capture: greedy continuations, batch {number} of {len(batches)}")
        asker.flush()
        requests = [
            GenerateRequest(input_ids=tokens[index], max_new_tokens=score_tokens, ignore_eos=False)
            for index in batch
        ]
        members = [prompts[index].id for index in batch]
        answers = asker.ask(requests, asked=f"continuation, batch {number}", prompt_ids=members)
        continuations += [answer.output_ids for answer in answers]
    _require_span(prompts, tokens, continuations, score_tokens)
    return tuple(
        PromptRecord(
            id=prompt.id,
            task=prompt.task,
            token_ids=np.array([*start, *end], dtype=np.int32),
            prompt_tokens=len(start),
            span_start=len(start) + len(end) - score_tokens,
        )
        for prompt, start, end in zip(prompts, tokens, continuations, strict=True)
    )


def _require_room(
    prompts: Sequence[Prompt], tokens: Sequence[Sequence[int]], score_tokens: int, context: int | None
) -> None:
    empty = [prompt.id for prompt, ids in zip(prompts, tokens, strict=True) if not ids]
    if empty:
        raise BaselineError(
            f"These prompts have no tokens: {shorten(empty)}. Remove them from suite.prompts."
        )
    if context is None:
        return
    long = [
        f"{prompt.id} ({len(ids)} tokens)"
        for prompt, ids in zip(prompts, tokens, strict=True)
        if len(ids) + score_tokens > context
    ]
    if long:
        raise BaselineError(
            f"These prompts and suite.score_tokens = {score_tokens} more tokens exceed the server's "
            f"context of {context} tokens: {shorten(long)}. Lower suite.max_prompt_tokens or "
            "suite.score_tokens, or start the server with a longer context."
        )


def _require_span(
    prompts: Sequence[Prompt],
    tokens: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    score_tokens: int,
) -> None:
    """The first token of a text has nothing before it and cannot be scored."""
    lengths = [(len(start), len(end)) for start, end in zip(tokens, continuations, strict=True)]
    short = [
        f"{prompt.id} ({start} prompt tokens + {end} generated)"
        for prompt, (start, end) in zip(prompts, lengths, strict=True)
        if start + end <= score_tokens
    ]
    if short:
        most = min(start + end for start, end in lengths) - 1
        raise BaselineError(
            f"suite.score_tokens is {score_tokens}, but the reference ended these prompts so early that they "
            f"have fewer positions to score: {shorten(short)}. Lower it to {most} or replace them by longer "
            "prompts."
        )
