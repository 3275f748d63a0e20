"""Clients that send rubbish, too much, too slowly, or go away: refused, and the others are served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pytest_quantguard.emulator import bounded_http, http_io
from pytest_quantguard.emulator.protocol import HttpError

from .processes import TINY, Emulator, emulator
from .test_faults_over_http import fault
from .test_routes import metrics

PROMPT = [54, 74, 71, 278]
LINGERING = "slow_step:share=20"
"""Makes long answers last, so that a test meets them while they run."""


@pytest.fixture(autouse=True)
def _still_serving(tiny: Emulator) -> Iterator[None]:
    """Whatever a test did, the server answers afterwards."""
    yield
    assert tiny.get("/health_generate").status_code == 200


def raw(server: Emulator, body: bytes) -> Any:
    return server.request("POST", "/generate", data=body, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe{}",
        b'{"text": "\xc3\x28"}',
        b'{"text": "\\ud800"}',
        b"nan",
        b'{"input_ids": [5], "sampling_params": {"temperature": NaN}}',
        b'{"input_ids": [5], "sampling_params": {"temperature": Infinity}}',
        b'{"input_ids": [5]} trailing',
        b"[" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'"' + b"a" * 1_000_000 + b'"',
        b"5" * 100_000,
    ],
    ids=[
        "empty",
        "bom",
        "utf8",
        "surrogate",
        "nan",
        "nan-field",
        "inf-field",
        "trailing",
        "open",
        "deep",
        "long",
        "number",
    ],
)
def test_rubbish_is_a_400(tiny: Emulator, body: bytes) -> None:
    response = raw(tiny, body)
    assert response.status_code == 400
    assert response.json()["object"] == "error"


def test_many_prompt_ids_are_refused_quickly(tiny: Emulator) -> None:
    response = raw(tiny, json.dumps({"input_ids": [5] * 2_000_000}).encode())
    assert response.status_code == 400
    assert "2000000 tokens" in response.json()["error"]["message"]


def test_a_body_that_declares_too_much_is_refused_unread(tiny: Emulator) -> None:
    with connection(tiny) as client:
        client.sendall(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000000\r\n\r\n" + b"x" * 1000
        )
        assert client.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_grows_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_io, "MAX_BODY_BYTES", 10)
    assert body_error([b"12345", b"67890", b"1"]).status == 413


def test_a_body_that_stops_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_io, "BODY_SECONDS", 0.01)
    assert body_error([b"12345"]).status == 408


def body_error(chunks: list[bytes]) -> HttpError:
    """What reading a body in these parts, then nothing, raises."""
    from starlette.requests import Request

    async def receive() -> dict[str, Any]:
        if not chunks:
            await asyncio.sleep(3600)
        return {"type": "http.request", "body": chunks.pop(0), "more_body": True}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    with pytest.raises(HttpError) as caught:
        asyncio.run(http_io.read_body(Request(scope, receive)))
    return caught.value


@contextlib.contextmanager
def connection(server: Emulator) -> Iterator[socket.socket]:
    """A plain TCP connection to the server."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        yield client


def test_half_requests_do_not_stop_the_others(tiny: Emulator) -> None:
    with contextlib.ExitStack() as stack:
        for part in (b"", b"P", b"POST /generate HTTP/1.1\r\nHost: x\r\n") * 40:
            client = stack.enter_context(connection(tiny))
            client.sendall(part)
        for _ in range(20):
            client = stack.enter_context(connection(tiny))
            client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert tiny.generate({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}})


