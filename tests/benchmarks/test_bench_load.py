"""What the load generator costs: tokens per second that it can take, processor time, the delay that it adds.

OMP_NUM_THREADS=1 pytest -m benchmark_suite tests/benchmarks/test_bench_load.py -s
Against a process that answers at once, and the emulator; beside other HTTP clients, in turns within one run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import orjson
import pytest

from pytest_quantguard.config import EmulatorServer
from pytest_quantguard.measure.load.generator import Target, run_round
from pytest_quantguard.measure.load.workload import LoadRequest, Workload
from pytest_quantguard.serving.launch import start
from tests.benchmarks.load_clients import CLIENTS, Load

pytestmark = pytest.mark.benchmark_suite

MODEL = Path(__file__).parents[1] / "data" / "models" / "bf16-tiny"
TOKENS, PROMPT = 128, tuple(range(60, 68))
STREAMS = (1, 8, 64, 256)
DELAY_MS = 200.0
REPEATS = 5


def generator(url: str, _: bytes, count: int, concurrency: int, tokens: int = TOKENS) -> list[float]:
    """Ours, with all its checks."""
    requests = tuple(LoadRequest(PROMPT, tokens) for _ in range(count))
    done = run_round(
        Target(url.removesuffix("/generate")), Workload("", requests, None, True, ""), concurrency
    )
    assert done.errors == []
    return [timing.ttft for timing in done.timings]


def payload(tokens: int = TOKENS) -> bytes:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return orjson.dumps({"input_ids": PROMPT, "sampling_params": sampling, "stream": True})


@contextmanager
def trivial(delay_ms: float = 0.0, tokens: int = TOKENS) -> Iterator[str]:
    """The url of a process that answers at once, or after a delay."""
    script = Path(__file__).with_name("load_server.py")
    process = subprocess.Popen(
        [sys.executable, str(script), str(tokens), str(delay_ms)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/generate"
    finally:
        process.stdin.close()
        process.wait()


def in_turns(
    clients: dict[str, Load], url: str, body: bytes, count: int, streams: int
) -> dict[str, tuple[float, float, list[float]]]:
    """Client -> seconds, processor seconds and times to first token of its quickest run."""
    best: dict[str, tuple[float, float, list[float]]] = {}
    for _ in range(REPEATS):
        for name, load in clients.items():
            began, used = time.perf_counter(), time.process_time()
            firsts = load(url, body, count, streams)
            taken = (time.perf_counter() - began, time.process_time() - used, firsts)
            best[name] = min(best.get(name, taken), taken, key=lambda one: one[0])
    return best


def all_clients(ours: Callable[..., list[float]] = generator) -> dict[str, Load]:
    return {"load generator": ours, **CLIENTS}


@pytest.mark.parametrize("streams", STREAMS)
def test_against_a_server_that_answers_at_once(streams: int) -> None:
    count = max(64, streams)
    with trivial() as url:
        found = in_turns(all_clients(), url, payload(), count, streams)
    for name, (seconds, processor, _) in found.items():
        tokens = count * TOKENS
        print(
            f"\n{streams:>4} streams, {name:<24}{tokens / seconds:>9,.0f} tokens/s, "
            f"{processor / tokens * 1e6:6.1f} us of processor time per token",
            end="",
        )


@pytest.mark.parametrize("streams", STREAMS)
def test_added_time_to_first_token(streams: int) -> None:
    """All answers begin DELAY_MS after their request: what is measured beyond it was added."""
    with trivial(DELAY_MS, tokens=1) as url:
        found = in_turns(all_clients(one_token), url, payload(1), streams, streams)
    for name, (_, _, firsts) in found.items():
        added = [1e6 * first - 1e3 * DELAY_MS for first in firsts]
        print(
            f"\n{streams:>4} streams, {name:<24}adds {median(added):8,.0f} us to TTFT (median), "
            f"at most {max(added):8,.0f}",
            end="",
        )


def one_token(url: str, body: bytes, count: int, concurrency: int) -> list[float]:
    return generator(url, body, count, concurrency, tokens=1)


@pytest.mark.parametrize("streams", [64, 256])
def test_against_the_emulator(tmp_path: Path, streams: int) -> None:
    """A two-layer model: here the server is the bottleneck, and the client must not change that."""
    config = EmulatorServer(
        backend="emulator", model_path=str(MODEL), threads=1, server_args={"max_running_requests": 256}
    )
    with start(config, log_path=tmp_path / "server.log") as server:
        found = in_turns(all_clients(short_answers), f"{server.url}/generate", payload(16), streams, streams)
    for name, (seconds, processor, _) in found.items():
        tokens = streams * 16
        print(
            f"\n{streams:>4} streams, {name:<24}{tokens / seconds:>9,.0f} tokens/s, "
            f"{processor / tokens * 1e6:6.1f} us of processor time per token",
            end="",
        )


def short_answers(url: str, body: bytes, count: int, concurrency: int) -> list[float]:
    return generator(url, body, count, concurrency, tokens=16)
