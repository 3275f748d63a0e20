"""Every answer and error of a real server that we have, read by the client.

Each recorded `/generate` belongs to one group below; a new recording that fits none fails the last test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pytest_quantguard.errors import InvalidAnswerError, RequestRejectedError, ServerDiedError, ServerError
from pytest_quantguard.logprobs.arrays import TopLogprobs
from pytest_quantguard.serving.answers import GenerateRequest
from pytest_quantguard.serving.client import Client
from tests.serving.samples import FOLDER, VOCAB_SIZE, requests_of, sample
from tests.serving.scripted import Call, Reply, ScriptedServer
from tests.serving.test_reading import read

PROMPT = GenerateRequest((6403, 1980, 253), max_new_tokens=2)
DROPPED = -1
"""The recorded status of a request after which the server was gone."""
MASKED = ("tf_hard", "tf_info", "tf_batch8_InfoForce")
"""A processor set all other tokens to -inf before the log-probabilities were computed."""
NEVER_ASKED = {
    "n2": "several answers of one prompt",
    "temp_07": "a temperature",
    "err_text_and_ids": "text beside token ids, and the default temperature",
    "err_top_neg": "a negative number of top log-probabilities",
    "gen_ids_lp_start_badend_26": "a start at the prompt's end",
    "batch8_listparams": "another number of top log-probabilities for each prompt",
    "flat_stream_refused": "a stream with log-probabilities",
}
"""What our client does not send, though a real server answers it."""


def generated() -> list[str]:
    """Names of all recorded /generate requests of token ids."""
    names = []
    for path in sorted(FOLDER.rglob("*.json")):
        recorded = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(recorded, dict) and recorded["request"]["path"] == "/generate":
            names.append(path.relative_to(FOLDER).with_suffix("").as_posix())
    return names


NAMES = generated()
STATUS = {name: sample(name)["status"] for name in NAMES}
FURTHER = {
    entry["name"]: entry
    for entry in json.loads((FOLDER / "more" / "recorded.json").read_text(encoding="utf-8"))
    if entry["request"]["path"] == "/generate"
}


def has_ids(name: str) -> bool:
    body = sample(name)["request"]["body"]
    return isinstance(body, dict) and "input_ids" in body


SCORED = [
    name
    for name in NAMES
    if STATUS[name] == 200 and has_ids(name) and not name.endswith(MASKED) and name not in NEVER_ASKED
]


@pytest.mark.parametrize("name", SCORED)
def test_an_answer_is_read_as_it_stands_in_its_json(name: str) -> None:
    recorded = sample(name)
    answers = read(recorded)
    items = recorded["response"] if isinstance(recorded["response"], list) else [recorded["response"]]
    asked = requests_of(recorded)
    rows = 0
    for answer, item, request in zip(answers, items, asked, strict=True):
        meta = item["meta_info"]
        assert answer.output_ids == tuple(item["output_ids"])
        assert (answer.text, answer.finish_reason) == (item["text"], meta["finish_reason"]["type"])
        assert answer.cached_tokens == meta["cached_tokens"]
        if answer.prompt is not None:
            assert request.logprob_start_len is not None
            predicted = request.input_ids[request.logprob_start_len + 1 :]
            assert tuple(answer.prompt.chosen_ids.tolist()) == predicted
            rows += compare(answer.prompt, meta, "input", skip=1)
        if answer.output is not None:
            assert tuple(answer.output.chosen_ids.tolist()) == answer.output_ids
            rows += compare(answer.output, meta, "output", skip=0)
    top = recorded["request"]["body"].get("top_logprobs_num", 0)
    wanted = any(request.logprob_start_len is not None or top for request in asked)
    assert (rows > 0) == wanted


def compare(rows: TopLogprobs, meta: dict[str, Any], side: str, skip: int) -> int:
    """The arrays of one side with its JSON, entry by entry. Returns the number of rows."""
    own = meta[f"{side}_token_logprobs"][skip:]
    assert rows.chosen_logprobs.tolist() == [float(np.float32(value)) for value, _, _ in own]
    for row, entries in enumerate(meta.get(f"{side}_top_logprobs", [])[skip : skip + len(own)]):
        assert rows.token_ids[row].tolist() == [token for _, token, _ in entries]
        assert rows.logprobs[row].tolist() == [float(np.float32(value)) for value, _, _ in entries]
    return len(own)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(MASKED)])
def test_masked_distributions_are_not_believed(name: str) -> None:
    with pytest.raises(InvalidAnswerError, match="masked-token sentinel"):
        read(sample(name))


FAILED = [name for name in NAMES if STATUS[name] >= 400]
FAILED_FURTHER = [name for name, entry in FURTHER.items() if entry["status"] >= 400]


@pytest.mark.parametrize("name", [*FAILED, *(f"more/{name}" for name in FAILED_FURTHER)])
def test_an_error_is_told_in_the_servers_words(name: str) -> None:
    recorded = FURTHER[name.removeprefix("more/")] if name.startswith("more/") else sample(name)
    status, response = recorded["status"], recorded["response"]
    content = response if isinstance(response, str) else json.dumps(response)
    with pytest.raises(ServerError) as caught:
        ask(lambda _: (status, content.encode()))
    assert isinstance(caught.value, RequestRejectedError)
    assert words_of(response) in str(caught.value)
    assert str(status) in str(caught.value)
    assert "/generate with 1 prompt of 3 tokens" in str(caught.value)


def words_of(response: Any) -> str:
    """What an error body says, in any of the shapes that were recorded."""
    if isinstance(response, str):
        return response
    found = response.get("error") or response.get("message") or response.get("detail")
    return str(found["message"] if isinstance(found, dict) else found)


def ask(respond: Callable[[Call], Reply]) -> None:
    with ScriptedServer(respond) as server, Client(server.url, vocab_size=VOCAB_SIZE) as client:
        client.generate([PROMPT], top_logprobs=5)


FATAL = [name for name in NAMES if STATUS[name] == DROPPED]
FATAL_BY_TEXT = {"crash/err_empty_text"}
FATAL_BY_PROCESSOR = {"tf_err_processor_raises"}


@pytest.mark.parametrize("name", sorted({*FATAL} - FATAL_BY_TEXT - FATAL_BY_PROCESSOR))
def test_a_request_that_ended_a_server_is_not_sent(name: str) -> None:
    recorded = sample(name)
    top = recorded["request"]["body"].get("top_logprobs_num", 0)
    with (
        ScriptedServer(lambda _: None) as server,
        Client(server.url, vocab_size=VOCAB_SIZE, context_length=8192) as client,
    ):
        with pytest.raises(RequestRejectedError):
            client.generate(requests_of(recorded), top_logprobs=top)
        assert server.calls == []


def test_the_connection_that_a_dying_server_drops_is_told_with_the_request() -> None:
    """What the client saw after a processor raised, and after every other fatal request."""
    assert {sample(name)["response"].split("(")[0] for name in FATAL} == {"ConnectionError"}
    with pytest.raises(ServerDiedError, match=r"/generate with 1 prompt of 3 tokens.*dropped the connection"):
        ask(lambda _: None)


def test_every_recording_of_token_ids_belongs_somewhere() -> None:
    read_or_refused = {*SCORED, *FAILED, *FATAL, *NEVER_ASKED}
    rest = [name for name in NAMES if name not in read_or_refused and not name.endswith(MASKED)]
    assert not [name for name in rest if has_ids(name)]
    assert len(SCORED) >= 45
    assert len(FAILED) + len(FAILED_FURTHER) >= 40
    assert len(FATAL) >= 9
