"""One measurement of the engine in a process of its own: run_engine.py FOLDER CASE SCHEME -> a JSON
line."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from pytest_quantguard.emulator.threads import claim_threads

THREADS = claim_threads()  # Before numpy is imported.

import numpy as np  # noqa: E402

from pytest_quantguard.emulator.checkpoint import load_checkpoint  # noqa: E402
from pytest_quantguard.emulator.engine import Engine, SequenceRequest  # noqa: E402
from pytest_quantguard.emulator.model import Model  # noqa: E402

STEPS = 32


def main(folder: str, case: str, scheme: str) -> None:
    model = Model(load_checkpoint(Path(folder), quantization=scheme), threads=THREADS)
    engine = Engine(model, radix_cache=False)
    phase, _, size = case.partition(" ")
    batch, length = (int(part) for part in size.split("x")) if phase == "prefill" else (int(size), 32)
    draw = np.random.default_rng(0)

    def run(new: int) -> tuple[float, float]:
        prompts = draw.integers(1, model.config.vocab_size, (batch, length)).tolist()
        requests = [
            SequenceRequest(f"{new}-{i}", tuple(ids), max_new_tokens=new, ignore_eos=True)
            for i, ids in enumerate(prompts)
        ]
        wall, cpu = time.perf_counter(), time.process_time()
        for handle in engine.submit_batch(requests):
            handle.result()
        return time.perf_counter() - wall, time.process_time() - cpu

    run(2)
    long = [
        min(times)
        for times in zip(*(run(1 + STEPS if phase == "decode" else 0) for _ in range(3)), strict=True)
    ]
    short = (
        [min(times) for times in zip(*(run(1) for _ in range(3)), strict=True)]
        if phase == "decode"
        else [0.0, 0.0]
    )
    engine.stop()
    tokens = batch * (STEPS if phase == "decode" else length)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"tokens": tokens, "wall": long[0] - short[0], "cpu": long[1] - short[1], "peak": peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
