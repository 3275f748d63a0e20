"""Answers that never end, trickle, or are far too large: a sentence in time, whatever part of them it is."""

from __future__ import annotations

import gzip
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pytest_quantguard.errors import InvalidAnswerError, ServerError
from pytest_quantguard.serving import transport
from pytest_quantguard.serving.answers import ChatRequest, GenerateRequest
from pytest_quantguard.serving.client import Client
from pytest_quantguard.serving.payload import longest_answer
from pytest_quantguard.serving.transport import NoAnswerInTimeError, Transport

PROMPT = GenerateRequest((1, 2, 3), max_new_tokens=2)
SECONDS = 0.1
PATIENCE = 20.0
"""Seconds after which a server of these tests gives up, so that a client that waits on fails its test."""

Speak = Callable[[socket.socket], None]


@contextmanager
def listening(speak: Speak, *, reads: bool = True) -> Iterator[str]:
    """A server that reads a request's head and then speaks as it likes, on any number of connections."""

    def converse(connection: socket.socket) -> None:
        with connection:
            try:
                if reads:
                    _read_request(connection)
                speak(connection)
            except OSError:
                pass  # the client has gone

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=converse, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def _read_request(connection: socket.socket) -> None:
    head, _, rest = b"", b"", b""
    while b"\r\n\r\n" not in head:
        head += connection.recv(65536)
    head, _, rest = head.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")), 0)
    while len(rest) < length:
        rest += connection.recv(65536)


def trickling(begin: bytes, again: bytes) -> Speak:
    """Sends `begin`, then a byte of `again` now and then."""

    def speak(connection: socket.socket) -> None:
        connection.sendall(begin)
        until = time.monotonic() + PATIENCE
        for byte in itertools.cycle(again):
            if time.monotonic() > until:
                return
            connection.sendall(bytes([byte]))
            time.sleep(0.01)

    return speak


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
TRICKLES = {
    "status line": (b"", b"HTTP/1.1 200 OKOK"),
    "a field of the head": (OK, b"X: y"),
    "fields of the head": (OK, b"X: y\r\n"),
    "1xx without end": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "body of a length": (OK + b"Content-Length: 100000\r\n\r\n", b"[ "),
    "body to the end": (OK + b"Connection: close\r\n\r\n", b"[ "),
    "size of a chunk": (CHUNKED, b"0"),
    "a chunk": (CHUNKED + b"ffff\r\n", b"[ "),
    "chunks": (CHUNKED, b"1\r\n \r\n"),
    "trailers": (CHUNKED + b"2\r\n[]\r\n0\r\n", b"X: y\r\n"),
    "text of an error": (b"HTTP/1.1 500 No\r\nContent-Length: 100000\r\n\r\n", b"no "),
}


@pytest.mark.parametrize("part", TRICKLES)
def test_an_answer_that_trickles_ends_with_the_request(part: str) -> None:
    with listening(trickling(*TRICKLES[part])) as url:
        client = Client(url, vocab_size=100, context_length=100, request_timeout=SECONDS)
        with client, pytest.raises(NoAnswerInTimeError, match=r"no whole answer .* within 0.1 s"):
            client.generate([PROMPT], top_logprobs=2)


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.chat(ChatRequest(({"role": "user", "content": "a"},), 4, "r")),
        lambda client: client.abort("r"),
        lambda client: client.flush_cache(),
        lambda client: client.tokenize("a"),
        lambda client: client.detokenize([1]),
        lambda client: client.transport.get("/server_info"),
    ],
    ids=["chat", "abort", "flush_cache", "tokenize", "detokenize", "get"],
)
def test_every_route_has_the_deadline(ask: Callable[[Client], Any]) -> None:
    with listening(trickling(*TRICKLES["fields of the head"])) as url:
        client = Client(url, vocab_size=100, context_length=100, request_timeout=SECONDS)
        with client, pytest.raises(NoAnswerInTimeError):
            ask(client)


@pytest.mark.parametrize("part", ["status line", "body to the end"])
def test_a_probe_ends_too(part: str) -> None:
    with listening(trickling(*TRICKLES[part])) as url:
        assert Transport(url).probe("/health", timeout=SECONDS) is None


