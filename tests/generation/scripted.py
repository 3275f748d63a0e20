"""A server that speaks SGLang's protocol and writes what a test wants, byte by byte: a token is a byte.

A question holds its right answer ("gold=blue"); without a script the answer is "It is blue.".
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCABULARY = 256


@dataclass
class Reply:
    """What is written. hangs: until somebody aborts it."""

    text: str
    finish: str = "stop"
    hangs: bool = False
    status: int = 200
    drops: bool = False


def right(question: str) -> str:
    """The answer that a question holds."""
    found = re.search(r"gold=([^\s?]+)", question)
    assert found is not None, question
    return f"It is {found[1]}."


@dataclass
class Script:
    """What the server does, and what it saw. reply: by the question's text; None for the right answer."""

    reply: Callable[[str], Reply | None] = lambda _: None
    context_length: int = 4096
    quantization: str | None = None
    tokenize: Callable[[str], list[int]] = lambda text: list(text.encode())
    asked: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    most_at_once: int = 0
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _events: dict[str, threading.Event] = field(default_factory=dict)

    def answer(self, question: str, rid: str, limit: int) -> Reply:
        """Write, or hang."""
        with self._lock:
            self.asked.append(question)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            event = self._events.setdefault(rid, threading.Event())
        try:
            reply = self.reply(question) or Reply(right(question))
            if reply.hangs:
                event.wait(30)
                return Reply(reply.text, "abort", status=reply.status)
            if len(reply.text.encode()) > limit:
                return Reply(reply.text.encode()[:limit].decode(errors="ignore"), "length")
            return reply
        finally:
            with self._lock:
                self._now -= 1

    def abort(self, rid: str) -> None:
        """End a hanging reply."""
        with self._lock:
            self.aborted.append(rid)
            event = self._events.setdefault(rid, threading.Event())
        event.set()


def nothing(ids: list[int]) -> dict[str, Any]:
    """An answer without text."""
    meta = {"prompt_tokens": len(ids), "completion_tokens": 0, "finish_reason": {"type": "length"}}
    return {"text": "", "output_ids": [], "meta_info": meta}


@contextmanager
def serve(script: Script) -> Iterator[str]:
    """Run on a free port of this machine; yields the url."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            info = {
                "version": "1.0",
                "model_path": "scripted",
                "quantization": script.quantization,
                "kv_cache_dtype": "auto",
                "vocab_size": VOCABULARY,
                "context_length": script.context_length,
                "quantguard_emulator": {"version": "1.0"},
            }
            routes: dict[str, Any] = {"/health": {}, "/health_generate": {}, "/server_info": info}
            self._send(routes.get(self.path, {"error": "no such route"}), 200 if self.path in routes else 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            if self.path == "/generate" and "rid" not in body:
                self._send([nothing(ids) for ids in body["input_ids"]])  # a look at who answers, no question
            elif self.path == "/generate":
                script.bodies.append(body)
                self._generate(body)
            elif self.path == "/v1/chat/completions":
                script.bodies.append(body)
                self._chat(body)
            elif self.path == "/abort_request":
                script.abort(body["rid"])
                self._send({})
            elif self.path == "/flush_cache":
                self._send({})
            elif self.path == "/tokenize":
                self._send({"tokens": script.tokenize(body["prompt"])})
            elif self.path == "/detokenize":
                self._send({"text": bytes(body["tokens"]).decode(errors="replace")})
            else:
                self._send({"error": "no such route"}, 404)

        def _generate(self, body: dict[str, Any]) -> None:
            ids = body["input_ids"][0]
            limit = body["sampling_params"][0]["max_new_tokens"]
            reply = script.answer(bytes(ids).decode(errors="replace"), body["rid"][0], limit)
            written = list(reply.text.encode())
            meta = {
                "prompt_tokens": len(ids),
                "completion_tokens": len(written),
                "cached_tokens": 0,
                "finish_reason": {"type": reply.finish},
            }
            answer = {"text": reply.text, "output_ids": written, "meta_info": meta}
            self._reply(reply, [answer])

        def _chat(self, body: dict[str, Any]) -> None:
            question = body["messages"][-1]["content"]
            reply = script.answer(question, body["rid"], body["max_tokens"])
            message = {"role": "assistant", "content": reply.text or None}
            usage = {"prompt_tokens": 7, "completion_tokens": len(reply.text.encode())}
            choice = {"index": 0, "message": message, "finish_reason": reply.finish}
            self._reply(reply, {"choices": [choice], "usage": usage})

        def _reply(self, reply: Reply, value: object) -> None:
            if reply.drops:
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
            elif reply.status != 200:
                self._send({"error": {"message": reply.text}}, reply.status)
            else:
                self._send(value)

        def _send(self, value: object, status: int = 200) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: object) -> None:
            """A client that closed its connection is part of these tests."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
