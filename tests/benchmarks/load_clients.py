"""The same load with other HTTP clients: what the load generator is compared with.

Each takes (url, payload, requests, concurrency) and returns the seconds to each request's first event, after
having read every event of every answer and noted when it came.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import httpx
import requests

MARK = b'"completion_tokens":'
Load = Callable[[str, bytes, int, int], list[float]]


class Reader:
    """Notes when events come and how many tokens each has, at the least cost in Python."""

    def __init__(self) -> None:
        self.sent = time.perf_counter()
        self.rest = b""
        self.times: list[tuple[float, int]] = []

    def take(self, chunk: bytes) -> None:
        now = time.perf_counter()
        *events, self.rest = (self.rest + chunk).split(b"\n\n")
        for event in events:
            at = event.rfind(MARK)
            if at >= 0:
                self.times.append((now, int(event[at + len(MARK) :].split(b",", 1)[0])))

    @property
    def first(self) -> float:
        return self.times[0][0] - self.sent


def with_threads(url: str, payload: bytes, count: int, concurrency: int) -> list[float]:
    """`requests`, one thread per stream."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(count):
        waiting.put(number)
    firsts: list[float] = []

    def work() -> None:
        with requests.Session() as session:
            session.trust_env = False
            while True:
                try:
                    waiting.get_nowait()
                except queue.Empty:
                    return
                reader = Reader()
                with session.post(url, data=payload, stream=True) as response:
                    for chunk in response.raw.stream(1 << 16, decode_content=False):
                        reader.take(chunk)
                firsts.append(reader.first)

    threads = [threading.Thread(target=work) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return firsts


async def _in_turn(ask: Callable[[], Any], count: int, concurrency: int) -> list[float]:
    numbers = iter(range(count))
    firsts: list[float] = []

    async def work() -> None:
        for _ in numbers:
            firsts.append(await ask())

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return firsts


def with_aiohttp(url: str, payload: bytes, count: int, concurrency: int) -> list[float]:
    """`aiohttp`, one task per stream; the approach of sglang.bench_serving."""

    async def run() -> list[float]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20) as session:

            async def ask() -> float:
                reader = Reader()
                async with session.post(url, data=payload) as response:
                    async for chunk in response.content.iter_any():
                        reader.take(chunk)
                return reader.first

            return await _in_turn(ask, count, concurrency)

    return asyncio.run(run())


def with_aiohttp_lines(url: str, payload: bytes, count: int, concurrency: int) -> list[float]:
    """`aiohttp`, read line by line with the JSON of every event decoded, as sglang.bench_serving does."""
    import json

    async def run() -> list[float]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, read_bufsize=10 << 20) as session:

            async def ask() -> float:
                sent, first = time.perf_counter(), 0.0
                times: list[tuple[float, int]] = []
                async with session.post(url, data=payload) as response:
                    async for line in response.content:
                        line = line.strip()
                        if not line or line == b"data: [DONE]":
                            continue
                        data = json.loads(line.decode()[6:])
                        now = time.perf_counter()
                        first = first or now - sent
                        times.append((now, data["meta_info"]["completion_tokens"]))
                return first

            return await _in_turn(ask, count, concurrency)

    return asyncio.run(run())


def with_httpx(url: str, payload: bytes, count: int, concurrency: int) -> list[float]:
    """`httpx`, one task per stream."""

    async def run() -> list[float]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client:

            async def ask() -> float:
                reader = Reader()
                async with client.stream("POST", url, content=payload) as response:
                    async for chunk in response.aiter_raw():
                        reader.take(chunk)
                return reader.first

            return await _in_turn(ask, count, concurrency)

    return asyncio.run(run())


CLIENTS: dict[str, Load] = {
    "requests, threads": with_threads,
    "aiohttp": with_aiohttp,
    "aiohttp, line by line": with_aiohttp_lines,
    "httpx": with_httpx,
}