def test_a_server_that_hardly_reads_ends_with_the_request() -> None:
    def sip(connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        until = time.monotonic() + PATIENCE
        while connection.recv(1024) and time.monotonic() < until:
            time.sleep(0.01)

    with listening(sip, reads=False) as url:
        client = Client(url, request_timeout=SECONDS)
        with client, pytest.raises(NoAnswerInTimeError):
            client.tokenize("a" * 50_000_000)


def test_each_request_has_its_own_time() -> None:
    """A deadline of the past must not end a later request."""
    turns = itertools.count()

    def speak(connection: socket.socket) -> None:
        if next(turns) == 0:
            trickling(*TRICKLES["a chunk"])(connection)
        while True:
            connection.sendall(OK + b"Content-Length: 2\r\n\r\n{}")
            _read_request(connection)

    with listening(speak) as url:
        asked = Transport(url, request_timeout=60)
        with pytest.raises(NoAnswerInTimeError):
            asked.post("/a", {}, what="a", timeout=SECONDS)
        assert asked.post("/a", {}, what="a") == b"{}"
        assert asked.get("/a") == b"{}"
        asked.close()


def sending(head: bytes, part: bytes) -> Speak:
    """Sends `head`, then `part` without end."""

    def speak(connection: socket.socket) -> None:
        connection.sendall(head)
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            connection.sendall(part)

    return speak


PART = b" " * 65536
FLOODS = {
    "announced": sending(OK + b"Content-Length: 1000000000000\r\n\r\n", PART),
    "announced beyond any number": sending(OK + b"Content-Length: " + b"9" * 400 + b"\r\n\r\n", PART),
    "chunked": sending(CHUNKED, b"10000\r\n" + PART + b"\r\n"),
    "chunked and announced": sending(
        OK + b"Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + PART + b"\r\n"
    ),
    "to the end": sending(OK + b"Connection: close\r\n\r\n", PART),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_an_answer_without_end_is_cut(kind: str) -> None:
    with listening(FLOODS[kind]) as url:
        client = Client(url, vocab_size=100, context_length=100, request_timeout=60)
        with client, pytest.raises(InvalidAnswerError, match=r"is too long: at most 1 MB can come of this"):
            client.generate([PROMPT], top_logprobs=2)


@pytest.mark.parametrize("packed", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "nonsense"])
def test_a_packed_answer_is_refused_unread(packed: str) -> None:
    bomb = gzip.compress(gzip.compress(bytes(10_000_000)))
    head = OK + f"Content-Encoding: {packed}\r\nContent-Length: {len(bomb)}\r\n\r\n".encode()
    with listening(lambda connection: connection.sendall(head + bomb)) as url:
        client = Client(url, vocab_size=100, context_length=100, request_timeout=60)
        with client, pytest.raises(InvalidAnswerError, match=r"although 'identity' was asked for"):
            client.generate([PROMPT])


def test_a_packed_probe_is_refused_unread() -> None:
    bomb = gzip.compress(bytes(10_000_000))
    head = OK + f"Content-Encoding: gzip\r\nContent-Length: {len(bomb)}\r\n\r\n".encode()
    with listening(lambda connection: connection.sendall(head + bomb)) as url:
        with pytest.raises(InvalidAnswerError, match=r"GET /health: .* although 'identity' was asked for"):
            Transport(url).probe("/health", timeout=60)
        with pytest.raises(InvalidAnswerError, match=r"GET /server_info: .* although 'identity' was asked"):
            Client(url).probe()


def test_what_a_server_says_of_itself_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "PROBE_BYTES", 100_000)
    with listening(FLOODS["to the end"]) as url:
        answer = Transport(url).probe("/server_info", timeout=60)
        assert answer == (200, b" " * 100_000)
        with pytest.raises(InvalidAnswerError, match=r"GET /server_info: .* is too long"):
            Transport(url).get("/server_info")


@pytest.mark.parametrize(
    "text",
    [json.dumps({"error": {"message": "x" * 5_000_000}}).encode(), b"y" * 5_000_000],
    ids=["json", "text"],
)
def test_an_error_is_told_in_short(text: bytes) -> None:
    head = f"HTTP/1.1 500 No\r\nContent-Length: {len(text)}\r\n\r\n".encode()
    with listening(lambda connection: connection.sendall(head + text)) as url:
        client = Client(url, vocab_size=100, context_length=100)
        with client, pytest.raises(ServerError, match="answered 500") as caught:
            client.generate([PROMPT])
    assert len(str(caught.value)) < 3000
    long = json.dumps({"error": {"message": "x" * 100_000}}).encode()
    assert transport.error_text(long) == "x" * transport.SHOWN_ERROR


@pytest.mark.parametrize("kind", FLOODS)
def test_a_chat_answer_without_end_is_cut(kind: str) -> None:
    with listening(FLOODS[kind]) as url:
        client = Client(url, request_timeout=60)
        with (
            client,
            pytest.raises(InvalidAnswerError, match=r"/v1/chat/completions .* is too long: at most 1 MB"),
        ):
            client.chat(ChatRequest(({"role": "user", "content": "a"},), 4, "r"))


def test_no_real_answer_is_too_long() -> None:
    """The nested form with every value at its longest, and the text of each token."""
    entry = json.dumps([-1.2345678901234567e-308, 2147483647, "\U0001f600 " * 2])
    for rows, steps, top in [(128, 0, 256), (0, 128, 256), (1, 1, 1), (500, 500, 20), (0, 4096, 0)]:
        request = GenerateRequest(tuple(range(1, rows + 10)), steps, 9 if rows else None)
        batch = [request] * 32
        longest = 32 * (rows + steps) * (top + 1) * (len(entry) + 2)
        assert longest < longest_answer(batch, top_logprobs=top)
        assert longest_answer(batch, top_logprobs=top) < 20 * longest + 5_000_000
