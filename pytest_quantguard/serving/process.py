"""A server's process tree as pytest sees it: started through the supervisor, watched, stopped wholly."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from pytest_quantguard.errors import ServerStartError
from pytest_quantguard.serving.supervisor import Tree, mask_file

STOP_GRACE = 15.0
"""Seconds that a server gets to end by itself before it is killed (SGLang drains its requests first)."""
SPAWN_SECONDS = 30.0
STOP_MARGIN = 20.0


class ServerProcess:
    """One command under a supervisor of its own. `command[0]` must be found on PATH or be a path."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None,
        log_path: Path,
        secrets: Sequence[str] = (),
        grace: float = STOP_GRACE,
    ) -> None:
        self._grace = grace
        self._log_path = log_path
        self._secrets = secrets
        self._exit_code: int | None = None
        self._stopped = False
        self._buffer = b""
        self._supervisor = subprocess.Popen(
            [sys.executable, "-m", "pytest_quantguard.serving.supervisor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._tree = Tree(psutil.Process(self._supervisor.pid))
        order = {
            "command": list(command),
            "env": dict(env),
            "cwd": None if cwd is None else str(cwd),
            "log": str(log_path),
            "secrets": list(secrets),
            "grace": grace,
        }
        self._send(order)
        self.pid = self._await_start(command[0])

    def poll(self) -> int | None:
        """The server's exit code (negative: the signal that ended it), or None while it runs."""
        self._tree.observe()
        for event in self._events():
            self._exit_code = event.get("exited", self._exit_code)
        if self._exit_code is None and self._supervisor.poll() is not None:
            self._clean_up()
            self._exit_code = -9  # the supervisor itself was killed, and the server with it
        return self._exit_code

    def wait(self, seconds: float) -> int | None:
        """`poll`, for up to so many seconds."""
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return code

    def owns(self, pid: int) -> bool:
        """Whether `pid` belongs to the server's tree."""
        return pid == self.pid or any(process.pid == pid for process in self._tree.observe())

    def cpu_seconds(self) -> float:
        """Processor seconds, user and system, of the living processes of the server's tree."""
        seconds = 0.0
        for process in self._tree.observe():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                seconds += times.user + times.system
        return seconds

    def stop(self) -> None:
        """End the whole tree: politely, then not. Returns when nothing of it runs. May be called twice."""
        if self._stopped:
            return
        self._stopped = True
        self._tree.observe()
        assert self._supervisor.stdin is not None
        with contextlib.suppress(OSError):
            self._supervisor.stdin.close()  # the lifeline
        try:
            self._supervisor.wait(self._grace + STOP_MARGIN)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        for event in self._events():
            self._exit_code = event.get("exited", self._exit_code)
        assert self._supervisor.stdout is not None
        self._supervisor.stdout.close()
        self._clean_up()
        if self._exit_code is None:
            self._exit_code = 0

    def _clean_up(self) -> None:
        """Where the supervisor did not finish its work: stop whatever was ever seen of the tree."""
        self._tree.stop(None, 2.0, lambda: None)
        mask_file(str(self._log_path), self._secrets)

    def _send(self, order: dict[str, Any]) -> None:
        assert self._supervisor.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # _await_start then reports that it ended
            self._supervisor.stdin.write(json.dumps(order).encode() + b"\n")
            self._supervisor.stdin.flush()

    def _await_start(self, program: str) -> int:
        deadline = time.monotonic() + SPAWN_SECONDS
        assert self._supervisor.stdout is not None
        os.set_blocking(self._supervisor.stdout.fileno(), False)
        while time.monotonic() < deadline:
            for event in self._events():
                if "started" in event:
                    return int(event["started"])
                if "failed" in event:
                    self.stop()
                    raise ServerStartError(f"cannot run {program!r}: {event['failed']}")
            if self._supervisor.poll() is not None:
                break
            time.sleep(0.005)
        self.stop()
        raise ServerStartError(f"the supervisor of {program!r} did not start within {SPAWN_SECONDS:g} s")

    def _events(self) -> list[dict[str, Any]]:
        """What the supervisor has told since the last call."""
        assert self._supervisor.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            while chunk := os.read(self._supervisor.stdout.fileno(), 65536):
                self._buffer += chunk
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]
