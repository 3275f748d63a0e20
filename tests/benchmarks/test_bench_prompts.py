"""How fast prompts are generated and analyzed, in seconds of one core (nothing is asserted on time).

pytest -m benchmark_suite tests/benchmarks/test_bench_prompts.py -s
"""

from __future__ import annotations

import resource
import time

import pytest

from pytest_quantguard.prompts.analysis import analyze
from pytest_quantguard.prompts.builtin import builtin_prompts, task_prompts
from pytest_quantguard.prompts.measures import measure_text
from pytest_quantguard.prompts.prompt import Prompt
from pytest_quantguard.prompts.tasks import TASKS

pytestmark = pytest.mark.benchmark_suite


@pytest.mark.parametrize("tokens", [512, 8192, 131_072])
def test_prompts_per_second(tokens: int) -> None:
    number = max(1, 60_000 // tokens)
    print(f"\n{tokens} tokens, prompts a second:", end="")
    for task in TASKS:
        start = time.process_time()
        assert len(task_prompts(task, number, tokens)) == number
        print(f"  {task} {number / (time.process_time() - start):.1f}", end="")
    print()


@pytest.mark.parametrize("number", [1_000, 100_000])
def test_analysis(number: int) -> None:
    pytest.importorskip("datasketch")
    made = builtin_prompts(size=min(number, 20_000), max_prompt_tokens=200)
    prompts = [
        Prompt(f"{index}", prompt.task, f"{index}: {prompt.text}")
        for index, prompt in zip(range(number), made * (number // len(made)), strict=True)
    ]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    analysis = analyze(prompts)
    seconds = time.process_time() - start
    megabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    characters = sum(len(prompt.text or "") for prompt in prompts)
    assert analysis.total.prompts == number
    start = time.process_time()
    for prompt in prompts[:1000]:
        measure_text(prompt.text or "")
    share = (time.process_time() - start) * number / 1000 / seconds
    print(
        f"\n{number} prompts of {characters / number:.0f} characters: {seconds:.1f} s "
        f"({share:.0%} of it measuring text), {megabytes:.0f} MB more memory"
    )