def test_a_connection_that_sends_no_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit on the head, in an event loop of the test's own."""
    import uvicorn

    monkeypatch.setattr(bounded_http, "HEAD_SECONDS", 0.05)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        del scope, receive, send
        raise AssertionError("no request was sent")

    async def run() -> bytes:
        config = uvicorn.Config(application, log_config=None, lifespan="off", interface="asgi3")
        config.load()
        state = uvicorn.server.ServerState()
        server = await asyncio.get_running_loop().create_server(
            lambda: bounded_http.BoundedHttpProtocol(config=config, server_state=state, app_state={}),
            "127.0.0.1",
            0,
        )
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"GET / HTTP/1.1\r\nHost: ")
            answer = await asyncio.wait_for(reader.read(), 30)
            writer.close()
        return answer

    assert asyncio.run(run()) == b""


@pytest.mark.parametrize("line", [b"\x16\x03\x01\x02\x00\x01\x00", b"GARBAGE", b"GET  / HTTP/1.1"])
def test_what_is_no_http_is_answered_400(tiny: Emulator, line: bytes) -> None:
    with connection(tiny) as client:
        client.sendall(line + b"\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_many_requests_at_once_are_all_answered(tiny: Emulator) -> None:
    def ask(number: int) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": 1 + number % 5, "ignore_eos": True}
        return tiny.generate({"input_ids": [5 + number % 7, 9, 11], "sampling_params": sampling})[
            "output_ids"
        ]

    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(ask, range(200)))
    assert [len(ids) for ids in answers] == [1 + number % 5 for number in range(200)]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_client_that_goes_away_ends_its_request(tiny: Emulator, streamed: bool) -> None:
    before = metrics(tiny)["sglang:num_aborted_requests_total"]
    sampling = {"temperature": 0, "max_new_tokens": 500, "ignore_eos": True}
    body = json.dumps({"input_ids": [PROMPT] * 24, "sampling_params": sampling, "stream": streamed}).encode()
    with fault(tiny, LINGERING), connection(tiny) as client:
        client.sendall(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        wait_for(lambda: metrics(tiny)["sglang:num_running_reqs"] == 24)
        client.close()
    wait_for(lambda: metrics(tiny)["sglang:num_running_reqs"] == 0)
    assert metrics(tiny)["sglang:num_aborted_requests_total"] == before + 24


def wait_for(condition: Any) -> None:
    """Poll until it holds; fail after a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_request_is_aborted_by_its_id(tiny: Emulator) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 500, "ignore_eos": True}
    body = {"input_ids": [PROMPT] * 8, "sampling_params": sampling, "rid": "long"}
    with fault(tiny, LINGERING), ThreadPoolExecutor(1) as pool:
        answers = pool.submit(tiny.generate, body)
        wait_for(lambda: metrics(tiny)["sglang:num_running_reqs"] == 8)
        assert tiny.post("/flush_cache").status_code == 400
        refused = tiny.post("/generate", {"input_ids": PROMPT, "rid": "long_3"})
        assert refused.status_code == 400
        assert "Duplicate request ID detected: long_3" in refused.text
        assert tiny.post("/abort_request", {"rid": "other"}).status_code == 200
        assert tiny.post("/abort_request", {"rid": "long"}).status_code == 200
        reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in answers.result()]
    assert reasons == ["abort"] * 8


@pytest.mark.parametrize("body", [[], {"rid": 3}])
def test_abort_requests_are_checked(tiny: Emulator, body: Any) -> None:
    assert tiny.post("/abort_request", body).status_code == 400


def test_sigterm_ends_running_requests_and_the_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The context manager sends SIGTERM and asserts the exit status 0."""
    log = tmp_path_factory.mktemp("stop") / "server.log"
    sampling = {"temperature": 0, "max_new_tokens": 500, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        with emulator(log, TINY, "--fault", LINGERING) as server:
            wait_for(lambda: server.get("/health").status_code == 200)
            body = {"input_ids": [PROMPT] * 48, "sampling_params": sampling}
            pending = pool.submit(server.post, "/generate", body)
            wait_for(lambda: metrics(server)["sglang:num_running_reqs"] > 0)
        assert pending.result().status_code == 200
    assert "SIGTERM received" in log.read_text(encoding="utf-8")
