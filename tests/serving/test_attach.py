"""Attaching to a server that runs already: identity, replicas, another model later."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_quantguard.config import AttachExpectation, AttachServer
from pytest_quantguard.errors import RequestRejectedError, ServerDiedError, ServerError, ServerStartError
from pytest_quantguard.serving import attach as waiting
from pytest_quantguard.serving.launch import start
from tests.serving.scripted import Call, Reply, ScriptedServer, as_json

INFO = {
    "version": "0.5.23",
    "model_path": "org/model",
    "quantization": "modelopt_fp4",
    "kv_cache_dtype": "fp8_e4m3",
    "random_seed": 1,
    "vocab_size": 100,
}


def server_of(info: Any = None, **routes: Any) -> Any:
    """Answers like a server; `info` is /server_info or a function that makes it."""

    def respond(call: Call) -> Reply:
        if call.path in routes:
            status, value = routes[call.path]
            return as_json(value, status)
        if call.path in ("/health_generate", "/health"):
            return as_json({})
        if call.path == "/server_info":
            return as_json(info() if callable(info) else info or INFO)
        if call.path == "/generate":
            entries = [[None, 1, None], *([-1.0, token, None] for token in (2, 3, 4))]
            meta = {"finish_reason": {"type": "length"}, "prompt_tokens": 4, "input_token_logprobs": entries}
            return as_json([{"text": "", "output_ids": [], "meta_info": meta}])
        return as_json({"detail": "Not Found"}, 404)

    return respond


def attach(url: str, **options: Any) -> Any:
    return start(AttachServer(backend="attach", url=url, **options), log_path=Path("unused"))


def test_an_expected_server_is_used_and_left_alone() -> None:
    expect = AttachExpectation(model_path="org/model", quantization="modelopt_fp4", kv_cache_dtype="fp8_e4m3")
    with ScriptedServer(server_of()) as server:
        with attach(server.url, expect=expect) as attached:
            assert attached.capabilities.quantization == "modelopt_fp4"
            assert attached.notes == ()
            attached.check_alive()
        assert all(call.method == "GET" or call.path == "/generate" for call in server.calls)


def test_another_server_is_refused_with_a_table() -> None:
    expect = AttachExpectation(model_path="org/other", kv_cache_dtype="auto")
    with ScriptedServer(server_of()) as server, pytest.raises(ServerStartError) as caught:
        attach(server.url, expect=expect)
    lines = str(caught.value).splitlines()
    assert "is not the one that `expect` describes" in lines[0]
    assert lines[2].split() == ["model_path", "'org/other'", "'org/model'"]
    assert lines[3].split() == ["kv_cache_dtype", "'auto'", "'fp8_e4m3'"]


def test_a_router_without_health_generate() -> None:
    routes = {"/health_generate": (404, {"detail": "Not Found"})}
    with ScriptedServer(server_of(**routes)) as server, attach(server.url) as attached:
        attached.check_alive()


def test_replicas_of_one_model_are_noted() -> None:
    seeds = iter(range(1000))
    respond = server_of(lambda: INFO | {"random_seed": next(seeds) % 3})
    with ScriptedServer(respond) as server, attach(server.url) as attached:
        assert "3 replicas answer at" in attached.notes[0]


def test_replicas_that_differ_are_refused() -> None:
    count = iter(range(1000))
    models = ("org/model", "org/model-fp8")
    with (
        ScriptedServer(server_of(lambda: INFO | {"model_path": models[next(count) % 2]})) as server,
        pytest.raises(ServerStartError, match=r"several servers answer .*org/model'.*org/model-fp8"),
    ):
        attach(server.url)


def test_differing_answers_are_noted() -> None:
    count = iter(range(1000))

    def respond(call: Call) -> Reply:
        reply = server_of()(call)
        if call.path == "/generate" and next(count) % 2 and reply is not None:
            return reply[0], reply[1].replace(b"-1.0", b"-1.25")
        return reply

    with ScriptedServer(respond) as server, attach(server.url) as attached:
        assert "6 equal requests to" in attached.notes[0]
        assert "got 2 different answers" in attached.notes[0]


def test_another_model_after_a_restart_is_noticed() -> None:
    info = dict(INFO)
    with ScriptedServer(server_of(lambda: info)) as server, attach(server.url) as attached:
        attached.check_alive()
        info["model_path"] = "org/newer"
        with pytest.raises(ServerDiedError, match=r"model_path was 'org/model', is 'org/newer'"):
            attached.check_alive()


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for a server goes by a clock that waiting moves on."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(waiting, "time", clock)


@pytest.mark.usefixtures("_soon")
def test_nothing_there() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(
            ServerStartError, match=r"no server is ready at .* after 20 s .*nothing listens there"
        ):
            attach(url, startup_timeout=20)


@pytest.mark.usefixtures("_soon")
def test_not_ready() -> None:
    routes = {"/health_generate": (503, {"error": "loading"})}
    with (
        ScriptedServer(server_of(**routes)) as server,
        pytest.raises(ServerStartError, match=r"after 20 s .*: /health_generate answered 503: loading"),
    ):
        attach(server.url, startup_timeout=20)


def test_a_missing_key_is_said_at_once() -> None:
    routes = {"/health_generate": (401, {"error": "Unauthorized"})}
    with (
        ScriptedServer(server_of(**routes)) as server,
        pytest.raises(RequestRejectedError, match="wants an API key and none was sent; set api_key"),
    ):
        attach(server.url)


@pytest.mark.parametrize("unit", [b" ", b"x" * (1 << 16)])
@pytest.mark.parametrize("head", [b"", b"Content-Length: 1000000000\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_a_server_whose_answers_do_not_end_is_given_up(unit: bytes, head: bytes) -> None:
    """It trickles, or it floods: the client ends, which this test would not do otherwise."""
    part = unit if b"chunked" not in head else b"%x\r\n%b\r\n" % (len(unit), unit)
    beginning, pause = b"HTTP/1.1 200 OK\r\n" + head + b"\r\n", 0.02 if unit == b" " else 0.0
    with endless(beginning, part, pause) as url, pytest.raises(ServerError):
        attach(url, startup_timeout=1, request_timeout=1)


@contextmanager
def endless(head: bytes, part: bytes, pause: float) -> Iterator[str]:
    """A server that writes `head` and then `part` for ever to everyone."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            with suppress(OSError):
                self.request.sendall(head)
                while not stopped.wait(pause):
                    self.request.sendall(part)

    stopped = threading.Event()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            stopped.set()
            server.shutdown()
