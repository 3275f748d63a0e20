"""Lays out results as SGLang's answers: the fields of `meta_info`, nested and flat log-probabilities.

Nested rows are written to JSON bytes from the arrays directly, because a batch's top-256 rows are millions of
small lists otherwise. Pure functions of a result; nothing here waits or sends.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from pytest_quantguard.emulator.protocol import AnswerOptions, GenerateItem, HttpError, rejected
from pytest_quantguard.emulator.sequences import LogprobRows, SequenceResult

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
TokenText = Callable[[int], str]


@dataclass(slots=True)
class Timing:
    """When things happened to one sequence; seconds since the epoch, None when not yet."""

    received: float
    dispatched: float
    first_token: float | None = None
    finished: float | None = None


def encode_answer(
    item: GenerateItem,
    result: SequenceResult,
    text: str,
    timing: Timing,
    token_text: TokenText | None = None,
) -> dict[str, Any]:
    """The answer object of one sequence; whole when the result has a finish reason, cumulative before.

    Raises HttpError when a log-probability that JSON must carry is not finite, as the real server fails.
    """
    finished = result.finish_reason is not None
    steps = len(result.output_ids)
    meta: dict[str, Any] = {
        "id": result.rid,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "weight_version": "default",
        "num_retractions": 0,
        "prefill_finished_time": timing.first_token,
    }
    if item.options.return_logprob:
        meta.update(logprob_fields(item, result, token_text))
    meta["reasoning_tokens"] = 0
    meta["completion_tokens"] = steps
    meta["cached_tokens"] = result.cached_tokens
    if finished:
        meta["weight_versions"] = [{"version": "default", "start": 0, "end": steps}]
    cached = {"device": result.cached_tokens, "host": 0}
    meta["cached_tokens_details"] = cached if result.cached_tokens else None
    meta["dp_rank"] = None
    meta.update(timing_fields(timing, steps))
    return {"text": text, "output_ids": list(result.output_ids), "meta_info": meta}


def timing_fields(timing: Timing, steps: int) -> dict[str, float]:
    """The clock fields of a finished sequence; none before."""
    if timing.finished is None:
        return {}
    fields = {
        "e2e_latency": timing.finished - timing.received,
        "request_received_ts": timing.received,
        "api_server_dispatch_finish_ts": timing.dispatched,
        "request_finished_ts": timing.finished,
    }
    if timing.first_token is not None:
        fields["first_token_latency"] = timing.first_token - timing.received
        if steps > 1 and timing.finished > timing.first_token:
            fields["decode_throughput"] = (steps - 1) / (timing.finished - timing.first_token)
    return fields


def logprob_fields(
    item: GenerateItem, result: SequenceResult, token_text: TokenText | None
) -> dict[str, Any]:
    """The log-probability fields of `meta_info`, in SGLang's order."""
    options, selected = item.options, item.request.token_ids_logprob
    text = token_text if options.text_in_logprobs else None
    prompt, output = result.prompt, result.output
    fields: dict[str, Any] = {
        "input_token_logprobs": token_rows(prompt, text),
        "output_token_logprobs": token_rows(output, text),
        "output_token_logprobs_length": len(result.output_ids),
    }
    if options.top_logprobs_num > 0:
        for side, rows, flat in (
            ("input", prompt, options.flat_input),
            ("output", output, options.flat_output),
        ):
            # The flat output is set on the finished answer only; streaming refuses the flag.
            if flat:
                fields.update(flat_rows(side, rows, options))
            else:
                fields[f"{side}_top_logprobs"] = top_rows(rows, text)
    if options.selected:
        fields["input_token_ids_logprobs"] = selected_rows(prompt, selected, text)
        fields["output_token_ids_logprobs"] = selected_rows(output, selected, text)
    return fields


