"""The wait for a server against a clock of the test's own: deadlines, progress, what ends it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_quantguard.errors import ServerStartError
from pytest_quantguard.serving import readiness
from pytest_quantguard.serving.readiness import Startup


class Clock:
    """Stands in for `time`: sleeping moves it on and lets something happen."""

    def __init__(self, during_sleep: Callable[[float], object]) -> None:
        self.now = 1000.0
        self.during_sleep = during_sleep

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.during_sleep(self.now - 1000.0)


def startup(
    monkeypatch: pytest.MonkeyPatch,
    log: Path,
    during_sleep: Callable[[float], object],
    answer: Callable[[], tuple[int, bytes] | None] = lambda: None,
    progress: Any = None,
) -> Startup:
    monkeypatch.setattr(readiness, "time", Clock(during_sleep))
    log.touch()
    return Startup(
        SimpleNamespace(poll=lambda: None),  # type: ignore[arg-type]
        SimpleNamespace(probe=lambda *_, **__: answer()),  # type: ignore[arg-type]
        log,
        timeout=30,
        hard_limit=120,
        progress=progress,
        describe="the command",
        mask=lambda text: text,
    )


def test_silence_ends_the_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wait = startup(monkeypatch, tmp_path / "log", lambda _: None)
    with pytest.raises(
        ServerStartError, match=r"wrote nothing to its log for 30 s \(startup_timeout\)"
    ) as caught:
        wait.wait()
    assert "command: the command" in str(caught.value)


def test_an_advancing_log_extends_the_wait_up_to_the_hard_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    said: list[str] = []

    def advance(seconds: float) -> None:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"Loading safetensors checkpoint shards: {10 if seconds < 50 else 20}% Completed\n")

    wait = startup(monkeypatch, log, advance, progress=said.append)
    with pytest.raises(
        ServerStartError, match=r"not ready after 120 s, the hard limit .*: loading weights 20 %"
    ):
        wait.wait()
    changes = [line for line in said if ":" not in line]
    assert changes == ["loading weights 10 % (0 s)", "loading weights 20 % (51 s)"]
    between = [line for line in said if line not in changes]
    assert 8 <= len(between) <= 11, "one in ten seconds, with the log's last line"
    last = "Loading safetensors checkpoint shards"
    assert between[0].startswith(f"loading weights 10 % (11 s): {last}: 10% Completed")


def test_our_own_polling_is_no_progress(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def polled(_: float) -> None:
        with log.open("a", encoding="utf-8") as file:
            file.write('INFO: 127.0.0.1:1 - "GET /health_generate HTTP/1.1" 503 Service Unavailable\n')

    wait = startup(monkeypatch, log, polled, answer=lambda: (503, b""))
    with pytest.raises(ServerStartError, match="wrote nothing to its log for 30 s"):
        wait.wait()


def test_a_server_that_will_never_serve_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "ERROR: [Errno 98] error while attempting to bind on address ('::', 31000): address already in use\n",
        encoding="utf-8",
    )
    wait = startup(monkeypatch, log, lambda _: None)
    with pytest.raises(
        ServerStartError, match="will never serve: port 31000 is already in use by another process"
    ):
        wait.wait()


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, "wants an API key .*; set api_key"), (404, "no /health_generate, so it is no SGLang server")],
)
def test_answers_that_end_the_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, message: str
) -> None:
    wait = startup(monkeypatch, tmp_path / "log", lambda _: None, answer=lambda: (status, b"Unauthorized"))
    with pytest.raises(ServerStartError, match=message):
        wait.wait()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "the server ended with exit code 3, 2 s after its start"),
        (-9, r"exit code -9 \(killed by the kernel when memory ran out, or by itself after a child failed\)"),
        (-15, r"exit code -15 \(signal 15\)"),
    ],
)
def test_a_server_that_ends_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, words: str
) -> None:
    ends = SimpleNamespace(poll=lambda: None)

    def later(seconds: float) -> None:
        if seconds > 1:
            ends.poll = lambda: code

    wait = startup(monkeypatch, tmp_path / "log", later)
    wait._process = ends  # type: ignore[assignment]
    with pytest.raises(ServerStartError, match=words):
        wait.wait()


def test_ready_after_a_while(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = iter([None, (503, b""), (503, b"")])
    wait = startup(monkeypatch, tmp_path / "log", lambda _: None, answer=lambda: next(answers, (200, b"")))
    assert wait.wait() == pytest.approx(0.05 + 0.1 + 0.2)
