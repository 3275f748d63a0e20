"""What the emulator's HTTP layer costs, as ratios within one run: pytest -m benchmark_suite -s <this file>.

Encoding 32 answers of 128 scored positions at top 256, nested against flat, and against what a client needs
to decode them; and a request over HTTP against the same sequence handed to the engine directly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import requests
from emulator_server.processes import TINY, emulator

from pytest_quantguard.emulator.checkpoint import load_checkpoint
from pytest_quantguard.emulator.encoding import Timing, encode_answer
from pytest_quantguard.emulator.engine import Engine
from pytest_quantguard.emulator.model import Model
from pytest_quantguard.emulator.protocol import Limits, parse_generate
from pytest_quantguard.emulator.sequences import LogprobRows, SequenceRequest, SequenceResult

pytestmark = pytest.mark.benchmark_suite

BATCH, POSITIONS, TOP, VOCABULARY = 32, 128, 256, 49152


def best(action: Callable[[], Any], repeats: int = 5) -> float:
    """Seconds of the fastest repeat."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def scored_result() -> SequenceResult:
    generator = np.random.default_rng(0)
    values = -np.sort(generator.exponential(2, (POSITIONS + 1, TOP)).astype(np.float32))
    ids = generator.integers(0, VOCABULARY, values.shape).astype(np.int32)
    rows = LogprobRows(ids[:, 0].copy(), values[:, 0].copy(), ids, values, values[:, :0], 1)
    return SequenceResult("r", 200, 0, (), {"type": "length", "length": 0}, rows, None)


def test_encoding_of_large_answers() -> None:
    results = [scored_result() for _ in range(BATCH)]
    body = {
        "input_ids": [1] * 200,
        "return_logprob": True,
        "top_logprobs_num": TOP,
        "logprob_start_len": 71,
        "sampling_params": {"max_new_tokens": 0},
    }
    flat = {"return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
    limits = Limits(VOCABULARY, 8192, None)
    seconds: dict[str, float] = {}
    for name, fields in (("nested", body), ("flat", {**body, **flat})):
        item = parse_generate(fields, limits).items[0]

        def encode(item: Any = item) -> bytes:
            return orjson.dumps([encode_answer(item, result, "", Timing(0, 0, 0, 0)) for result in results])

        answer = encode()
        seconds[name] = best(encode)
        decode = best(lambda answer=answer: orjson.loads(answer), 3)
        print(
            f"{name}: encode {seconds[name]:.3f} s, {len(answer) / 1e6:.1f} MB, "
            f"{seconds[name] / decode:.2f} x orjson.loads of it"
        )
    print(f"nested / flat: {seconds['nested'] / seconds['flat']:.1f}")


def test_a_request_over_http_against_the_engine(tmp_path: Path) -> None:
    prompt = tuple(range(5, 37))
    engine = Engine(Model(load_checkpoint(TINY), threads=1), radix_cache=False)
    numbers = iter(range(10**6))

    def direct() -> None:
        engine.submit(SequenceRequest(str(next(numbers)), prompt, max_new_tokens=1, ignore_eos=True)).result()

    with emulator(tmp_path / "log", TINY, "--disable-radix-cache") as server:
        body = {"input_ids": list(prompt), "sampling_params": {"temperature": 0, "max_new_tokens": 1}}

        def over_http() -> requests.Response:
            return server.post("/generate", body)

        engine_seconds, http_seconds = best(direct, 50), best(over_http, 50)
    engine.stop()
    print(
        f"engine {1000 * engine_seconds:.2f} ms, HTTP {1000 * http_seconds:.2f} ms, "
        f"ratio {http_seconds / engine_seconds:.1f}"
    )
