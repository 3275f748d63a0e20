"""A request that takes long is spoken of meanwhile, by the thread that waits and by no other."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from pytest_quantguard.baseline.recording import CellKey
from pytest_quantguard.errors import ServerDiedError
from pytest_quantguard.measure import waiting
from pytest_quantguard.measure.cells import measure_cell
from pytest_quantguard.measure.waiting import awaited
from pytest_quantguard.serving.answers import Answer, GenerateRequest
from tests.measure.toy import ToyClient, toy_prompts


@pytest.fixture(autouse=True)
def _beats_follow_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "BEAT_SECONDS", 0.001)


class Listener:
    """Hears lines, and lets the awaited work go on after the third."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.threads: set[int] = set()
        self.heard = threading.Event()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self.threads.add(threading.get_ident())
        if len(self.lines) >= 3:
            self.heard.set()


def test_lines_come_while_the_work_goes_on_and_from_the_waiting_thread() -> None:
    listener = Listener()

    def work() -> int:
        assert listener.heard.wait(30)
        return threading.get_ident()

    worker = awaited(work, "prefill-bs8, batch 1", listener)
    assert listener.threads == {threading.get_ident()} != {worker}
    assert listener.lines[0] == "prefill-bs8, batch 1: no answer yet, 0 s after the request"


def test_errors_of_the_work_are_those_of_the_caller() -> None:
    def die() -> int:
        raise ServerDiedError("gone")

    with pytest.raises(ServerDiedError, match="gone"):
        awaited(die, "x", Listener())


def test_an_interrupt_ends_the_waiting_and_not_the_work() -> None:
    go_on, ended = threading.Event(), threading.Event()

    def work() -> None:
        assert go_on.wait(30)
        ended.set()

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        awaited(work, "x", interrupt)
    assert not ended.is_set()
    go_on.set()
    assert ended.wait(30)


def test_without_a_listener_there_is_no_thread() -> None:
    assert awaited(threading.get_ident, "x", None) == threading.get_ident()


def test_every_request_of_a_cell_is_spoken_of() -> None:
    listener = Listener()

    class Slow(ToyClient):
        def generate(self, batch: Sequence[GenerateRequest], *, top_logprobs: int = 0) -> list[Answer]:
            assert listener.heard.wait(30)
            return super().generate(batch, top_logprobs=top_logprobs)

    measure_cell(Slow(), toy_prompts(2, 3), CellKey("prefill", 2), top_logprobs=4, progress=listener)
    assert "prefill-bs2, batch 1: no answer yet, 0 s after the request" in listener.lines
