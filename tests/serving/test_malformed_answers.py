"""Answers with anything in the place of anything: one that holds, or an InvalidAnswerError, no traceback."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from pytest_quantguard.errors import InvalidAnswerError
from pytest_quantguard.serving.answers import Answer, ChatRequest
from pytest_quantguard.serving.chat import read_chat_answer
from pytest_quantguard.serving.client import Client
from pytest_quantguard.serving.reading import read_answers, split_answers
from tests.serving.samples import VOCAB_SIZE, body_of, requests_of, sample
from tests.serving.scripted import ScriptedServer, as_json

SAMPLES = ("gen_ids_lp_start5_top5", "gen_ids_lp_default", "flat_b64_batch", "flat_lists", "flat_max0")
WEIRD = [
    None, True, -1, 0, 2**31, 2**63 - 1, 10**30, 0.5, 1e300, -1e300, -3.4e38, "", "abc", "5", [], [[]],
    [None], [1, 2, 3], [[None, 1, None]], [["a", "b"]], {}, {"a": 1}, {"0": [1]},
]  # fmt: skip


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place of a JSON value; of long lists the first two and the last."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for index in sorted({0, 1, len(value) - 1} & set(range(len(value)))):
            yield from places(value[index], (*path, index))


def changed(value: Any, path: tuple[str | int, ...], to: Any) -> Any:
    """A copy with another value in one place; without that place, where `to` is ...."""
    if not path:
        return to
    whole = copy.deepcopy(value)
    at = whole
    for step in path[:-1]:
        at = at[step]
    if to is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = to
    return whole


@pytest.mark.parametrize("name", SAMPLES)
def test_generate(name: str) -> None:
    recorded = sample(name)
    requests, top = requests_of(recorded), recorded["request"]["body"].get("top_logprobs_num", 0)
    answer = json.loads(body_of(recorded))
    draw = random.Random(name)
    kept = longest = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in dict.fromkeys(places(answer)):
            for to in draw.sample([*WEIRD, ...], 4):
                if to is ... and not path:
                    continue
                body = json.dumps(changed(answer, path, to)).encode()
                try:
                    found = read_answers(
                        split_answers(body, requests), requests, top_logprobs=top, vocab_size=VOCAB_SIZE
                    )
                except InvalidAnswerError as error:
                    longest = max(longest, len(str(error)))
                else:
                    kept += 1
                    assert all(map(_is_plain, found)), path
    assert longest < 1000
    assert kept, "some places do not matter, such as e2e_latency"


def _is_plain(answer: Answer) -> bool:
    counts = (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens, *answer.output_ids)
    return all(type(count) is int and 0 <= count < 1 << 31 for count in counts)


def test_chat() -> None:
    request = ChatRequest(({"role": "user", "content": "a"},), 8, "r")
    answer = {
        "choices": [{"message": {"content": "b"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
    assert read_chat_answer(answer, request).completion_tokens == 2
    for path in places(answer):
        for to in WEIRD:
            try:
                found = read_chat_answer(changed(answer, path, to), request)
            except InvalidAnswerError:
                continue
            assert 0 <= found.completion_tokens <= 8
            assert 0 <= found.prompt_tokens < 1 << 31


@pytest.mark.parametrize("to", WEIRD, ids=repr)
def test_tokenizer_routes(to: Any) -> None:
    for route, key in (("tokenize", "tokens"), ("detokenize", "text")):
        for answer in ({key: to}, {key: [to]}):
            reply = as_json(answer)
            with ScriptedServer(lambda _, reply=reply: reply) as server, Client(server.url) as client:
                try:
                    found = client.tokenize("a") if route == "tokenize" else client.detokenize([1])
                except InvalidAnswerError:
                    continue
                assert isinstance(found, str) or all(type(token) is int and token >= 0 for token in found)
