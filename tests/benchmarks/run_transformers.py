"""The measurements of run_engine.py by `transformers` in float32: run_transformers.py FOLDER CASE -> a
JSON line."""

from __future__ import annotations

import json
import os
import resource
import sys
import time

import torch
from transformers import AutoModelForCausalLM

STEPS = 32


def main(folder: str, case: str) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    phase, _, size = case.partition(" ")
    batch, length = (int(part) for part in size.split("x")) if phase == "prefill" else (int(size), 32)

    def run(steps: int) -> tuple[float, float]:
        ids = torch.randint(1, model.config.vocab_size, (batch, length))
        wall, cpu = time.perf_counter(), time.process_time()
        answer = model(ids, use_cache=True, logits_to_keep=1)
        if steps:
            wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            token = answer.logits[:, -1:].argmax(-1)
            answer = model(token, past_key_values=answer.past_key_values, use_cache=True)
        return time.perf_counter() - wall, time.process_time() - cpu

    steps = STEPS if phase == "decode" else 0
    with torch.no_grad():
        run(min(steps, 2))
        wall, cpu = (min(times) for times in zip(*(run(steps) for _ in range(3)), strict=True))
    tokens = batch * (STEPS if phase == "decode" else length)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"tokens": tokens, "wall": wall, "cpu": cpu, "peak": peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
