"""OpenAI's completion and chat requests as `/generate` bodies, and `/generate` answers as OpenAI's.

As in SGLang these routes are a translation: what they mean is decided in protocol.py. No HTTP here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pytest_quantguard.emulator.dispatch import Outcome
from pytest_quantguard.emulator.protocol import HttpError
from pytest_quantguard.emulator.tokenizer import TextTokenizer
from pytest_quantguard.errors import RequestRejectedError

Json = Any

SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "stop_regex",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "json_schema", "regex",
    "ebnf", "ignore_eos",
    "skip_special_tokens", "no_stop_trim",
)  # fmt: skip
REFUSED = ("tools", "functions", "custom_logit_processor", "lora_path", "suffix", "best_of")
WEIGHT_VERSION = "default"
DEFAULT_MODEL = "default"


def openai_error(message: str, status: int = 400) -> HttpError:
    """The error shape of the /v1 routes."""
    kind = "BadRequestError" if status == 400 else "Error"
    body = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return HttpError(status, body, message)


def completion_to_generate(body: Json) -> dict[str, Json]:
    """The `/generate` body of a `/v1/completions` request. Raises HttpError."""
    check_object(body)
    prompt = body.get("prompt")
    if not prompt or not isinstance(prompt, str | list):
        raise openai_error("Prompt cannot be empty")
    kind = "text" if isinstance(prompt, str) or isinstance(prompt[0], str) else "input_ids"
    logprobs = body.get("logprobs")
    return {
        kind: prompt,
        "sampling_params": sampling_of(body, body.get("max_tokens", 16)),
        "return_logprob": logprobs is not None,
        "top_logprobs_num": logprobs,
        "logprob_start_len": 0 if body.get("echo") and logprobs else -1,
        "return_text_in_logprobs": True,
        "stream": body.get("stream"),
        "rid": body.get("rid"),
    }


def chat_to_generate(body: Json, tokenizer: TextTokenizer) -> dict[str, Json]:
    """The `/generate` body of a `/v1/chat/completions` request. Raises HttpError."""
    check_object(body)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    logprobs = bool(body.get("logprobs"))
    return {
        "input_ids": chat_token_ids(body, tokenizer),
        "sampling_params": sampling_of(body, limit),
        "return_logprob": logprobs,
        "top_logprobs_num": body.get("top_logprobs") if logprobs else None,
        "logprob_start_len": -1,
        "return_text_in_logprobs": True,
        "stream": body.get("stream"),
        "rid": body.get("rid"),
    }


def chat_token_ids(body: Mapping[str, Json], tokenizer: TextTokenizer) -> list[int]:
    """The messages through the chat template, as token ids. Raises HttpError."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise openai_error("Messages cannot be empty.")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise openai_error("Every message must be an object with a role.")
    try:
        text = tokenizer.render_chat(
            [{**message, "content": content_text(message)} for message in messages], template_variables(body)
        )
    except RequestRejectedError as error:
        raise openai_error(str(error)) from error
    return tokenizer.encode(text, add_special_tokens=False)


def template_variables(body: Mapping[str, Json]) -> Mapping[str, Json]:
    """`chat_template_kwargs`, SGLang's addition. Raises HttpError."""
    variables = body.get("chat_template_kwargs")
    if variables is not None and not isinstance(variables, dict):
        raise openai_error("chat_template_kwargs must be an object.")
    return variables or {}


def content_text(message: Mapping[str, Json]) -> str:
    """A message's content, given as a string or as text parts."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        return "".join(str(part.get("text", "")) for part in content)
    raise openai_error("Only text content is supported by the emulator.")


def check_object(body: Json) -> None:
    """HttpError for a body that is no object, or that asks for what the emulator does not have."""
    if not isinstance(body, dict):
        raise openai_error("The request body must be a JSON object.")
    for name in REFUSED:
        if body.get(name):
            raise openai_error(f"{name} is not supported by the emulator.")
    response_format = body.get("response_format")
    if response_format is not None and response_format != {"type": "text"}:
        raise openai_error("response_format other than text is not supported by the emulator.")
    if body.get("stream") and body.get("logprobs"):
        raise openai_error(
            "logprobs of a streamed completion are not supported by the emulator; use /generate."
        )


def sampling_of(body: Mapping[str, Json], limit: Json) -> dict[str, Json]:
    """OpenAI's sampling fields under SGLang's names."""
    sampling = {name: body[name] for name in SAME_NAME if body.get(name) is not None}
    if body.get("seed") is not None:
        sampling["sampling_seed"] = body["seed"]
    if body.get("min_tokens"):
        sampling["min_new_tokens"] = body["min_tokens"]
    return {**sampling, "max_new_tokens": limit}


def completion_answer(
    body: Mapping[str, Json],
    outcomes: list[Outcome],
    answers: list[dict[str, Json]],
    tokenizer: TextTokenizer,
) -> dict[str, Json]:
    """The answer of `/v1/completions`; `answers` are those of `/generate`, with text in their rows."""
    choices = []
    for index, (outcome, answer) in enumerate(zip(outcomes, answers, strict=True)):
        text, meta = answer["text"], answer["meta_info"]
        if body.get("echo"):
            text = echoed(body["prompt"], outcome, tokenizer) + text
        logprobs = None
        if body.get("logprobs") is not None:
            logprobs = completion_logprobs(
                meta, tokenizer, prompt=bool(body.get("echo") and body["logprobs"])
            )
        choices.append({"index": index, "text": text, "logprobs": logprobs, **ending(meta["finish_reason"])})
    return {**envelope("text_completion", body, answers), "choices": choices, **closing(outcomes)}


def echoed(prompt: Json, outcome: Outcome, tokenizer: TextTokenizer) -> str:
    """The prompt as text: as it was sent, or decoded."""
    return prompt if isinstance(prompt, str) else tokenizer.decode(outcome.item.request.input_ids)


def completion_logprobs(
    meta: Mapping[str, Json], tokenizer: TextTokenizer, *, prompt: bool
) -> dict[str, Json]:
    """OpenAI's older layout: parallel lists. A part of a character is written one Latin-1 letter per byte."""

    def name(token_id: int, text: str) -> str:
        return tokenizer.token_bytes(token_id).decode("latin-1") if "\ufffd" in text else text

    sides = ("input", "output") if prompt else ("output",)
    rows = [row for side in sides for row in meta[f"{side}_token_logprobs"]]
    tops = [row for side in sides for row in meta.get(f"{side}_top_logprobs", [])]
    return {
        "text_offset": [-1] * len(rows),
        "token_logprobs": [value for value, _, _ in rows],
        "tokens": [name(token, text) for _, token, text in rows],
        "top_logprobs": [
            None if top is None else {name(token, text): value for value, token, text in top} for top in tops
        ],
    }


