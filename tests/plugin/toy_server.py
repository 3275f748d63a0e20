"""A tiny server that speaks SGLang's protocol over a toy language model, for tests of the plugin.

The next-token distribution depends on the last two tokens. `noise` perturbs the logits as a quantization
would, the other settings are defects.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

VOCABULARY = 64


@dataclass
class Toy:
    """Settings of a toy server, which tests may change while it runs, and what it was asked."""

    noise: float = 0.0
    decode_noise: float = 0.0
    quantization: str | None = None
    model_path: str = "toy"
    jitter: float = 0.0
    nan: bool = False
    swap_rows_from: int | None = None
    dies_after: int | None = None
    streams: Callable[[dict[str, Any]], Iterator[bytes]] | None = None
    texts: bool = True
    requests: int = 0
    paths: list[str] = field(default_factory=list)

    def logprobs(self, prefix: list[int], *, decode: bool) -> np.ndarray:
        """float64 [VOCABULARY]"""
        key = [*prefix[-2:], len(prefix) % 7]
        logits = np.random.default_rng(key).normal(0, 2.5, VOCABULARY)
        spread = self.noise + (self.decode_noise if decode else 0.0)
        logits += spread * np.random.default_rng([*key, 99]).normal(0, 1, VOCABULARY)
        logits += self.jitter * np.random.default_rng([*key, self.requests]).normal(0, 1, VOCABULARY)
        return logits - np.log(np.exp(logits).sum())

    def info(self) -> dict[str, Any]:
        return {
            "version": "1.0",
            "model_path": self.model_path,
            "dtype": "bfloat16",
            "quantization": self.quantization,
            "kv_cache_dtype": "auto",
            "vocab_size": VOCABULARY,
            "context_length": 512,
            "disable_radix_cache": True,
            "quantguard_emulator": {"version": "1.0", "forced_output_ids": True},
        }

    def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        count = len(body["input_ids"])
        answers = [self._answer(body, index) for index in range(count)]
        if self.swap_rows_from is not None and count >= self.swap_rows_from:
            metas = [answer["meta_info"] for answer in answers]
            for side in ("input_top_logprobs", "output_top_logprobs"):
                if side in metas[0]:
                    metas[0][side], metas[1][side] = metas[1][side], metas[0][side]
        return answers

    def _answer(self, body: dict[str, Any], index: int) -> dict[str, Any]:
        ids = list(body["input_ids"][index])
        sampling = body["sampling_params"][index]
        forced = (body.get("forced_output_ids") or {index: None})[index]
        wanted = body.get("top_logprobs_num", 0)
        meta: dict[str, Any] = {
            "prompt_tokens": len(ids),
            "cached_tokens": 0,
            "finish_reason": {"type": "length"},
        }
        start = body["logprob_start_len"][index] if body.get("return_logprob") else -1
        if start >= 0:
            rows = [self._row(ids[:at], ids[at], wanted, decode=False) for at in range(start + 1, len(ids))]
            meta["input_token_logprobs"] = [[None, ids[start], None], *(row[0] for row in rows)]
            meta["input_top_logprobs"] = [None, *(row[1] for row in rows)]
        out: list[int] = []
        rows = []
        for step in range(sampling["max_new_tokens"]):
            best = int(self.logprobs(ids + out, decode=True).argmax())
            token = forced[step] if forced else best
            rows.append(self._row(ids + out, token, wanted, decode=True))
            out.append(token)
        if out and body.get("return_logprob"):
            meta["output_token_logprobs"] = [row[0] for row in rows]
            meta["output_top_logprobs"] = [row[1] for row in rows]
        meta["completion_tokens"] = len(out)
        return {"text": "", "output_ids": out, "meta_info": meta}

    def _row(
        self, prefix: list[int], token: int, wanted: int, *, decode: bool
    ) -> tuple[list[Any], list[Any]]:
        values = self.logprobs(prefix, decode=decode).astype(np.float32)
        if self.nan:
            values[:] = np.nan
        best = np.argsort(-values, kind="stable")[:wanted]
        return [float(values[token]), token, None], [[float(values[at]), int(at), None] for at in best]


def stream_answer(body: dict[str, Any], seconds: float = 0.0) -> Iterator[bytes]:
    """Events of a streamed answer, the whole of which takes `seconds`."""
    tokens = body["sampling_params"]["max_new_tokens"]
    for number in range(1, tokens + 1):
        time.sleep(seconds / tokens)
        done = {"type": "length", "length": tokens} if number == tokens else None
        meta = {
            "completion_tokens": number,
            "prompt_tokens": len(body["input_ids"]),
            "cached_tokens": 0,
            "finish_reason": done,
        }
        yield b"data: " + json.dumps({"text": "x" * number, "meta_info": meta}).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


@contextmanager
def serve(toy: Toy) -> Iterator[str]:
    """Run `toy` on a free port of this machine; yields its url."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # header and body in one packet

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path in ("/health", "/health_generate"):
                self._send({})
            elif self.path == "/server_info":
                self._send(toy.info())
            else:
                self._send({"error": "no such route"}, 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            toy.paths.append(self.path)
            if self.path == "/generate":
                toy.requests += 1
                if body.get("stream"):
                    self._stream((toy.streams or stream_answer)(body))
                    return
                if toy.dies_after is not None and toy.requests > toy.dies_after:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return
                self._send(toy.generate(body))
            elif self.path == "/flush_cache":
                self._send({})
            elif self.path == "/tokenize":
                self._send({"tokens": [1 + ord(letter) % (VOCABULARY - 1) for letter in body["prompt"]]})
            elif self.path == "/detokenize" and toy.texts:
                self._send({"text": "".join(chr(96 + token % 26) for token in body["tokens"])})
            else:
                self._send({"error": "no such route"}, 404)

        def _stream(self, events: Iterator[bytes]) -> None:
            self.close_connection = True
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for event in events:
                self.wfile.write(event)
                self.wfile.flush()

        def _send(self, value: object, status: int = 200) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