def token_rows(rows: LogprobRows | None, text: TokenText | None) -> Any:
    """[[logprob or null, token id, text or null], ...]"""
    if rows is None:
        return []
    ids, values = rows.token_ids.tolist(), finite(rows.logprobs, rows.null_prefix)
    head = [[None, token, text(token) if text else None] for token in ids[: rows.null_prefix]]
    tail = [
        [value, token, text(token) if text else None]
        for value, token in zip(values.tolist(), ids[rows.null_prefix :], strict=True)
    ]
    return head + tail


def top_rows(rows: LogprobRows | None, text: TokenText | None) -> Any:
    """A list per position of [logprob, token id, text or null], best first; null without a prediction."""
    if rows is None:
        return []
    values = finite(rows.top_logprobs, rows.null_prefix)
    return triples(values, rows.top_ids[rows.null_prefix :], rows.null_prefix, text)


def selected_rows(rows: LogprobRows | None, selected: tuple[int, ...], text: TokenText | None) -> Any:
    """The same for the ids that the request named, in its order."""
    if rows is None:
        return []
    values = finite(rows.selected_logprobs, rows.null_prefix)
    ids = np.broadcast_to(np.asarray(selected, dtype=np.int32), values.shape)
    return triples(values, ids, rows.null_prefix, text)


def triples(values: Float32, ids: Int32, null_prefix: int, text: TokenText | None) -> Any:
    """Rows of [value, id, text]; as bytes of JSON where there is no text to escape."""
    if text is not None:
        rows: list[Any] = [
            [[value, token, text(token)] for value, token in zip(*pair, strict=True)]
            for pair in zip(values.tolist(), ids.tolist(), strict=True)
        ]
        return [None] * null_prefix + rows
    count, width = values.shape
    numbers = orjson.dumps(values.ravel().tolist())[1:-1].split(b",")
    tokens = orjson.dumps(ids.ravel().tolist())[1:-1].split(b",")
    cells = [b"[%b,%b,null]" % pair for pair in zip(numbers, tokens, strict=True)] if count * width else []
    parts = [b"null"] * null_prefix
    parts += [b"[" + b",".join(cells[row * width : (row + 1) * width]) + b"]" for row in range(count)]
    return orjson.Fragment(b"[" + b",".join(parts) + b"]")


def flat_rows(side: str, rows: LogprobRows | None, options: AnswerOptions) -> dict[str, Any]:
    """`{side}_top_logprobs_{val,idx}_flat[_b64]` with their shape; the null rows are counted, not sent."""
    null_prefix = 0 if rows is None else rows.null_prefix
    if rows is None:
        values, ids = np.empty((0, options.top_logprobs_num), np.float32), np.empty((0, 0), np.int32)
    else:
        values, ids = rows.top_logprobs[null_prefix:], rows.top_ids[null_prefix:]
    prefix = f"{side}_top_logprobs"
    fields: dict[str, Any]
    if options.base64:
        fields = {
            f"{prefix}_val_flat_b64": base64.b64encode(values.astype("<f4").tobytes()).decode(),
            f"{prefix}_idx_flat_b64": base64.b64encode(ids.astype("<i4").tobytes()).decode(),
            f"{prefix}_val_flat_b64_dtype": "float32",
            f"{prefix}_idx_flat_b64_dtype": "int32",
        }
    else:
        fields = {
            f"{prefix}_val_flat": finite(values, 0).ravel().tolist(),
            f"{prefix}_idx_flat": ids.ravel().tolist(),
        }
    return {**fields, f"{prefix}_shape": list(values.shape), f"{prefix}_null_prefix": null_prefix}


def finite(values: Float32, null_prefix: int) -> Float32:
    """The rows that have a prediction. HttpError when one is not finite: JSON has no such number."""
    predicted = values[null_prefix:]
    if not np.isfinite(predicted).all():
        raise not_json_compliant(float(predicted[~np.isfinite(predicted)].ravel()[0]))
    return predicted


def not_json_compliant(value: float) -> HttpError:
    """What SGLang answers when a value cannot be written as JSON."""
    return rejected(f"Out of range float values are not JSON compliant: {value}")
