"""The load generator against scripted servers: figures, concurrency, and everything a server can do wrong."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from pytest_quantguard.errors import ConfigError
from pytest_quantguard.measure.load.generator import Round, Target, require_descriptors, run_round
from pytest_quantguard.measure.load.stream import StreamReader
from pytest_quantguard.measure.load.workload import LoadRequest, Workload
from pytest_quantguard.stats.figures import round_figures
from tests.speed.streaming import CLOSE, DONE, Script, asked_tokens, event, serve, whole

FIRST, GAP = 0.05, 0.02


def workload(count: int = 4, tokens: int = 5, offsets: tuple[float, ...] | None = None) -> Workload:
    requests = tuple(LoadRequest((number + 1, 7, 8), tokens) for number in range(count))
    return Workload("test", requests, offsets, True, "digest")


def ask(script: Script, concurrency: int = 4, status: int = 200, **limits: float) -> Round:
    with serve(script, status) as server:
        return run_round(Target(server.url, **limits), workload(), concurrency)


@dataclass
class Noticing:
    """A server that writes a token only when the client has noted the one before, on any machine.

    spans: of each token, when it was about to be written and when the client had noted it.
    """

    spans: list[tuple[float, float]] = field(default_factory=list)
    noted: int = 0

    def feed(self, reader: StreamReader, chunk: bytes, now: float) -> None:
        """In place of StreamReader.feed."""
        before = len(reader.arrivals)
        FEED(reader, chunk, now)
        self.noted += len(reader.arrivals) - before

    async def script(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        tokens = asked_tokens(body)
        for number in range(1, tokens + 1):
            await asyncio.sleep(FIRST if number == 1 else GAP)
            written = time.perf_counter()
            yield event(number, tokens, body)
            while self.noted <= len(self.spans):
                await asyncio.sleep(0.001)
            self.spans.append((written, time.perf_counter()))
        yield DONE


FEED = StreamReader.feed


def test_ttft_itl_and_tpot_are_those_of_a_server_with_known_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token counts from when it came: after it was written, before the next one was."""
    noticing = Noticing()
    monkeypatch.setattr(StreamReader, "feed", lambda *args: noticing.feed(*args))
    with serve(noticing.script) as server:
        done = run_round(Target(server.url), workload(count=6), 1)
    assert done.errors == []
    spans, before = iter(noticing.spans), 0.0
    for timing in done.timings:
        assert before < timing.sent, "a request is sent when the one before has ended"
        assert timing.ttft >= FIRST
        assert timing.e2e_latency >= FIRST + 4 * GAP
        assert [tokens for _, tokens in timing.arrivals] == [1, 2, 3, 4, 5]
        for arrival, _ in timing.arrivals:
            written, before = next(spans)
            assert written < arrival < before
        times = [arrival for arrival, _ in timing.arrivals]
        assert timing.itl == pytest.approx(np.diff(times))
        assert timing.tpot == pytest.approx((times[-1] - times[0]) / 4)
    figures = round_figures(done.timings, done.duration)
    assert figures["median_ttft_ms"] >= 1000 * FIRST
    assert figures["output_throughput"] == pytest.approx(30 / done.duration)
    assert done.duration >= 6 * (FIRST + 4 * GAP)


@pytest.mark.parametrize("level", [1, 3, 64])
def test_concurrency_is_kept_and_reached(level: int) -> None:
    """Each answer waits until as many requests are there as may be, so that none can be missed."""
    target = min(level, 12)

    async def gathered(body: dict[str, Any]) -> AsyncIterator[bytes]:
        while not full.is_set():
            if server.now >= target:
                full.set()
            await asyncio.sleep(0.001)
        async for part in whole(body):
            yield part

    full = asyncio.Event()
    with serve(gathered) as server:
        done = run_round(Target(server.url), workload(count=12), level)
    assert done.errors == []
    assert len(done.timings) == 12
    assert server.most == target


def test_open_loop_keeps_its_times() -> None:
    offsets = (0.0, 0.05, 0.1, 0.15)
    with serve(whole) as server:
        before = time.perf_counter()
        done = run_round(Target(server.url), workload(offsets=offsets), 4)
    for timing, offset in zip(done.timings, offsets, strict=True):
        assert timing.sent - before >= offset - 1e-3, "none is early"
    assert done.duration >= 0.14


def test_the_key_is_sent_and_the_request_is_greedy_and_exact() -> None:
    bodies = []

    def remember(body: dict[str, Any]) -> AsyncIterator[bytes]:
        bodies.append(body)
        return whole(body)

    with serve(remember) as server:
        run_round(Target(server.url, api_key="secret"), workload(), 2)
    assert all("authorization: bearer secret" in head.lower() for head in server.headers)
    sampling = {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True}
    assert all(body["sampling_params"] == sampling and body["stream"] is True for body in bodies)


