"""The body of POST /v1/chat/completions and its answer, in OpenAI's form. No I/O."""

from __future__ import annotations

from typing import Any

from pytest_quantguard.errors import InvalidAnswerError
from pytest_quantguard.serving.answers import ChatAnswer, ChatRequest
from pytest_quantguard.serving.reading import is_count


def chat_body(request: ChatRequest) -> dict[str, Any]:
    """Greedy, not streamed. `rid` and `chat_template_kwargs` are SGLang's additions."""
    body: dict[str, Any] = {
        "model": "default",
        "messages": [dict(message) for message in request.messages],
        "temperature": 0,
        "max_tokens": request.max_new_tokens,
        "stream": False,
        "rid": request.rid,
    }
    if request.template_variables:
        body["chat_template_kwargs"] = dict(request.template_variables)
    return body


def read_chat_answer(value: Any, request: ChatRequest) -> ChatAnswer:
    """Raises InvalidAnswerError where choices or usage are missing, or more tokens came than were asked."""
    try:
        choice, usage = value["choices"][0], value["usage"]
        content = choice["message"]["content"]
        answer = ChatAnswer(
            text="" if content is None else str(content),
            finish_reason=str(choice["finish_reason"]),
            prompt_tokens=_count(usage["prompt_tokens"]),
            completion_tokens=_count(usage["completion_tokens"]),
        )
    except (LookupError, TypeError, ValueError) as error:
        raise InvalidAnswerError(
            f"/v1/chat/completions answered without choices[0].message or usage: {str(value)[:200]}"
        ) from error
    if answer.completion_tokens > request.max_new_tokens:
        raise InvalidAnswerError(
            f"/v1/chat/completions: asked for {request.max_new_tokens} new tokens at most, got "
            f"{answer.completion_tokens}"
        )
    return answer


def _count(value: Any) -> int:
    """A number of tokens; ValueError for anything else."""
    if not is_count(value):
        raise ValueError(f"{value!r} is no number of tokens")
    return int(value)
