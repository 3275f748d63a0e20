"""From the bytes of a /generate answer to checked `Answer` objects; nested and flat log-probabilities alike.

What does not fit the request is an InvalidAnswerError that names the prompt and the position: nothing is
repaired, nothing is guessed. Comparing and judging happen elsewhere. No I/O.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from pytest_quantguard.errors import InvalidAnswerError
from pytest_quantguard.logprobs.arrays import Float32, Int32, TopLogprobs
from pytest_quantguard.serving.answers import Answer, GenerateRequest
from pytest_quantguard.serving.payload import decode_steps, wants_logprobs

NON_FINITE = "non-finite log-probabilities"
SENTINEL = np.float32(-3.4e38)
"""A masked token's log-probability is the lowest float32; nothing real comes near it."""
LARGEST = np.float32(1e-6)
"""A log-probability may exceed 0 by rounding only."""

_FLAT_DTYPES = {"float32": "<f4", "float64": "<f8", "int32": "<i4", "int64": "<i8"}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in a batch something was found, for messages."""

    prompt: int
    batch: int
    side: str = ""

    def __str__(self) -> str:
        where = f"prompt {self.prompt} of a batch of {self.batch}"
        return f"{where}, {self.side} side" if self.side else where


def parse_json(body: bytes, what: str) -> Any:
    """JSON of `body`. NaN and Infinity, which JSON has not, are reported as non-finite values."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if any(token in body for token in (b"NaN", b"Infinity")):
            raise InvalidAnswerError(
                f"{NON_FINITE}: {what} holds NaN or Infinity, so the model's output layer produced no numbers"
            ) from error
        start = body[:200].decode(errors="replace")
        raise InvalidAnswerError(f"{what} is not JSON ({error}); it begins with {start!r}") from error


def split_answers(body: bytes, batch: Sequence[GenerateRequest]) -> list[Any]:
    """One JSON object per prompt of `batch`, in order; InvalidAnswerError for another number of them."""
    items = parse_json(body, "the answer of /generate")
    if isinstance(items, dict) and len(batch) == 1:
        items = [items]
    if not isinstance(items, list) or len(items) != len(batch):
        found = f"{len(items)} answers" if isinstance(items, list) else type(items).__name__
        raise InvalidAnswerError(f"asked {len(batch)} prompts in one request, got {found}")
    return items


def read_answers(
    items: Sequence[Any], batch: Sequence[GenerateRequest], *, top_logprobs: int, vocab_size: int
) -> list[Answer]:
    """The answers to `batch`, in its order, from what `split_answers` returned.

    Raises InvalidAnswerError for missing fields, too few or too many positions, tokens
    other than those asked, null or non-finite values, a masked-token sentinel, or rows that are not best
    first.
    """
    return [
        _read_answer(item, request, _Place(index, len(batch)), top_logprobs, vocab_size)
        for index, (item, request) in enumerate(zip(items, batch, strict=True))
    ]


def _read_answer(
    item: Any, request: GenerateRequest, place: _Place, top_logprobs: int, vocab_size: int
) -> Answer:
    try:
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is then refused
            return _answer_of(item, request, place, top_logprobs, vocab_size)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A broken or foreign server may put anything anywhere.
        raise InvalidAnswerError(
            f"{place}: the answer is malformed ({type(error).__name__}: {str(error)[:200]})"
        ) from error


def _answer_of(
    item: Any, request: GenerateRequest, place: _Place, top_logprobs: int, vocab_size: int
) -> Answer:
    meta = item.get("meta_info") if isinstance(item, dict) else None
    if not isinstance(meta, dict):
        raise InvalidAnswerError(f"{place}: the answer has no meta_info, so this is not SGLang's /generate")
    finish = _finish_reason(meta, request, place)
    output_ids = _output_ids(item, meta, place)
    if finish == "abort":
        return _partial_answer(item, meta, output_ids, place)
    _check_counts(meta, request, output_ids, finish, place)
    prompt = output = None
    if wants_logprobs(request, top_logprobs):
        if request.logprob_start_len is not None:
            prompt = _prompt_rows(meta, request, place, top_logprobs, vocab_size)
        if decode_steps(request) > 0:
            output = _output_rows(meta, output_ids, place, top_logprobs, vocab_size)
    return Answer(
        output_ids=output_ids,
        text=str(item.get("text") or ""),
        finish_reason=finish,
        prompt_tokens=int(meta["prompt_tokens"]),
        completion_tokens=len(output_ids),
        cached_tokens=_count(meta, "cached_tokens", place),
        prompt=prompt,
        output=output,
    )


