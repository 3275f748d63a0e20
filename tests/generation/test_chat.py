"""Chats: the client's body and answer, and variables of the template on the emulator's side."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pytest_quantguard.emulator.openai_protocol import chat_token_ids
from pytest_quantguard.emulator.protocol import HttpError
from pytest_quantguard.emulator.tokenizer import TextTokenizer
from pytest_quantguard.errors import InvalidAnswerError
from pytest_quantguard.serving.answers import ChatRequest
from pytest_quantguard.serving.chat import chat_body, read_chat_answer

TINY = Path(__file__).parents[1] / "data" / "models" / "bf16-tiny"
REQUEST = ChatRequest(({"role": "user", "content": "Hi"},), max_new_tokens=5, rid="r")


def answer(**changes: Any) -> dict[str, Any]:
    choice = {"message": {"content": "Hello"}, "finish_reason": "stop"}
    return {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}, **changes}


def test_an_answer_is_read() -> None:
    read = read_chat_answer(answer(), REQUEST)
    assert (read.text, read.finish_reason, read.prompt_tokens, read.completion_tokens) == (
        "Hello",
        "stop",
        3,
        2,
    )


@pytest.mark.parametrize(
    "bad",
    [
        {},
        [],
        "no",
        answer(choices=[]),
        answer(usage=None),
        answer(usage={"prompt_tokens": None, "completion_tokens": 2}),
        answer(choices=[{"finish_reason": "stop"}]),
    ],
)
def test_what_is_no_answer(bad: Any) -> None:
    with pytest.raises(InvalidAnswerError, match=r"answered without choices\[0\]\.message or usage"):
        read_chat_answer(bad, REQUEST)


def test_more_tokens_than_asked() -> None:
    with pytest.raises(InvalidAnswerError, match="asked for 5 new tokens at most, got 6"):
        read_chat_answer(answer(usage={"prompt_tokens": 3, "completion_tokens": 6}), REQUEST)


def test_variables_are_sent_only_where_there_are_any() -> None:
    assert "chat_template_kwargs" not in chat_body(REQUEST)


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    """One whose template says what it is told."""
    shutil.copy(TINY / "tokenizer.json", tmp_path / "tokenizer.json")
    template = "{{ messages[0]['content'] }} {{ mood }}{% if tools %} tools{% endif %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")
    return TextTokenizer(tmp_path)


def test_the_emulator_heeds_template_variables(tokenizer: TextTokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"mood": "glad"}}
    assert tokenizer.decode(chat_token_ids(body, tokenizer)) == "Hi glad"


def test_the_emulator_refuses_variables_that_are_none(tokenizer: TextTokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": "glad"}
    with pytest.raises(HttpError, match="chat_template_kwargs must be an object"):
        chat_token_ids(body, tokenizer)
