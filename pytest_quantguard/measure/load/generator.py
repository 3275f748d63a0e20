"""Sends a workload to a server and notes when every token comes: closed loop, or open loop with arrivals.

One asyncio task per request in flight, over aiohttp: the client that cost least in the comparison of
docs/speed.md. What goes wrong with a request is part of its timing; nothing here judges it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from pytest_quantguard.errors import ConfigError
from pytest_quantguard.measure.load.stream import StreamError, StreamReader
from pytest_quantguard.measure.load.workload import LoadRequest, Workload
from pytest_quantguard.measure.waiting import BEAT_SECONDS, Progress, duration
from pytest_quantguard.serving.transport import CONNECT_TIMEOUT, IDLE_SECONDS, error_text, is_loopback
from pytest_quantguard.stats.figures import RequestTiming

CHUNK_BYTES = 1 << 20
ERROR_BYTES = 1 << 16
"""So much of an error's text is read; its connection is closed then."""
SPARE_DESCRIPTORS = 64
"""For everything but the load: files, the event loop, connections that close only now."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the load goes.

    request_timeout: most seconds of a whole request. stall_timeout: most seconds without a byte.
    """

    url: str
    api_key: str | None = None
    request_timeout: float = 600.0
    stall_timeout: float = 120.0


@dataclass(frozen=True, slots=True)
class Round:
    """One run of a workload. duration: from the first request sent to the last answer's end, seconds."""

    timings: tuple[RequestTiming, ...]
    duration: float

    @property
    def errors(self) -> list[str]:
        """Why requests failed, one entry for each."""
        return [timing.error for timing in self.timings if timing.error is not None]


def run_round(
    target: Target, workload: Workload, concurrency: int, *, progress: Progress | None = None
) -> Round:
    """Send every request of `workload`, at most `concurrency` at a time, and wait for all answers.

    The garbage collector rests meanwhile. progress: hears now and then how far a long round is. Raises
    ConfigError where the process may not open so many connections.
    """
    require_descriptors(concurrency)
    with _no_collections():
        return asyncio.run(_Load(target, workload, concurrency, progress).run())