async def short(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield event(1, 3, body)
    yield event(3, 3, body)
    yield DONE


async def half_way(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield event(2, asked_tokens(body), body)


async def closes(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield event(2, asked_tokens(body), body)
    await asyncio.sleep(0.05)
    yield CLOSE


async def stalls(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield event(2, asked_tokens(body), body)
    await asyncio.sleep(30)


async def reports(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield event(1, asked_tokens(body), body)
    yield b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'
    yield DONE


async def other_prompt(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield event(asked_tokens(body), asked_tokens(body), {"input_ids": [1] * 9})
    yield DONE


async def nonsense(body: dict[str, Any]) -> AsyncIterator[bytes]:
    assert body
    yield b"data: hello\n\n"
    yield DONE


async def nothing_at_all(body: dict[str, Any]) -> AsyncIterator[bytes]:
    assert body
    yield CLOSE


@pytest.mark.parametrize(
    ("script", "limits", "said"),
    [
        (short, {}, "3 of 5 tokens came, finish_reason {'type': 'length', 'length': 3}"),
        (half_way, {}, "the stream ended early, after 2 of 5 tokens"),
        (closes, {}, "the connection closed after 2 of 5 tokens"),
        (stalls, {"stall_timeout": 0.2}, "stalled: no byte came for 0.2 s (speed.stall_timeout)"),
        (partial(whole, first=5.0), {"request_timeout": 0.2}, "not finished within 0.2 s (request_timeout)"),
        (reports, {}, "the server reported: out of memory"),
        (other_prompt, {}, "the server counts 9 prompt tokens, 3 were sent"),
        (nonsense, {}, "0 of 5 tokens came"),
        (nothing_at_all, {}, "the connection closed after 0 of 5 tokens"),
    ],
)
def test_bad_answers_are_counted_with_their_reason(
    script: Script, limits: dict[str, float], said: str
) -> None:
    done = ask(script, **limits)
    assert len(done.errors) == 4
    assert all(said in error for error in done.errors), done.errors
    assert round_figures(done.timings, done.duration) == {"duration": done.duration}


def test_an_error_status_is_counted_with_the_servers_words() -> None:
    async def refuse(body: dict[str, Any]) -> AsyncIterator[bytes]:
        assert body
        yield b'{"error": {"message": "too many requests"}}'

    assert ask(refuse, status=503).errors == ["status 503: too many requests"] * 4


def test_of_an_error_without_end_only_the_beginning_is_read() -> None:
    async def endless(_: dict[str, Any]) -> AsyncIterator[bytes]:
        for _ in range(5000):
            yield b"out of memory " * 1000
        read_to_the_end.append(True)

    read_to_the_end: list[bool] = []
    done = ask(endless, status=500)
    assert [error.startswith("status 500: out of memory") for error in done.errors] == [True] * 4
    assert not read_to_the_end


def test_some_bad_requests_leave_the_figures_of_the_others() -> None:
    def mixed(body: dict[str, Any]) -> AsyncIterator[bytes]:
        return short(body) if body["input_ids"][0] == 2 else whole(body)

    done = ask(mixed)
    assert len(done.errors) == 1
    figures = round_figures(done.timings, done.duration, slo_ms={"ttft": 1e6})
    assert figures["output_throughput"] == pytest.approx(15 / done.duration)
    assert figures["slo_attainment"] == 0.75, "a request that failed met nothing"


def test_nobody_listens() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = run_round(Target(f"http://127.0.0.1:{port}"), workload(), 4)
    assert len(done.errors) == 4
    assert all("Cannot connect to host" in error for error in done.errors)


def test_more_connections_than_file_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    require_descriptors(8)
    with pytest.raises(
        ConfigError, match=r"500 requests at once need about \d+ file descriptors; this process "
    ):
        run_round(Target("http://127.0.0.1:1"), workload(), 500)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    require_descriptors(10**6)


def test_a_long_round_is_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_quantguard.measure.load.generator.BEAT_SECONDS", 0.001)
    lines: list[str] = []

    async def after_a_line(body: dict[str, Any]) -> AsyncIterator[bytes]:
        while not lines:
            await asyncio.sleep(0.001)
        async for part in whole(body):
            yield part

    with serve(after_a_line) as server:
        done = run_round(Target(server.url), workload(count=2), 2, progress=lines.append)
    assert not done.errors
    assert lines[0] == "test, 2 at a time: 0 of 2 answers in 0 s"