def _partial_answer(
    item: Mapping[str, Any], meta: Mapping[str, Any], output_ids: tuple[int, ...], place: _Place
) -> Answer:
    """What there was when the request was aborted, perhaps before its turn; its counts promise nothing."""
    return Answer(
        output_ids=output_ids,
        text=str(item.get("text") or ""),
        finish_reason="abort",
        prompt_tokens=_count(meta, "prompt_tokens", place),
        completion_tokens=len(output_ids),
        cached_tokens=_count(meta, "cached_tokens", place),
        prompt=None,
        output=None,
    )


def _finish_reason(meta: Mapping[str, Any], request: GenerateRequest, place: _Place) -> str:
    reason = meta.get("finish_reason")
    kind = str(reason.get("type")) if isinstance(reason, dict) else str(reason)
    if kind == "abort" and request.rid is None:  # who gives a rid may abort
        detail = reason.get("message") if isinstance(reason, dict) else None
        raise InvalidAnswerError(f"{place}: the server aborted the request: {detail or 'no reason given'}")
    return kind


def _output_ids(item: Mapping[str, Any], meta: Mapping[str, Any], place: _Place) -> tuple[int, ...]:
    ids = item.get("output_ids")
    if ids is None:
        # Some versions leave output_ids out; the log-probabilities name the tokens too.
        ids = [entry[1] for entry in meta.get("output_token_logprobs") or ()]
    if not isinstance(ids, list) or not all(is_count(token) for token in ids):
        raise InvalidAnswerError(f"{place}: output_ids is not a list of token ids")
    return tuple(ids)


def _count(meta: Mapping[str, Any], name: str, place: _Place) -> int:
    """A number of tokens; 0 where the server does not say."""
    value = meta.get(name)
    if value is not None and not is_count(value):
        raise InvalidAnswerError(f"{place}: {name} is {str(value)[:100]}, which is no number of tokens")
    return int(value or 0)


