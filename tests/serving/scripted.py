"""A small HTTP server that answers what a test tells it to, and records what it was asked."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, bytes] | None
"""Status and body; None drops the connection without an answer."""


@dataclass(frozen=True)
class Call:
    """One request as it arrived."""

    method: str
    path: str
    body: Any
    headers: dict[str, str]


Responder = Callable[[Call], Reply]


def as_json(value: Any, status: int = 200) -> Reply:
    return status, json.dumps(value).encode()


@dataclass
class ScriptedServer:
    """`respond` decides every answer."""

    respond: Responder
    calls: list[Call] = field(default_factory=list)
    host: str = "127.0.0.1"

    def __enter__(self) -> ScriptedServer:
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # one packet an answer: two would wait for a delayed acknowledgement

            def _handle(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                raw = self.rfile.read(length)
                body = json.loads(raw) if raw else None
                call = Call(self.command, self.path, body, dict(self.headers))
                scripted.calls.append(call)
                reply = scripted.respond(call)
                if reply is None:
                    self.close_connection = True
                    self.connection.close()
                    return
                status, content = reply
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = _handle  # noqa: N815

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in self.host else socket.AF_INET

        self._server = Server((self.host, 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    def bodies(self, path: str) -> list[Any]:
        """Bodies of the requests to `path`, oldest first."""
        return [call.body for call in self.calls if call.path == path]
