"""A scripted server on this machine's loopback: what it streams, and when, is what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Script = Callable[[dict[str, Any]], AsyncIterator[bytes]]
"""From the body of a request to the bytes of the answer's body, each written at once."""

CLOSE = b"\0close"
"""Ends the connection here, without ending the answer."""


@dataclass
class Scripted:
    """A running server. status: of every answer.

    most: the largest number of requests that were being answered at once. headers: of each request.
    """

    script: Script
    status: int = 200
    url: str = ""
    headers: list[str] = field(default_factory=list)
    now: int = 0
    most: int = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.headers.append(head)
            length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                await self.write(writer, body)
            finally:
                self.now -= 1
        writer.close()

    async def write(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        writer.write(b"HTTP/1.1 %d X\r\nContent-Type: text/event-stream\r\n" % self.status)
        writer.write(b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        async for part in self.script(body):
            if part == CLOSE:
                writer.transport.abort()
                return
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def event(tokens: int, of: int, body: dict[str, Any], text: str = "word") -> bytes:
    """An event of an answer of `of` tokens after `tokens` of them."""
    meta = {
        "id": "x",
        "finish_reason": {"type": "length", "length": of} if tokens == of else None,
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": tokens,
        "cached_tokens": 0,
    }
    answer = {"text": text, "output_ids": [0] * tokens, "meta_info": meta}
    return b"data: " + json.dumps(answer, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def asked_tokens(body: dict[str, Any]) -> int:
    tokens: int = body["sampling_params"]["max_new_tokens"]
    return tokens


async def whole(body: dict[str, Any], first: float = 0.0, gap: float = 0.0) -> AsyncIterator[bytes]:
    """A proper answer: the first token after `first` seconds, `gap` between tokens."""
    tokens = asked_tokens(body)
    for number in range(1, tokens + 1):
        await asyncio.sleep(first if number == 1 else gap)
        yield event(number, tokens, body)
    yield DONE


@contextmanager
def serve(script: Script, status: int = 200) -> Iterator[Scripted]:
    """Run the script's server on a free port, in a thread with a loop of its own."""
    scripted = Scripted(script, status)
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(scripted.answer, "127.0.0.1", 0, backlog=512))
    scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield scripted
    finally:
        asyncio.run_coroutine_threadsafe(_stop(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _stop(server: asyncio.Server) -> None:
    server.close()
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
