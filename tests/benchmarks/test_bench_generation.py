"""What keeping answers costs, and how the client's share of a question grows (nothing is asserted on time).

pytest -m benchmark_suite tests/benchmarks/test_bench_generation.py -s
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pytest_quantguard.generation.answer import GeneratedAnswer
from pytest_quantguard.generation.figures import AnswerPair, figures_of
from pytest_quantguard.measure.generation import Asking, answer_questions
from pytest_quantguard.measure.resume import open_resume_file
from pytest_quantguard.prompts.prompt import Prompt
from pytest_quantguard.serving.client import Client
from tests.generation.scripted import Script, serve
from tests.generation.test_asking import questions

pytestmark = pytest.mark.benchmark_suite


@pytest.mark.parametrize("tokens", [50, 1000])
def test_resume_file(tmp_path: Path, tokens: int) -> None:
    count = 5000
    answers = [
        GeneratedAnswer(
            id=f"qa-{number}",
            text="word " * tokens,
            output_ids=tuple(range(1000, 1000 + tokens)),
            ending="stop",
            prompt_tokens=500,
            completion_tokens=tokens,
            seconds=1.0,
        )
        for number in range(count)
    ]
    path = tmp_path / "generation.jsonl"
    start = time.perf_counter()
    with open_resume_file(path, "a" * 64, take_over=True) as file:
        for answer in answers:
            file.keep(answer)
    kept = time.perf_counter() - start
    start = time.perf_counter()
    with open_resume_file(path, "a" * 64, take_over=True) as file:
        assert len(file.known) == count
    read = time.perf_counter() - start
    print(
        f"\nanswers of {tokens} tokens: {kept / count * 1e6:.0f} us to keep one, "
        f"{read / count * 1e6:.0f} us to read one, {path.stat().st_size / count:.0f} bytes each"
    )


@pytest.mark.parametrize("concurrency", [1, 8, 64])
def test_asking(concurrency: int) -> None:
    """Against a server that answers at once: all of the time is the client's and this test server's."""
    asked = [
        question._replace(prompt=Prompt(f"{number}-{place}", "qa", question.prompt.text, gold=("x",)))
        for number in range(100)
        for place, question in enumerate(questions())
    ]
    with serve(Script()) as url, Client(url) as client:
        client.probe()
        start, used = time.perf_counter(), time.process_time()
        answer_questions(client, asked, Asking(concurrency=concurrency), known={}, keep=lambda _: None)
        seconds, used = time.perf_counter() - start, time.process_time() - used
    print(
        f"\n{len(asked)} questions, {concurrency} at a time: {len(asked) / seconds:.0f} a second, "
        f"{used / len(asked) * 1e3:.2f} ms of processor time each (client and test server)"
    )


def test_figures() -> None:
    texts = ["The answer is blue, since the sea is.", "It is red. " * 20, ""]
    pairs = [
        AnswerPair(
            Prompt(f"{number}", "qa", "Which colour has the sea? " * 40, gold=("blue",)),
            *(
                GeneratedAnswer(
                    id="x", text=text, output_ids=tuple(text.encode()), ending="stop", prompt_tokens=1,
                    completion_tokens=len(text), seconds=0,
                )
                for text in (texts[number % 3], texts[number % 2])
            ),
        )
        for number in range(1000)
    ]  # fmt: skip
    start = time.process_time()
    assert figures_of(pairs).prompts == 1000
    print(f"\nfigures of 1,000 pairs: {time.process_time() - start:.2f} s")
