"""A server that answers every streamed /generate at once, as fast as a Python process can: what is left is
the client. Run as a script: prints its port, ends with its standard input.

Usage: load_server.py TOKENS DELAY_MS. Each request gets TOKENS events of the form of SGLang's, the first
after DELAY_MS. The events are written in groups, so that the server costs less than any client.
"""

from __future__ import annotations

import asyncio
import json
import sys

GROUP = 16
"""Events per write; each write is one HTTP chunk, as uvicorn sends it."""


def answer(tokens: int) -> list[bytes]:
    """HTTP chunks of a whole streamed answer; cumulative text, as SGLang sends it."""
    text = ""
    chunks = []
    for number in range(1, tokens + 1):
        text += " word"
        done = number == tokens
        meta = {
            "id": "0" * 32,
            "finish_reason": {"type": "length", "length": tokens} if done else None,
            "prompt_tokens": 8,
            "weight_version": "default",
            "completion_tokens": number,
            "cached_tokens": 0,
        }
        body = {"text": text[-400:], "output_ids": [number], "meta_info": meta}
        event = b"data: " + json.dumps(body).encode() + b"\n\n"
        chunks.append(b"%x\r\n%b\r\n" % (len(event), event))
    end = b"data: [DONE]\n\n"
    return [*chunks, b"%x\r\n%b\r\n0\r\n\r\n" % (len(end), end)]


class Answering(asyncio.Protocol):
    """One connection: reads requests by their Content-Length, answers each."""

    def __init__(self, chunks: list[bytes], delay: float) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self.groups = [b"".join(chunks[at : at + GROUP]) for at in range(0, len(chunks), GROUP)]
        self.groups[0] = head + self.groups[0]
        self.delay = delay
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        while (end := self.received.find(b"\r\n\r\n")) >= 0:
            head = self.received[:end].lower()
            length = (
                int(head.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in head else 0
            )
            if len(self.received) < end + 4 + length:
                return
            self.received = self.received[end + 4 + length :]
            asyncio.get_running_loop().call_later(self.delay, self.write, 0)

    def write(self, number: int) -> None:
        if self.transport.is_closing():
            return
        self.transport.write(self.groups[number])
        if number + 1 < len(self.groups):
            asyncio.get_running_loop().call_soon(self.write, number + 1)


async def main(tokens: int, delay: float) -> None:
    loop = asyncio.get_running_loop()
    chunks = answer(tokens)
    server = await loop.create_server(lambda: Answering(chunks, delay), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]) / 1000))
