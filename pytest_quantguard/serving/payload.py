"""What may be sent to a server: the checks a batch must pass, and the JSON body that is made of it.

One bad request can end a real server (a token id outside the vocabulary, more top log-probabilities than the
vocabulary has, a `logprob_start_len` of -2). Such a request is refused here and never sent. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_quantguard.errors import RequestRejectedError
from pytest_quantguard.serving.answers import GenerateRequest

ENTRY_BYTES = 128
"""More than a log-probability takes in any form: nested JSON has up to 50 bytes without the token's text."""
TEXT_BYTES = 512
"""More than the text of a token: long runs of blanks or signs, each escaped."""
ANSWER_BYTES = 1 << 20
"""For any answer."""
FURTHER_BYTES = 1 << 16
"""For all of a prompt's answer that grows with no token."""


def check_batch(
    batch: Sequence[GenerateRequest], *, top_logprobs: int, vocab_size: int | None, context_length: int | None
) -> None:
    """Raise RequestRejectedError for a batch that a server would refuse, or die of."""
    if not batch:
        raise RequestRejectedError("refused to send a batch without prompts: at least one is needed")
    if top_logprobs < 0:
        raise RequestRejectedError(
            f"refused to ask for {top_logprobs} top log-probabilities: 0 or more are possible"
        )
    if vocab_size is not None and top_logprobs > vocab_size:
        raise RequestRejectedError(
            f"refused to ask for {top_logprobs} top log-probabilities of a vocabulary of {vocab_size} tokens "
            f"(this ends a real server); set suite.top_logprobs to at most {vocab_size}"
        )
    if len({request.forced_ids is None for request in batch}) > 1:
        raise RequestRejectedError(
            "refused a batch that forces the tokens of some of its prompts and not of others"
        )
    for index, request in enumerate(batch):
        reason = _why_refused(request, vocab_size, context_length)
        if reason is not None:
            raise RequestRejectedError(f"refused to send prompt {index} of a batch of {len(batch)}: {reason}")


def decode_steps(request: GenerateRequest) -> int:
    """How many tokens the server is asked to generate."""
    return len(request.forced_ids) if request.forced_ids is not None else request.max_new_tokens


def wants_logprobs(request: GenerateRequest, top_logprobs: int) -> bool:
    """Whether the request needs any log-probability."""
    return request.logprob_start_len is not None or top_logprobs > 0 or request.forced_ids is not None


def longest_answer(batch: Sequence[GenerateRequest], *, top_logprobs: int) -> int:
    """Bytes beyond which no answer to this can be, in whichever form: some times what SGLang sends."""
    steps = sum(decode_steps(request) for request in batch)
    rows = steps + sum(
        len(request.input_ids) - request.logprob_start_len
        for request in batch
        if request.logprob_start_len is not None
    )
    return len(batch) * FURTHER_BYTES + rows * (top_logprobs + 2) * ENTRY_BYTES + longest_text(steps)


def longest_text(tokens: int) -> int:
    """Bytes of JSON that the text of so many tokens can have."""
    return ANSWER_BYTES + tokens * TEXT_BYTES


def generate_body(batch: Sequence[GenerateRequest], *, top_logprobs: int) -> dict[str, Any]:
    """The body of POST /generate: always a batch, always token ids, always greedy, flat answers preferred.

    Servers that do not know the flat form ignore its flags and answer nested.
    """
    sampling = [
        {"temperature": 0, "max_new_tokens": decode_steps(request), "ignore_eos": request.ignore_eos}
        for request in batch
    ]
    body: dict[str, Any] = {
        "input_ids": [list(request.input_ids) for request in batch],
        "sampling_params": sampling,
        "stream": False,
    }
    if any(request.rid is not None for request in batch):
        body["rid"] = [request.rid for request in batch]
    if not any(wants_logprobs(request, top_logprobs) for request in batch):
        return body
    prompt_side = any(request.logprob_start_len is not None for request in batch)
    output_side = any(decode_steps(request) > 0 for request in batch)
    body |= {
        "return_logprob": True,
        "logprob_start_len": [
            -1 if request.logprob_start_len is None else request.logprob_start_len for request in batch
        ],
        "top_logprobs_num": top_logprobs,
        "return_text_in_logprobs": False,
    }
    if top_logprobs > 0 and (prompt_side or output_side):
        body |= {
            "return_flat_raw_top_logprobs": prompt_side,
            "return_flat_raw_output_top_logprobs": output_side,
            "return_flat_raw_top_logprobs_b64": True,
        }
    return body


def _why_refused(request: GenerateRequest, vocab_size: int | None, context_length: int | None) -> str | None:
    length = len(request.input_ids)
    steps = decode_steps(request)
    start = request.logprob_start_len
    if length == 0:
        return "it has no tokens (an empty prompt ends some servers)"
    if request.max_new_tokens < 0:
        return f"max_new_tokens is {request.max_new_tokens}; 0 or more are possible"
    if request.forced_ids is not None and len(request.forced_ids) == 0:
        return "forced_ids is empty; at least one token must be forced"
    if request.forced_ids is not None and request.max_new_tokens not in (0, steps):
        return f"max_new_tokens is {request.max_new_tokens} but {steps} tokens are to be forced"
    if start is not None and not 0 <= start < length:
        return (
            f"logprob_start_len is {start}, outside 0 .. {length - 1} of its {length} tokens "
            "(one below -1 ends a real server)"
        )
    wrong = _first_outside((*request.input_ids, *(request.forced_ids or ())), vocab_size)
    if wrong is not None:
        size = "unknown size" if vocab_size is None else f"{vocab_size} tokens"
        return f"token id {wrong} is outside the vocabulary of {size} (it ends a real server)"
    if context_length is not None and length + steps > context_length:
        return (
            f"{length} prompt tokens and {steps} new ones exceed the context length of {context_length}; "
            "shorten the prompt (suite.max_prompt_tokens) or suite.score_tokens"
        )
    return None


def _first_outside(token_ids: tuple[int, ...], vocab_size: int | None) -> int | None:
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0:
        return lowest
    return highest if vocab_size is not None and highest >= vocab_size else None