def require_descriptors(concurrency: int) -> None:
    """Raise ConfigError unless `concurrency` connections can be open at once."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return
    needed = concurrency + _open_descriptors() + SPARE_DESCRIPTORS
    if needed > allowed:
        raise ConfigError(
            f"{concurrency} requests at once need about {needed} file descriptors; this process may open "
            f"{allowed}. Raise the limit (ulimit -n {2 * needed}), or lower `requests` or the level in "
            "speed.scenarios."
        )


class _Sending:
    """When a request was written to its connection; until then, when it was to be."""

    def __init__(self) -> None:
        self.time = time.perf_counter()


async def _note_sent(_: aiohttp.ClientSession, context: Any, __: aiohttp.TraceRequestChunkSentParams) -> None:
    context.trace_request_ctx.time = time.perf_counter()


class _Load:
    """One round while it runs."""

    def __init__(
        self, target: Target, workload: Workload, concurrency: int, progress: Progress | None
    ) -> None:
        self.target = target
        self.progress = progress
        self.workload = workload
        self.concurrency = concurrency
        self.bodies = [_body(request) for request in workload.requests]
        self.timings: list[RequestTiming | None] = [None] * len(self.bodies)

    async def run(self) -> Round:
        timeout = aiohttp.ClientTimeout(
            total=self.target.request_timeout,
            sock_connect=CONNECT_TIMEOUT,
            sock_read=self.target.stall_timeout,
        )
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.target.api_key is not None:
            headers["Authorization"] = f"Bearer {self.target.api_key}"
        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(_note_sent)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
            trace_configs=[trace],
            headers=headers,
            timeout=timeout,
            read_bufsize=CHUNK_BYTES,
            trust_env=not is_loopback(self.target.url),
        ) as self.session:
            began = time.perf_counter()
            beat = asyncio.create_task(self._beat(began))
            if self.workload.offsets is None:
                numbers = iter(range(len(self.bodies)))
                await asyncio.gather(*(self._work(numbers) for _ in range(self.concurrency)))
            else:
                await self._arrive(began, self.workload.offsets)
            beat.cancel()
        timings = tuple(timing for timing in self.timings if timing is not None)
        return Round(timings, max(timing.ended for timing in timings) - began)

    async def _beat(self, began: float) -> None:
        """Say how far the round is, between the answers: a line each BEAT_SECONDS costs them nothing."""
        while self.progress is not None:
            await asyncio.sleep(BEAT_SECONDS)
            done = sum(timing is not None for timing in self.timings)
            seconds = duration(time.perf_counter() - began)
            self.progress(
                f"{self.workload.scenario}, {self.concurrency} at a time: {done} of {len(self.bodies)} "
                f"answers in {seconds}"
            )

    async def _work(self, numbers: Iterator[int]) -> None:
        """One stream after another, as long as there are requests."""
        for number in numbers:
            await self._ask(number)

    async def _arrive(self, began: float, offsets: tuple[float, ...]) -> None:
        """Requests at their own times; those beyond the limit wait for a place."""
        places = asyncio.Semaphore(self.concurrency)

        async def ask_in_time(number: int) -> None:
            await asyncio.sleep(max(0.0, began + offsets[number] - time.perf_counter()))
            async with places:
                await self._ask(number)

        await asyncio.gather(*map(ask_in_time, range(len(self.bodies))))

    async def _ask(self, number: int) -> None:
        request = self.workload.requests[number]
        sending = _Sending()
        try:
            self.timings[number] = await self._stream(request, self.bodies[number], sending)
        except (StreamError, aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            self.timings[number] = RequestTiming(
                sent=sending.time,
                arrivals=(),
                ended=time.perf_counter(),
                input_tokens=len(request.input_ids),
                output_tokens=0,
                error=self._explain(error),
            )

    async def _stream(self, request: LoadRequest, body: bytes, sending: _Sending) -> RequestTiming:
        reader = StreamReader()
        async with self.session.post(
            f"{self.target.url}/generate", data=body, allow_redirects=False, trace_request_ctx=sending
        ) as answer:
            if answer.status != 200:
                raise StreamError(f"status {answer.status}: {error_text(await _beginning(answer))[:300]}")
            try:
                async for chunk in answer.content.iter_any():
                    reader.feed(chunk, time.perf_counter())
            except (aiohttp.ClientPayloadError, ConnectionError) as error:
                received = reader.arrivals[-1][1] if reader.arrivals else 0
                raise StreamError(
                    f"the connection closed after {received} of {request.output_tokens} tokens"
                ) from error
        return reader.finish(
            sent=sending.time, input_tokens=len(request.input_ids), output_tokens=request.output_tokens
        )

    def _explain(self, error: BaseException) -> str:
        if isinstance(error, StreamError):
            return str(error)
        if isinstance(error, aiohttp.SocketTimeoutError):
            return f"stalled: no byte came for {self.target.stall_timeout:g} s (speed.stall_timeout)"
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return f"no connection within {CONNECT_TIMEOUT:g} s"
        if isinstance(error, asyncio.TimeoutError):
            return f"not finished within {self.target.request_timeout:g} s (request_timeout)"
        if isinstance(error, aiohttp.ServerDisconnectedError):
            return "the server closed the connection without an answer"
        return f"{type(error).__name__}: {error}"


async def _beginning(answer: aiohttp.ClientResponse) -> bytes:
    """Of an error, which may be endless."""
    read = b""
    while len(read) < ERROR_BYTES and (part := await answer.content.read(ERROR_BYTES)):
        read += part
    return read


def _body(request: LoadRequest) -> bytes:
    return orjson.dumps(
        {
            "input_ids": request.input_ids,
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": request.output_tokens,
                "ignore_eos": True,
            },
            "stream": True,
        }
    )


def _open_descriptors() -> int:
    """How many file descriptors this process has open; 0 where the system does not say."""
    try:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - only counted
    except OSError:
        return 0


@contextmanager
def _no_collections() -> Iterator[None]:
    """Collect no garbage while the block runs."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