def is_count(value: Any) -> bool:
    """Whether a value of JSON can be a token id or a number of tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _check_counts(
    meta: Mapping[str, Any], request: GenerateRequest, output_ids: tuple[int, ...], finish: str, place: _Place
) -> None:
    prompt_tokens = meta.get("prompt_tokens")
    if prompt_tokens != len(request.input_ids):
        raise InvalidAnswerError(
            f"{place}: sent {len(request.input_ids)} prompt tokens, the server counted {prompt_tokens}; "
            "it added, dropped or truncated tokens"
        )
    completion_tokens = meta.get("completion_tokens", len(output_ids))
    if completion_tokens != len(output_ids):
        raise InvalidAnswerError(
            f"{place}: the server counted {completion_tokens} new tokens and sent {len(output_ids)}"
        )
    steps = decode_steps(request)
    too_few = len(output_ids) < steps and (finish == "length" or request.ignore_eos)
    if len(output_ids) > steps or too_few:
        raise InvalidAnswerError(
            f"{place}: asked for {steps} new tokens, got {len(output_ids)} (finish reason {finish!r})"
        )


def _prompt_rows(
    meta: Mapping[str, Any], request: GenerateRequest, place: _Place, top_logprobs: int, vocab_size: int
) -> TopLogprobs:
    place = _Place(place.prompt, place.batch, "prompt")
    assert request.logprob_start_len is not None
    tokens = request.input_ids[request.logprob_start_len :]
    entries = _list_field(meta, "input_token_logprobs", place)
    if len(entries) != len(tokens):
        hint = " (the server ignored logprob_start_len)" if len(entries) == len(request.input_ids) else ""
        raise InvalidAnswerError(
            f"{place}: asked for the log-probabilities of the {len(tokens)} tokens from position "
            f"{request.logprob_start_len} on, got {len(entries)}{hint}"
        )
    if entries and entries[0][0] is not None:
        raise InvalidAnswerError(
            f"{place}: the first entry must be null, since nothing predicts it; got {entries[0]}"
        )
    chosen_ids, chosen = _chosen(entries, place)
    expected = np.asarray(tokens, np.int32)
    if not np.array_equal(chosen_ids, expected):
        first = int(np.flatnonzero(chosen_ids != expected)[0])
        raise InvalidAnswerError(
            f"{place}: position {request.logprob_start_len + first} should be token {expected[first]}, "
            f"the answer is about token {chosen_ids[first]}: these are another prompt's rows"
        )
    rows = len(tokens) - 1
    token_ids, logprobs = _top_arrays(meta, "input", rows, place, top_logprobs)
    return _checked(token_ids, logprobs, chosen_ids[1:], chosen[1:], place, vocab_size)


def _output_rows(
    meta: Mapping[str, Any], output_ids: tuple[int, ...], place: _Place, top_logprobs: int, vocab_size: int
) -> TopLogprobs:
    place = _Place(place.prompt, place.batch, "output")
    entries = _list_field(meta, "output_token_logprobs", place)
    if len(entries) != len(output_ids):
        raise InvalidAnswerError(
            f"{place}: {len(output_ids)} tokens were generated but {len(entries)} have log-probabilities"
        )
    chosen_ids, chosen = _chosen(entries, place)
    if chosen_ids.tolist() != list(output_ids):
        raise InvalidAnswerError(f"{place}: output_token_logprobs is about other tokens than output_ids")
    token_ids, logprobs = _top_arrays(meta, "output", len(output_ids), place, top_logprobs)
    return _checked(token_ids, logprobs, chosen_ids, chosen, place, vocab_size)


def _list_field(meta: Mapping[str, Any], name: str, place: _Place) -> list[Any]:
    value = meta.get(name)
    if not isinstance(value, list):
        raise InvalidAnswerError(
            f"{place}: the answer has no {name}; does the server support return_logprob?"
        )
    return value


def _chosen(entries: list[Any], place: _Place) -> tuple[Int32, Float32]:
    """Ids int32 [n] and values float32 [n] of `[[logprob|null, id, text|null], ...]`; null is NaN."""
    try:
        values = np.array([np.nan if entry[0] is None else entry[0] for entry in entries], np.float32)
        ids = np.array([entry[1] for entry in entries], np.int32)
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        raise InvalidAnswerError(f"{place}: token log-probabilities are malformed: {error}") from error
    return ids, values


def _top_arrays(
    meta: Mapping[str, Any], side: str, rows: int, place: _Place, top_logprobs: int
) -> tuple[Int32, Float32]:
    """Ids int32 [rows, K] and log-probabilities float32 [rows, K] of one side, from whichever form came."""
    if top_logprobs == 0 or rows == 0:
        return np.empty((rows, 0), np.int32), np.empty((rows, 0), np.float32)
    if f"{side}_top_logprobs_shape" in meta:
        token_ids, logprobs = _flat_arrays(meta, side, place)
    else:
        token_ids, logprobs = _nested_arrays(meta, side, place)
    if token_ids.shape[0] != rows:
        raise InvalidAnswerError(
            f"{place}: expected {rows} positions of top log-probabilities, got {token_ids.shape[0]}"
        )
    if not 1 <= token_ids.shape[1] <= top_logprobs:
        raise InvalidAnswerError(
            f"{place}: asked for {top_logprobs} top log-probabilities, got {token_ids.shape[1]} a position"
        )
    return token_ids, logprobs


def _flat_arrays(meta: Mapping[str, Any], side: str, place: _Place) -> tuple[Int32, Float32]:
    name = f"{side}_top_logprobs"
    shape = meta[f"{name}_shape"]
    if not (
        isinstance(shape, list) and len(shape) == 2 and all(isinstance(n, int) and n >= 0 for n in shape)
    ):
        raise InvalidAnswerError(f"{place}: {name}_shape should be [rows, K], not {shape!r}")
    nulls = meta.get(f"{name}_null_prefix", 0)
    allowed = 1 if side == "input" else 0
    if nulls != allowed:
        raise InvalidAnswerError(
            f"{place}: {name}_null_prefix is {nulls}, not {allowed}: log-probabilities are missing at the "
            "start"
        )
    logprobs = _flat_values(meta, f"{name}_val_flat", "float32", place)
    token_ids = _flat_values(meta, f"{name}_idx_flat", "int32", place)
    if logprobs.size != shape[0] * shape[1] or token_ids.size != logprobs.size:
        raise InvalidAnswerError(
            f"{place}: {name} announces {shape[0]} x {shape[1]} values, "
            f"but holds {logprobs.size} log-probabilities and {token_ids.size} ids"
        )
    return (
        token_ids.astype(np.int32, copy=False).reshape(shape),
        logprobs.astype(np.float32, copy=False).reshape(shape),
    )


def _flat_values(meta: Mapping[str, Any], name: str, default_dtype: str, place: _Place) -> Any:
    encoded = meta.get(f"{name}_b64")
    if encoded is None:
        values = meta.get(name)
        if not isinstance(values, list):
            raise InvalidAnswerError(f"{place}: neither {name}_b64 nor {name} came")
        if any(value is None for value in values):
            raise InvalidAnswerError(
                f"{NON_FINITE}: {place}: {name} holds null, which is how NaN travels in JSON"
            )
        return np.asarray(values, np.float32 if default_dtype == "float32" else np.int32)
    dtype = meta.get(f"{name}_b64_dtype", default_dtype)
    if dtype not in _FLAT_DTYPES or np.dtype(_FLAT_DTYPES[dtype]).kind != np.dtype(default_dtype).kind:
        raise InvalidAnswerError(f"{place}: {name}_b64 has dtype {dtype!r}; {default_dtype} is expected")
    try:
        return np.frombuffer(base64.b64decode(encoded, validate=True), _FLAT_DTYPES[dtype])
    except (binascii.Error, ValueError, TypeError) as error:
        raise InvalidAnswerError(f"{place}: {name}_b64 cannot be decoded: {error}") from error


def _nested_arrays(meta: Mapping[str, Any], side: str, place: _Place) -> tuple[Int32, Float32]:
    rows = _list_field(meta, f"{side}_top_logprobs", place)
    if side == "input" and rows and rows[0] is None:
        rows = rows[1:]
    missing = next((index for index, row in enumerate(rows) if not row), None)
    if missing is not None:
        raise InvalidAnswerError(f"{place}: row {missing} of {side}_top_logprobs is null or empty")
    width = len(rows[0]) if rows else 0
    uneven = next((index for index, row in enumerate(rows) if len(row) != width), None)
    if uneven is not None:
        raise InvalidAnswerError(
            f"{place}: row {uneven} holds {len(rows[uneven])} log-probabilities, the first holds {width}"
        )
    token_ids = np.empty((len(rows), width), np.int32)
    logprobs = np.empty((len(rows), width), np.float32)
    for index, row in enumerate(rows):
        try:
            values, ids, *_ = zip(*row, strict=True)
            logprobs[index] = values  # null, which is how JSON writes NaN, becomes NaN
            token_ids[index] = ids
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidAnswerError(f"{place}: row {index} is malformed: {error}") from error
    return token_ids, logprobs


def _checked(
    token_ids: Int32,
    logprobs: Float32,
    chosen_ids: Int32,
    chosen: Float32,
    place: _Place,
    vocab_size: int,
) -> TopLogprobs:
    """The arrays as TopLogprobs once every value is a possible log-probability."""
    _check_values(chosen, "the token's own log-probability", place)
    _check_values(logprobs, "a top log-probability", place)
    if token_ids.size and not (token_ids.min() >= 0 and token_ids.max() < vocab_size):
        row, column = (int(index[0]) for index in np.nonzero((token_ids < 0) | (token_ids >= vocab_size)))
        raise InvalidAnswerError(
            f"{place}: row {row} names token id {token_ids[row, column]}, "
            f"outside the vocabulary of {vocab_size}"
        )
    rising = logprobs[:, 1:] > logprobs[:, :-1]
    if rising.any():
        raise InvalidAnswerError(f"{place}: row {int(np.nonzero(rising)[0][0])} is not sorted, best first")
    return TopLogprobs(token_ids, logprobs, chosen_ids, vocab_size, chosen)


def _check_values(values: Float32, what: str, place: _Place) -> None:
    # The smallest and the largest tell whether all is well (NaN fails every comparison); if not, look which.
    if not values.size or (values.min() > SENTINEL and values.max() <= LARGEST):
        return
    for bad, meaning in (
        (~np.isfinite(values), f"{NON_FINITE}: "),
        (values <= SENTINEL, "a masked-token sentinel stands for a log-probability: "),
        (values > LARGEST, "a log-probability above 0: "),
    ):
        if bad.any():
            position = tuple(int(index[0]) for index in np.nonzero(bad))
            raise InvalidAnswerError(f"{meaning}{place}: {what} in row {position[0]} is {values[position]}")
