"""What the engine refuses before anything runs: requests that would break the model or could never fit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pytest_quantguard.emulator.sequences import SequenceRequest
from pytest_quantguard.errors import RequestRejectedError


@dataclass(frozen=True, slots=True)
class Limits:
    """vocab_size: logits per row. context_length: of the model. cache_tokens: of the longest
    sequence that fits into the key/value cache."""

    vocab_size: int
    context_length: int
    cache_tokens: int


def check_request(request: SequenceRequest, limits: Limits) -> None:
    """Raises RequestRejectedError saying which field is wrong, what it holds and what is possible."""
    _check_lengths(request, limits)
    _check_ids(request, "input_ids", request.input_ids, limits)
    _check_ids(request, "stop_token_ids", request.stop_token_ids, None)
    _check_ids(request, "token_ids_logprob", request.token_ids_logprob, limits)
    _check_ids(request, "forced_ids", request.forced_ids or (), limits)
    if not -1 <= request.logprob_start_len <= len(request.input_ids):
        raise _refused(
            request,
            f"logprob_start_len is {request.logprob_start_len}; -1 (nothing) to {len(request.input_ids)}, "
            "the length of the prompt, is possible",
        )
    if not 0 <= request.top_logprobs_num <= limits.vocab_size:
        raise _refused(
            request,
            f"top_logprobs_num is {request.top_logprobs_num}; 0 to {limits.vocab_size}, the size of the "
            "vocabulary, is possible",
        )
    if not (math.isfinite(request.temperature) and request.temperature >= 0.0):
        raise _refused(request, f"temperature is {request.temperature}; a finite number from 0 on is needed")
    if not 0.0 < request.top_p <= 1.0:
        raise _refused(request, f"top_p is {request.top_p}; a number above 0 and up to 1 is needed")
    if request.top_k != -1 and request.top_k < 1:
        raise _refused(request, f"top_k is {request.top_k}; -1 (all tokens) or a number from 1 on is needed")


def _check_lengths(request: SequenceRequest, limits: Limits) -> None:
    prompt, new = len(request.input_ids), request.new_tokens
    if not prompt:
        raise _refused(request, "input_ids is empty; at least one token is needed")
    if request.max_new_tokens < 0:
        raise _refused(request, f"max_new_tokens is {request.max_new_tokens}; a number from 0 on is needed")
    if prompt + new > limits.context_length:
        raise _refused(
            request,
            f"{prompt} prompt tokens and {new} new ones exceed the model's context of "
            f"{limits.context_length} tokens",
        )
    if prompt + max(new, 1) > limits.cache_tokens:
        raise _refused(
            request,
            f"{prompt} prompt tokens and {new} new ones exceed the {limits.cache_tokens} that one "
            "sequence may hold in the key/value cache; raise max_total_tokens",
        )


def _check_ids(request: SequenceRequest, field: str, ids: tuple[int, ...], limits: Limits | None) -> None:
    for place, token in enumerate(ids):
        if token < 0 or (limits is not None and token >= limits.vocab_size):
            allowed = (
                "from 0 on" if limits is None else f"0 to {limits.vocab_size - 1}, the model's vocabulary"
            )
            raise _refused(request, f"{field}[{place}] is {token}; token ids {allowed}, are possible")


def _refused(request: SequenceRequest, reason: str) -> RequestRejectedError:
    return RequestRejectedError(f"request {request.rid}: {reason}")