def chat_answer(
    body: Mapping[str, Json],
    outcomes: list[Outcome],
    answers: list[dict[str, Json]],
    tokenizer: TextTokenizer,
) -> dict[str, Json]:
    """The answer of `/v1/chat/completions`."""
    choices = []
    for index, answer in enumerate(answers):
        meta = answer["meta_info"]
        message = {"role": "assistant", "content": answer["text"], "reasoning_content": None}
        logprobs = chat_logprobs(meta, tokenizer) if body.get("logprobs") else None
        choices.append(
            {"index": index, "message": message, "logprobs": logprobs, **ending(meta["finish_reason"])}
        )
    return {**envelope("chat.completion", body, answers), "choices": choices, **closing(outcomes)}


def chat_logprobs(meta: Mapping[str, Json], tokenizer: TextTokenizer) -> dict[str, Json]:
    """OpenAI's newer layout: an object per token, with its bytes."""

    def entry(value: float, token_id: int, text: str) -> dict[str, Json]:
        return {"token": text, "bytes": list(tokenizer.token_bytes(token_id)), "logprob": value}

    rows = meta["output_token_logprobs"]
    tops = meta.get("output_top_logprobs") or [[]] * len(rows)
    return {
        "content": [
            {**entry(*row), "top_logprobs": [entry(*cell) for cell in top]}
            for row, top in zip(rows, tops, strict=True)
        ]
    }


def stream_chunks(
    body: Mapping[str, Json], outcome: Outcome, delta: str, *, chat: bool, first: bool
) -> list[dict[str, Json]]:
    """The events for text that is new; in a chat the role and the end have events of their own."""
    end = ending(outcome.result.finish_reason)
    if not chat:
        choice = {"index": outcome.index, "text": delta, "logprobs": None, **end}
        return [{**chunk(body, outcome, chat=False), "choices": [choice], "usage": None}]
    deltas: list[tuple[dict[str, Json], dict[str, Json]]] = []
    if first:
        deltas.append(({"role": "assistant", "content": ""}, ending(None)))
    if delta:
        deltas.append(({"content": delta}, ending(None)))
    if outcome.result.finish_reason is not None:
        deltas.append(({}, end))
    return [
        {
            **chunk(body, outcome, chat=True),
            "choices": [
                {
                    "index": outcome.index,
                    "delta": {"reasoning_content": None, **new},
                    "logprobs": None,
                    **state,
                }
            ],
        }
        for new, state in deltas
    ]


def chunk(body: Mapping[str, Json], outcome: Outcome, *, chat: bool) -> dict[str, Json]:
    """The fields in front of every event."""
    return {
        "id": outcome.result.rid,
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": int(outcome.timing.received),
        "model": body.get("model", DEFAULT_MODEL),
    }


def usage_chunk(body: Mapping[str, Json], outcomes: list[Outcome], *, chat: bool) -> dict[str, Json]:
    """The last event when `stream_options.include_usage` is set."""
    return {**chunk(body, outcomes[0], chat=chat), "choices": [], "usage": usage(outcomes)}


def envelope(kind: str, body: Mapping[str, Json], answers: list[dict[str, Json]]) -> dict[str, Json]:
    """The fields in front of every OpenAI answer."""
    return {
        "id": answers[0]["meta_info"]["id"],
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model", DEFAULT_MODEL),
    }


def closing(outcomes: list[Outcome]) -> dict[str, Json]:
    """The fields behind the choices."""
    steps = len(outcomes[0].result.output_ids)
    versions = [{"version": WEIGHT_VERSION, "start": 0, "end": steps}]
    return {
        "usage": usage(outcomes),
        "metadata": {"weight_version": WEIGHT_VERSION, "weight_versions": versions},
    }


def ending(reason: Mapping[str, Json] | None) -> dict[str, Json]:
    """`finish_reason` and `matched_stop` of a choice."""
    reason = reason or {}
    return {"finish_reason": reason.get("type"), "matched_stop": reason.get("matched")}


def usage(outcomes: list[Outcome]) -> dict[str, Json]:
    """Token counts; a prompt that is sampled several times counts once."""
    samples = outcomes[0].item.sampling.n
    prompt = sum(outcome.result.prompt_tokens for outcome in outcomes[::samples])
    completion = sum(len(outcome.result.output_ids) for outcome in outcomes)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }
