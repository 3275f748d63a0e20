"""What the client costs: reading a large answer against its JSON alone, a request against a bare
requests.post.

OMP_NUM_THREADS=1 pytest -m benchmark_suite tests/benchmarks/test_bench_serving.py -s
Ratios within one run; nothing is asserted about time.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import requests

from pytest_quantguard.config import EmulatorServer
from pytest_quantguard.serving.answers import GenerateRequest
from pytest_quantguard.serving.client import Client
from pytest_quantguard.serving.launch import start
from pytest_quantguard.serving.payload import generate_body
from pytest_quantguard.serving.reading import read_answers, split_answers

pytestmark = pytest.mark.benchmark_suite

PROMPTS, POSITIONS, WIDTH, VOCAB = 32, 128, 256, 49_152
PREFIX = 100
MODEL = Path(__file__).parents[1] / "data" / "models" / "bf16-tiny"

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
body = open(sys.argv[1], "rb").read()
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


def fastest(*actions: Callable[[], object], repeats: int = 7) -> list[float]:
    """Seconds of each action's fastest run; they take turns, so that a busy machine slows all alike."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(repeats):
        for action, taken in zip(actions, times, strict=True):
            began = time.perf_counter()
            action()
            taken.append(time.perf_counter() - began)
    return [min(taken) for taken in times]


def large_batch() -> list[GenerateRequest]:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, (PROMPTS, PREFIX + POSITIONS))
    return [GenerateRequest(tuple(row.tolist()), logprob_start_len=PREFIX - 1) for row in ids]


def large_answer(batch: list[GenerateRequest], *, flat: bool) -> bytes:
    """An answer of the size of the largest request of a suite, in either form."""
    rng = np.random.default_rng(1)
    items = []
    for request in batch:
        values = -np.sort(rng.exponential(4, (POSITIONS, WIDTH)).astype(np.float32), axis=1)
        ids = rng.integers(0, VOCAB, (POSITIONS, WIDTH), dtype=np.int32)
        scored = request.input_ids[PREFIX - 1 :]
        meta: dict[str, Any] = {
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": 0,
            "input_token_logprobs": [
                [None if i == 0 else -1.5, token, None] for i, token in enumerate(scored)
            ],
        }
        if flat:
            meta |= {
                "input_top_logprobs_val_flat_b64": base64.b64encode(values.tobytes()).decode(),
                "input_top_logprobs_idx_flat_b64": base64.b64encode(ids.tobytes()).decode(),
                "input_top_logprobs_shape": [POSITIONS, WIDTH],
                "input_top_logprobs_null_prefix": 1,
            }
        else:
            meta["input_top_logprobs"] = [
                None,
                *(
                    [[float(value), int(token), None] for value, token in zip(*row, strict=True)]
                    for row in zip(values, ids, strict=True)
                ),
            ]
        items.append({"text": "", "output_ids": [], "meta_info": meta})
    return orjson.dumps(items)


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_reading_a_large_answer(form: str) -> None:
    batch = large_batch()
    body = large_answer(batch, flat=form == "flat")
    alone, whole = fastest(
        lambda: orjson.loads(body),
        lambda: read_answers(split_answers(body, batch), batch, top_logprobs=WIDTH, vocab_size=VOCAB),
    )
    print(
        f"\n{form} answer of {PROMPTS} x {POSITIONS} x {WIDTH}, {len(body) / 1e6:.1f} MB: orjson.loads alone "
        f"{alone * 1e3:.1f} ms, checked arrays {whole * 1e3:.1f} ms, ratio {whole / alone:.2f}"
    )


@pytest.fixture
def canned(tmp_path: Path) -> Iterator[Callable[[bytes], str]]:
    """Urls of processes that answer every request with the same bytes."""
    processes = []

    def serve(body: bytes) -> str:
        file = tmp_path / f"body{len(processes)}"
        file.write_bytes(body)
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(file)], stdout=subprocess.PIPE, encoding="utf-8"
        )
        processes.append(process)
        assert process.stdout is not None
        return f"http://127.0.0.1:{int(process.stdout.readline())}"

    yield serve
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_request_against_bare_requests(canned: Callable[[bytes], str], size: str) -> None:
    batch = large_batch() if size == "large" else large_batch()[:1]
    body = large_answer(batch, flat=True)
    url = canned(body)
    payload = generate_body(batch, top_logprobs=WIDTH)
    session = requests.Session()
    session.trust_env = False
    with Client(url, vocab_size=VOCAB) as client:
        bare, ours = fastest(
            lambda: session.post(f"{url}/generate", json=payload).json(),
            lambda: client.generate(batch, top_logprobs=WIDTH),
            repeats=30,
        )
    print(
        f"\n{size} request ({len(body) / 1e6:.2f} MB answer): requests.post(json=).json() {bare * 1e3:.2f} "
        "ms, "
        f"client.generate {ours * 1e3:.2f} ms, overhead {(ours - bare) * 1e3:+.2f} ms"
    )


def test_launch_to_ready(tmp_path: Path) -> None:
    """A tiny model, so that what is measured is starting, finding ready, identifying and stopping."""
    config = EmulatorServer(backend="emulator", model_path=str(MODEL), threads=1)
    began = time.perf_counter()
    with start(config, log_path=tmp_path / "server.log") as server:
        ready = time.perf_counter() - began
        generated = server.seconds_to_ready
    total = time.perf_counter() - began
    imports = fastest(
        lambda: subprocess.run(
            [sys.executable, "-c", "import pytest_quantguard.emulator.server"], check=True
        ),
        repeats=3,
    )[0]
    print(
        f"\nemulator of a tiny model: first token after {generated:.2f} s, identified after {ready:.2f} s, "
        f"stopped after {total:.2f} s; importing its server alone takes {imports:.2f} s"
    )
