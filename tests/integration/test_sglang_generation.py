"""Questions answered in full by a real SGLang server: both routes, and answers that are ended early."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_quantguard.config_generation import GenerationConfig
from pytest_quantguard.generation.answer import GeneratedAnswer
from pytest_quantguard.measure.generation import Asking, answer_questions
from pytest_quantguard.measure.reference_answers import find_tokenizer, make_questions
from pytest_quantguard.prompts.builtin import task_prompts
from pytest_quantguard.serving.launch import RunningServer

pytestmark = [pytest.mark.slow, pytest.mark.sglang]

PROMPTS = task_prompts("niah", 4, 80)


def ask(
    server: RunningServer, config: GenerationConfig, asking: Asking, folder: Path | None = None
) -> tuple[GeneratedAnswer, ...]:
    questions = make_questions(PROMPTS, config, server.client, folder)
    return answer_questions(server.client, questions, asking, known={}, keep=lambda _: None)


def test_our_template_and_the_servers_are_one(bf16_server: RunningServer, smollm2: Path) -> None:
    native = GenerationConfig(max_new_tokens=24)
    assert find_tokenizer(native, bf16_server.capabilities) == smollm2
    ours = ask(bf16_server, native, Asking(concurrency=1), smollm2)
    theirs = ask(
        bf16_server,
        GenerationConfig(route="chat", max_new_tokens=24),
        Asking(route="chat", concurrency=1),
    )
    assert [answer.prompt_tokens for answer in ours] == [answer.prompt_tokens for answer in theirs]
    assert [answer.text for answer in ours] == [answer.text for answer in theirs]
    assert all(answer.text for answer in ours)


@pytest.mark.parametrize("route", ["native", "chat"])
def test_a_late_answer_is_ended_on_the_server(bf16_server: RunningServer, smollm2: Path, route: str) -> None:
    config = GenerationConfig.model_validate({"route": route, "max_new_tokens": 1500, "system": "Go on."})
    asking = Asking(route=config.route, concurrency=4, deadline=0.4, system="Count to 1000 in words.")
    answers = ask(bf16_server, config, asking, smollm2)
    late = [answer for answer in answers if answer.ending == "deadline"]
    assert late, "no answer takes longer than 0.4 s on such a machine"
    assert all(answer.completion_tokens < 1500 for answer in late)
    # The server is idle again: a flush is refused while a request runs.
    bf16_server.client.flush_cache()
