"""Teacher forcing during decode: every step emits the token we name, and the untouched distribution comes
back.

Two ways, by what the server offers. The emulator has a plain request field. SGLang has custom logit
processors: code that travels with the request, runs before the server computes log-probabilities, and
therefore must hide the original values where they can be read back (see `forced_processor`). Here the
request is made and the answer undone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pytest_quantguard.errors import InvalidAnswerError, ServerError
from pytest_quantguard.logprobs.arrays import Float32, TopLogprobs
from pytest_quantguard.serving.answers import Answer, GenerateRequest
from pytest_quantguard.serving.forced_payload import serialized_processor

EXTRA_LOGPROBS = 3
"""Places of the top K that the forced token and the two slots may take: asked in addition, dropped."""
LIFT = 2.0
"""What the processor raises the forced token to: above every log-probability, so that greedy picks it."""

Slots = tuple[int, int]
"""The two sacrificed token ids: the first carries the forced token's own value, the second the value 0."""


def emulator_fields(batch: Sequence[GenerateRequest]) -> dict[str, Any]:
    """What the emulator's /generate needs in addition."""
    return {"forced_output_ids": [list(request.forced_ids or ()) for request in batch]}


def choose_slots(batch: Sequence[GenerateRequest], candidates: Sequence[int]) -> list[Slots]:
    """Two ids per prompt that it neither contains nor forces, from `candidates` in their order of preference.

    Raises ServerError where fewer than two remain.
    """
    slots = []
    for index, request in enumerate(batch):
        used = {*request.input_ids, *(request.forced_ids or ())}
        free = [token for token in candidates if token not in used][:2]
        if len(free) < 2:
            raise ServerError(
                f"forced decode needs two token ids that prompt {index} does not use and the model hardly "
                "ever "
                f"predicts; only {len(free)} were found. Use suite.decode_mode: resync"
            )
        slots.append((free[0], free[1]))
    return slots


def processor_fields(
    body: Mapping[str, Any], batch: Sequence[GenerateRequest], slots: Sequence[Slots]
) -> dict[str, Any]:
    """The body of a forced request to SGLang: `body` with the processor and each prompt's parameters."""
    sampling = [
        params | {"custom_params": {"force": list(request.forced_ids or ()), "slots": list(pair)}}
        for params, request, pair in zip(body["sampling_params"], batch, slots, strict=True)
    ]
    return {
        **body,
        "sampling_params": sampling,
        "custom_logit_processor": serialized_processor(),
        "token_ids_logprob": [list(pair) for pair in slots],
    }


def check_forced(answers: Sequence[Answer], batch: Sequence[GenerateRequest]) -> None:
    """Raise InvalidAnswerError where a server emitted other tokens than it was told to."""
    for index, (answer, request) in enumerate(zip(answers, batch, strict=True)):
        expected = request.forced_ids or ()
        if answer.output_ids != expected:
            step = next(
                (i for i, (a, b) in enumerate(zip(answer.output_ids, expected, strict=False)) if a != b),
                min(len(answer.output_ids), len(expected)),
            )
            raise InvalidAnswerError(
                f"prompt {index} of a batch of {len(batch)}: forced decode failed at step {step} of "
                f"{len(expected)}: "
                f"{_token(expected, step)} was to be emitted, {_token(answer.output_ids, step)} came. "
                "Use suite.decode_mode: resync for this server"
            )


def restore(
    answer: Answer, item: Mapping[str, Any], slots: Slots, *, place: str, top_logprobs: int
) -> Answer:
    """`answer` with the distribution that the model had before the processor changed it.

    The server's values are x - Z, where x is the original log-probability but for the forced token (LIFT)
    and the two slots (the forced token's original value; 0), and Z their normaliser. The second slot's
    value is therefore -Z.
    """
    rows = answer.output
    if rows is None:
        raise InvalidAnswerError(f"{place}: a forced answer came without log-probabilities")
    carried = _slot_values(item, slots, rows.positions, place)
    normaliser = carried[:, 1]
    own = carried[:, 0] - normaliser
    acted = np.abs(rows.chosen_logprobs - normaliser - LIFT) < 1e-3
    if not acted.all():
        raise InvalidAnswerError(
            f"{place}: the logit processor did not act at step {int(np.flatnonzero(~acted)[0])}; "
            "use suite.decode_mode: resync for this server"
        )
    restored = _restored_rows(rows, own, normaliser, slots, top_logprobs)
    return Answer(
        output_ids=answer.output_ids,
        text=answer.text,
        finish_reason=answer.finish_reason,
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        cached_tokens=answer.cached_tokens,
        prompt=answer.prompt,
        output=restored,
    )


def _restored_rows(
    rows: TopLogprobs, own: Float32, normaliser: Float32, slots: Slots, top_logprobs: int
) -> TopLogprobs:
    """Drop the slots and the lifted token, put the forced token back at its own value, keep the best K."""
    chosen = rows.chosen_ids[:, None]
    if rows.width == 0:
        return TopLogprobs(rows.token_ids, rows.logprobs, rows.chosen_ids, rows.vocab_size, own)
    changed = (rows.token_ids == chosen) | np.isin(rows.token_ids, slots)
    values = np.where(changed, -np.inf, rows.logprobs - normaliser[:, None])
    values = np.concatenate([values, own[:, None]], axis=1)
    token_ids = np.concatenate([rows.token_ids, chosen], axis=1)
    complete = rows.width == rows.vocab_size
    keep = min(top_logprobs, rows.width - 2 if complete else rows.width - EXTRA_LOGPROBS)
    if keep < 1:
        raise InvalidAnswerError(
            f"the server returned {rows.width} log-probabilities a position; forced decode needs more than "
            f"{EXTRA_LOGPROBS}"
        )
    order = np.argsort(-values, axis=1, kind="stable")[:, :keep]
    return TopLogprobs(
        np.take_along_axis(token_ids, order, axis=1),
        np.take_along_axis(values, order, axis=1).astype(np.float32),
        rows.chosen_ids,
        rows.vocab_size,
        own,
    )


def _slot_values(item: Mapping[str, Any], slots: Slots, rows: int, place: str) -> Float32:
    """float32 [rows, 2] of `output_token_ids_logprobs`, in the order of `slots`."""
    entries = item["meta_info"].get("output_token_ids_logprobs")
    try:
        by_row = [{int(entry[1]): float(entry[0]) for entry in row} for row in entries]
        values = np.array([[row[slot] for slot in slots] for row in by_row], np.float32).reshape(-1, 2)
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise InvalidAnswerError(
            f"{place}: the sacrificed token ids did not come back ({error!r})"
        ) from error
    if values.shape[0] != rows or not np.isfinite(values).all():
        raise InvalidAnswerError(
            f"{place}: expected {rows} finite pairs of sacrificed token ids, got {values.shape[0]}"
        )
    return values


def _token(token_ids: Sequence[int], step: int) -> str:
    return f"token {token_ids[step]}" if step < len(token_ids) else "no token"
