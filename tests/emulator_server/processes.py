"""Starts emulator processes for tests, and ends each by its own process id."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from pytest_quantguard.serving.ports import HeldPort

DATA = Path(__file__).parents[1] / "data"
TINY = DATA / "models" / "bf16-tiny"
START_SECONDS = 120


@dataclass
class Emulator:
    """A running emulator process."""

    port: int
    process: subprocess.Popen[bytes]
    log_path: Path
    session: requests.Session

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8")

    def request(self, method: str, path: str, **options: Any) -> requests.Response:
        return self.session.request(method, self.url + path, timeout=120, **options)

    def get(self, path: str, **options: Any) -> requests.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> requests.Response:
        return self.request("POST", path, json=body, **options)

    def generate(self, body: dict[str, Any]) -> Any:
        """The answer of /generate, which must succeed."""
        response = self.post("/generate", body)
        assert response.status_code == 200, response.text
        return response.json()


def free_port() -> int:
    """A port that nobody listens on now, for a server that is not to come so far as to use it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(log_path: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """An emulator process whose output goes to `log_path`."""
    command = [sys.executable, "-m", "pytest_quantguard.emulator", *arguments]
    with log_path.open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


@contextlib.contextmanager
def emulator(log_path: Path, model: Path | str = TINY, *arguments: str) -> Iterator[Emulator]:
    """A ready emulator; it must end with status 0 on SIGTERM."""
    with HeldPort(None) as held:
        port = str(held.port)
        process = launch(log_path, "--model-path", str(model), "--port", port, "--threads", "1", *arguments)
        session = requests.Session()
        session.trust_env = False
        running = Emulator(held.port, process, log_path, session)
        try:
            wait_until_ready(running)
        except BaseException:
            process.kill()
            process.wait()
            raise
    try:
        yield running
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, running.log
    finally:
        session.close()
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_until_ready(running: Emulator) -> None:
    """Returns when /health answers 200; fails with the log when the process ends first."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert running.process.poll() is None, running.log
        with contextlib.suppress(requests.ConnectionError):
            if running.get("/health").status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError(f"not ready after {START_SECONDS} s:\n{running.log}")
