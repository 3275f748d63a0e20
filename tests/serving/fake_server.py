"""A stand-in for a server's process, for tests of the launcher: `python fake_server.py MODE --port N ...`.

It speaks enough of the protocol to be probed, writes its pids to $FAKE_PIDS, and misbehaves as MODE says.
Only the standard library, so that it starts in a moment.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); "
    "time.sleep(600)",
]
ORPHANING = [
    sys.executable,
    "-c",
    "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
    " start_new_session=True, stdout=subprocess.DEVNULL).pid)",
]


def note(*pids: int) -> None:
    path = os.environ.get("FAKE_PIDS")
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines(f"{pid}\n" for pid in pids)


def start_children() -> None:
    """A child in a session of its own, one that ignores SIGTERM, and a grandchild whose parent is gone."""
    child = subprocess.Popen(SLEEPER, start_new_session=True)
    stubborn = subprocess.Popen(STUBBORN, stdout=subprocess.PIPE)
    assert stubborn.stdout is not None
    stubborn.stdout.readline()
    orphan = int(subprocess.run(ORPHANING, stdout=subprocess.PIPE, check=True, encoding="utf-8").stdout)
    note(os.getpid(), child.pid, stubborn.pid, orphan)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("mode")
    parser.add_argument("--port", type=int)
    parser.add_argument("--host")
    parser.add_argument("--model-path")
    parser.add_argument("--dtype")
    parser.add_argument("--api-key")
    parser.add_argument("--kv-cache-dtype")
    options = parser.parse_args()
    mode: str = options.mode
    note(os.getpid())
    print("fake server starts", flush=True)
    print(f"server_args={vars(options)}", flush=True)
    if mode == "exit":
        print(
            "Traceback (most recent call last):\nRuntimeError: the fake server was told to fail", flush=True
        )
        return 3
    if mode == "port-busy":
        print(f"ERROR: [Errno 98] error while attempting to bind on address ('127.0.0.1', {options.port}): "
              "address already in use", flush=True)  # fmt: skip
        time.sleep(600)
    if mode == "children":
        start_children()
    if mode == "ignores-sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve(mode, options)
    return 0


def serve(mode: str, options: argparse.Namespace) -> None:
    polls = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            nonlocal polls
            if self.path == "/health_generate":
                polls += 1
                self.answer(200 if polls > 2 or mode != "slow" else 503, {})
            elif self.path == "/server_info":
                model = "another-model" if mode == "other-model" else options.model_path
                port = options.port + 1 if mode == "other-port" else options.port
                self.answer(
                    200, {"model_path": model, "port": port, "version": "0.0", "dtype": options.dtype}
                )
            else:
                self.answer(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            if mode == "dies":
                print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB", flush=True)
                os._exit(7)
            self.answer(404, {"detail": "Not Found"})

        def answer(self, status: int, value: object) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            print('INFO: "GET /health_generate HTTP/1.1"', flush=True)

    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    sys.exit(main())
