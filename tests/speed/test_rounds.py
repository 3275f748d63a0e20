"""Warm-up until steady, and what is kept of rounds, with rounds whose times the test says."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_quantguard.measure.load import rounds
from pytest_quantguard.measure.load.generator import Round, Target
from pytest_quantguard.measure.load.rounds import Load
from pytest_quantguard.measure.load.workload import LoadRequest, Workload
from pytest_quantguard.stats.figures import RequestTiming

REQUESTS = (LoadRequest((1, 2), 3),)


def load(offsets: tuple[float, ...] | None = None) -> tuple[Load, list[str]]:
    """A load, and the list that grows with each flush of the cache."""
    flushed: list[str] = []
    client = cast(Any, SimpleNamespace(flush_cache=lambda: flushed.append("flush")))
    return Load(
        client, Target("http://127.0.0.1:1"), Workload("w", REQUESTS, offsets, True, ""), 1, {}
    ), flushed


def play(monkeypatch: pytest.MonkeyPatch, *durations: float | str) -> None:
    """Rounds of these seconds, in order; a text is a round whose request failed so."""
    left: Iterator[float | str] = iter(durations)

    def run_round(*_: object, **__: object) -> Round:
        now = next(left)
        if isinstance(now, str):
            return Round((RequestTiming(0.0, (), 1.0, 2, 0, error=now),), 1.0)
        arrivals = ((now / 2, 1), (now, 3))
        return Round((RequestTiming(0.0, arrivals, now, 2, 3, cached_tokens=1),), now)

    monkeypatch.setattr(rounds, "run_round", run_round)


@pytest.mark.parametrize(
    ("durations", "at_most", "sent", "steady"),
    [
        ((2.0, 1.0, 1.04), 9, 3, True),
        ((1.0, 1.06, 1.12), 3, 3, False),
        ((1.0, 1.0), 9, 2, True),
        ((1.0,), 1, 1, False),
        ((), 0, 0, False),
        ((1.0, "boom"), 9, 2, False),
    ],
)
def test_warm_up(
    monkeypatch: pytest.MonkeyPatch, durations: tuple[float | str, ...], at_most: int, sent: int, steady: bool
) -> None:
    play(monkeypatch, *durations)
    warmed, flushed = load()
    warmed.warm_up(at_most, lambda _: None)
    assert (warmed.warmup, warmed.steady, len(flushed)) == (sent, steady, sent)
    assert warmed.times == [], "untimed rounds leave no times"


def test_figures_of_every_round_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, 1.0, 3.0, 2.0)
    timed, _ = load()
    for _ in range(3):
        timed.run()
    assert timed.times == [1.0, 3.0, 2.0]
    assert timed.medians()["duration"] == 2.0
    assert timed.medians()["output_throughput"] == 1.5
    assert timed.figures["mean_ttft_ms"] == [500.0, 1500.0, 1000.0]
    assert timed.scatter == pytest.approx(0.5)
    assert (timed.failed, timed.cached_tokens) == (0, 3)


def test_failed_requests_are_counted_and_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "boom", 1.0, "boom", "other")
    timed, _ = load()
    for _ in range(4):
        timed.run()
    assert (timed.errors, timed.failed) == ([1, 0, 1, 1], 1)
    assert timed.error_examples == ["boom", "other"]


def test_an_open_loop_is_compared_by_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, 1.0, 1.0)
    timed, _ = load(offsets=(0.0,))
    timed.run()
    assert timed.comparison_figure == "mean_e2e_latency_ms"
    assert timed.times == [1000.0]
