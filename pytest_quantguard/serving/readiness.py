"""Waits until a started server has generated a token, for as long as its log shows that it gets on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from pytest_quantguard.errors import ServerStartError
from pytest_quantguard.serving.log_reading import (
    LogFollower,
    never_serves,
    read_failure,
    read_log,
    stage_of,
    tail,
)
from pytest_quantguard.serving.process import ServerProcess
from pytest_quantguard.serving.transport import Transport, backoff, error_text

Progress = Callable[[str], None]

PROBE_SECONDS = 10.0
"""SGLang's /health_generate answers after a token, about a second; it hangs while the server is busy."""
LONGEST_WAIT = 1.0
TELL_SECONDS = 10.0
TOLD_LENGTH = 120
FATAL_GRACE = 3.0
"""A server that will never serve may still end by itself, with more in its log."""


class Startup:
    """One server's start: what it is waiting for, and why it ended."""

    def __init__(
        self,
        process: ServerProcess,
        transport: Transport,
        log_path: Path,
        *,
        timeout: float,
        hard_limit: float,
        progress: Progress | None,
        describe: str,
        mask: Callable[[str], str],
    ) -> None:
        self._process = process
        self._transport = transport
        self._log_path = log_path
        self._timeout = timeout
        self._hard_limit = hard_limit
        self._progress = progress
        self._describe = describe
        self._mask = mask
        self._follower = LogFollower(log_path)
        self._started = time.monotonic()
        self._advanced = self._started
        self._fatal: tuple[float, str] | None = None
        self._stage = "starting"
        self._last_line = ""
        self._told = self._started

    def wait(self) -> float:
        """Seconds until the server was ready. Raises ServerStartError with all that is known of a failure."""
        for wait in backoff():
            self._read_log()
            code = self._process.poll()
            if code is not None:
                raise self._failure(
                    f"the server ended with {exit_text(code)}, {self._seconds()} after its start"
                )
            if self._is_ready():
                self._read_log()
                return time.monotonic() - self._started
            self._check_deadlines()
            self._tell_last_line()
            time.sleep(min(wait, LONGEST_WAIT))
        raise AssertionError("unreachable")

    def _is_ready(self) -> bool:
        answer = self._transport.probe("/health_generate", timeout=PROBE_SECONDS)
        if answer is None:
            return False
        status, body = answer
        if status in (401, 403):
            raise self._failure(f"the server wants an API key ({error_text(body)}); set api_key")
        if status == 404:
            raise self._failure("what answers has no /health_generate, so it is no SGLang server")
        return status == 200

    def _read_log(self) -> None:
        for line in self._follower.new_lines():
            self._advanced = time.monotonic()
            self._last_line = line.strip()
            stage = stage_of(line)
            if stage is not None and stage != self._stage:
                self._stage = stage
                self._tell(f"{stage} ({self._seconds()})")
            reason = never_serves(line)
            if reason is not None and self._fatal is None:
                self._fatal = (time.monotonic(), reason)

    def _tell(self, text: str) -> None:
        self._told = time.monotonic()
        if self._progress is not None:
            self._progress(text)

    def _tell_last_line(self) -> None:
        """A long start says now and then that it goes on, and where it is."""
        if time.monotonic() - self._told >= TELL_SECONDS:
            last = self._mask(self._last_line)[:TOLD_LENGTH]
            self._tell(f"{self._stage} ({self._seconds()}){f': {last}' if last else ''}")

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if self._fatal is not None and now - self._fatal[0] > FATAL_GRACE:
            raise self._failure(f"the server runs on but will never serve: {self._fatal[1]}")
        if now - self._started > self._hard_limit:
            raise self._failure(
                f"the server was not ready after {self._hard_limit:g} s, the hard limit "
                "(startup_hard_limit); "
                f"it was at: {self._stage}"
            )
        if now - self._advanced > self._timeout:
            raise self._failure(
                f"the server was not ready and wrote nothing to its log for {self._timeout:g} s "
                "(startup_timeout); "
                f"it was at: {self._stage}"
            )

    def _failure(self, what: str) -> ServerStartError:
        log = self._mask(read_log(self._log_path))
        reading = read_failure(log)
        because = f"\nreading of the log: {reading.sentence}" if reading is not None else ""
        return ServerStartError(
            f"{what}{because}\ncommand: {self._describe}\nlog: {self._log_path}; its "
            f"end:\n{tail(log) or '(empty)'}"
        )

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._started:.0f} s"


def exit_text(code: int) -> str:
    """An exit code in words."""
    if code == -9:
        return "exit code -9 (killed by the kernel when memory ran out, or by itself after a child failed)"
    if code < 0:
        return f"exit code {code} (signal {-code})"
    return f"exit code {code}"
