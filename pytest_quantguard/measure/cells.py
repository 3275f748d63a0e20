"""Measures one cell: the scored span of every prompt, for one phase and one batch size.

This is all that accuracy asks of a server. Comparing cells is the business of `logprobs`, keeping them that
of `baseline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pytest_quantguard.baseline.recording import Cell, CellKey, PromptRecord, plan_batches
from pytest_quantguard.errors import BaselineError, InvalidAnswerError
from pytest_quantguard.logprobs.arrays import TopLogprobs
from pytest_quantguard.measure.asking import (
    AnsweringClient,
    Asker,
    Cost,
    check_cache,
    narrow_rows,
    shorten,
    span_rows,
)
from pytest_quantguard.measure.decode import (
    DecodeChoice,
    DecodedSpan,
    decode_forced,
    decode_resync,
    token_tuple,
)
from pytest_quantguard.measure.waiting import Progress
from pytest_quantguard.serving.answers import GenerateRequest


@dataclass(frozen=True, slots=True)
class CellMeasurement:
    """A cell as a server answered it, with what that took.

    mode: how the rows came about.
    warm: whether the prompts were in the prefix cache, on purpose.
    decoded: per prompt, bool [T]: True where a decode step made the row (never in prefill; in decode all but
        the first position of each request, which belongs to the pass over the prompt).
    notes: sentences for the result: anything that was not as asked.
    """

    cell: Cell
    mode: Literal["prefill", "forced", "resync"]
    warm: bool
    cost: Cost
    decoded: tuple[npt.NDArray[np.bool_], ...]
    notes: tuple[str, ...]

    @property
    def key(self) -> CellKey:
        """Phase and batch size."""
        return self.cell.key

    @property
    def decoded_share(self) -> float:
        """Share of the positions whose row a decode step made."""
        return float(np.concatenate(self.decoded).mean())


def measure_cell(
    client: AnsweringClient,
    prompts: Sequence[PromptRecord],
    key: CellKey,
    *,
    top_logprobs: int,
    decode: DecodeChoice | None = None,
    warm: bool = False,
    progress: Progress | None = None,
) -> CellMeasurement:
    """Ask for the scored span of every prompt, `key.batch_size` prompts to a request, in the fixed plan.

    The prefix cache is flushed before each batch; requests that continue a batch by resync may meet what
    its own first request left there. With `warm` the texts before the spans are sent once after the flush,
    and the answers must then report cached tokens. `decode` is needed for decode cells.

    Raises `InvalidAnswerError` for answers that cannot be used: too few positions, other tokens than the
    baseline's, a prefix-cache hit in a cold measurement, none in a warm one, vocabularies that differ
    between rows.
    """
    require_positions(prompts)
    if key.phase == "decode" and decode is None:
        raise ValueError("a decode cell needs a DecodeChoice")
    asker = Asker(client, top_logprobs=top_logprobs, progress=progress)
    batches = plan_batches(len(prompts), key.batch_size)
    spans: list[DecodedSpan] = []
    for number, batch in enumerate(batches, start=1):
        if progress is not None:
            progress(f"{key}{' warm' if warm else ''}: batch {number} of {len(batches)}")
        members = [prompts[index] for index in batch]
        asker.flush()
        asked = f"{key}, batch {number}"
        if warm:
            _fill_cache(asker, members, asked=asked)
        if key.phase == "prefill" or decode is None:
            spans += _prefill(asker, members, warm=warm, asked=asked)
        elif decode.mode == "forced":
            spans += decode_forced(asker, members, warm=warm, asked=asked)
        else:
            spans += decode_resync(
                asker,
                members,
                warm=warm,
                context_length=decode.context_length,
                asked=asked,
            )
    rows, notes = _uniform([span.rows for span in spans], asked=top_logprobs)
    mode: Literal["prefill", "forced", "resync"] = "prefill"
    if key.phase == "decode" and decode is not None:
        mode = decode.mode
        notes = (*_decode_notes(key, decode, asker.cost, spans), *notes)
    return CellMeasurement(
        cell=Cell(key, batches, rows),
        mode=mode,
        warm=warm,
        cost=asker.cost,
        decoded=tuple(span.decoded for span in spans),
        notes=notes,
    )


def require_positions(prompts: Sequence[PromptRecord]) -> None:
    """Raise `BaselineError` where there is no prompt, or a prompt without a scored span."""
    if not prompts:
        raise BaselineError("There is nothing to measure: the suite has no prompts.")
    empty = [prompt.id for prompt in prompts if prompt.span_ids.size == 0 or prompt.span_start < 1]
    if empty:
        raise BaselineError(
            f"There is nothing to measure: no scored position in {shorten(empty)}. A comparison over zero "
            "positions proves nothing; capture the baseline again (`quantguard capture CONFIG`)."
        )


def _prefill(asker: Asker, prompts: Sequence[PromptRecord], *, warm: bool, asked: str) -> list[DecodedSpan]:
    """One request: prompt and continuation go in, the span's rows come out."""
    answers = asker.ask(
        [
            GenerateRequest(input_ids=token_tuple(prompt.token_ids), logprob_start_len=prompt.span_start - 1)
            for prompt in prompts
        ],
        asked=asked,
        prompt_ids=[prompt.id for prompt in prompts],
    )
    check_cache(prompts, answers, warm=warm, asked=asked)
    return [
        DecodedSpan(
            span_rows(prompt, answer.prompt, asked=asked), np.zeros(prompt.span_ids.size, dtype=np.bool_)
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def _fill_cache(asker: Asker, prompts: Sequence[PromptRecord], *, asked: str) -> None:
    """Make the server keep the keys and values of every prompt up to its span."""
    asker.ask(
        [GenerateRequest(input_ids=token_tuple(prompt.prefix_ids)) for prompt in prompts],
        asked=f"{asked}, filling the prefix cache",
        prompt_ids=[prompt.id for prompt in prompts],
    )


def _decode_notes(
    key: CellKey, decode: DecodeChoice, cost: Cost, spans: Sequence[DecodedSpan]
) -> tuple[str, ...]:
    """Why this mode, and how much of a resync was decode: both matter to who reads the result."""
    notes = () if decode.note is None else (decode.note,)
    if decode.mode == "forced":
        return notes
    share = float(np.concatenate([span.decoded for span in spans]).mean())
    return (
        *notes,
        f"{key}: resync took {cost.requests} requests, {share:.0%} of the positions came out of decode steps",
    )


def _uniform(rows: Sequence[TopLogprobs], *, asked: int) -> tuple[tuple[TopLogprobs, ...], tuple[str, ...]]:
    """All rows at one width, the narrowest that came, with a note if that is not what was asked."""
    vocabularies = sorted({part.vocab_size for part in rows})
    if len(vocabularies) > 1:
        raise InvalidAnswerError(
            f"The server's rows belong to vocabularies of different sizes: {vocabularies}."
        )
    width = min(part.width for part in rows)
    notes: tuple[str, ...] = ()
    if width < asked:
        notes = (
            f"the server answered {width} log-probabilities per position where {asked} were asked: K = "
            f"{width}",
        )
    return tuple(narrow_rows(part, width) for part in rows), notes
