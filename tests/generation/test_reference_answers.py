"""How texts become the reference's questions: tokenizer, template, budgets, context."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pytest_quantguard.config_generation import GenerationConfig
from pytest_quantguard.errors import ConfigError
from pytest_quantguard.generation.answer import Ending, GeneratedAnswer, Question
from pytest_quantguard.measure.reference_answers import (
    candidate_budget,
    find_tokenizer,
    fit_questions,
    make_questions,
)
from pytest_quantguard.prompts.prompt import Prompt
from pytest_quantguard.prompts.tokenizer import ChatTokenizer
from pytest_quantguard.serving.answers import Capabilities
from pytest_quantguard.serving.client import Client
from tests.generation.scripted import Script

TINY = Path(__file__).parents[1] / "data" / "models" / "bf16-tiny"
PROMPT = Prompt("q", "qa", "Who lives there?", gold=("Ines",))


@pytest.fixture
def same_tokenizer(script: Script) -> ChatTokenizer:
    """The server tokenizes as the tiny model does."""
    tokenizer = ChatTokenizer(TINY)
    script.tokenize = lambda text: list(tokenizer.encode_plain(text))
    return tokenizer


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A copy of the tiny model's tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path / name)
    return tmp_path


def with_template(folder: Path, template: str | None) -> None:
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings.pop("chat_template")
    if template is not None:
        settings["chat_template"] = template
    path.write_text(json.dumps(settings), encoding="utf-8")


def test_the_template_is_applied_here(client: Client, same_tokenizer: ChatTokenizer) -> None:
    config = GenerationConfig(system="Be brief.", max_new_tokens=9)
    (question,) = make_questions([PROMPT], config, client, TINY)
    assert question.input_ids is not None
    text = same_tokenizer.decode(question.input_ids, skip_special_tokens=False)
    assert "Be brief." in text
    assert text.index("Be brief.") < text.index("Who lives there?")
    assert text.rstrip().endswith("assistant")
    assert question.prompt_tokens == len(question.input_ids)
    assert question.max_new_tokens == 9


def test_plain_text_needs_no_tokenizer_here(client: Client) -> None:
    (question,) = make_questions([PROMPT], GenerationConfig(chat_template=False), client, None)
    assert question.input_ids == tuple(b"Who lives there?")


def test_token_ids_are_sent_as_they_are(client: Client) -> None:
    prompt = Prompt("q", "qa", token_ids=(5, 6, 7), gold=("x",))
    (question,) = make_questions([prompt], GenerationConfig(), client, TINY)
    assert question.input_ids == (5, 6, 7)


def test_another_models_tokenizer_is_refused(client: Client) -> None:
    with pytest.raises(ConfigError, match=r"is not the server's.*first at token 0.*generation\.tokenizer"):
        make_questions([PROMPT], GenerationConfig(), client, TINY)


@pytest.mark.usefixtures("same_tokenizer")
@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('needs tools') }}", "fails on these messages: TemplateError: needs tools"),
        ("{% for tool in tools %}{{ tool }}{% endfor %}", "fails on these messages.*tool list"),
        ("{% if %}", "fails on these messages: TemplateSyntaxError"),
    ],
)
def test_templates_that_fail(client: Client, model_folder: Path, template: str | None, message: str) -> None:
    with_template(model_folder, template)
    with pytest.raises(ConfigError, match=message):
        make_questions([PROMPT], GenerationConfig(), client, model_folder)


@pytest.mark.usefixtures("same_tokenizer")
def test_template_variables_mend_a_template_that_needs_them(client: Client, model_folder: Path) -> None:
    with_template(model_folder, "{% for tool in tools %}{{ tool }}{% endfor %}{{ messages[0]['content'] }}")
    config = GenerationConfig(template_variables={"tools": ["lamp"]})
    (question,) = make_questions([PROMPT], config, client, model_folder)
    assert question.input_ids is not None
    assert ChatTokenizer(model_folder).decode(question.input_ids) == "lampWho lives there?"


def test_no_tokenizer_in_the_folder(client: Client, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        make_questions([PROMPT], GenerationConfig(), client, tmp_path)


def capabilities(**server_args: object) -> Capabilities:
    return Capabilities(
        kind="sglang", version="1", model_path=str(TINY), dtype=None, quantization=None, kv_cache_dtype=None,
        vocab_size=None, context_length=None, flat_logprobs=False, forced_decode=None, deterministic=None,
        radix_cache=None, chunked_prefill_size=None, device=None, server_args=server_args,
    )  # fmt: skip


def test_where_the_tokenizer_is_found(model_folder: Path, tmp_path: Path) -> None:
    own = {"model_folder": str(model_folder)}
    assert find_tokenizer(GenerationConfig(), capabilities(quantguard_emulator=own)) == model_folder
    assert find_tokenizer(GenerationConfig(), capabilities(tokenizer_path=str(model_folder))) == model_folder
    assert find_tokenizer(GenerationConfig(), capabilities()) == TINY
    assert find_tokenizer(GenerationConfig(tokenizer=tmp_path), capabilities()) == tmp_path


@pytest.mark.parametrize(
    ("tokens", "ending", "factor", "budget"),
    [
        (10, "stop", 4.0, 128),
        (100, "stop", 4.0, 400),
        (100, "stop", None, 500),
        (200, "stop", 4.0, 500),
        (90, "length", 1.0, 500),
    ],
)
def test_budgets(tokens: int, ending: Ending, factor: float | None, budget: int) -> None:
    config = GenerationConfig(max_new_tokens=500, budget_factor=factor)
    answer = GeneratedAnswer(
        id="q", text="", ending=ending, prompt_tokens=1, completion_tokens=tokens, seconds=0
    )
    assert candidate_budget(config, "qa", answer) == budget


def test_a_task_may_have_its_own_limit() -> None:
    config = GenerationConfig.model_validate({"tasks": {"qa": {"max_new_tokens": 50}}, "max_new_tokens": 500})
    answer = GeneratedAnswer(id="q", text="", ending="stop", prompt_tokens=1, completion_tokens=40, seconds=0)
    assert candidate_budget(config, "qa", answer) == 50


def test_the_context_must_hold_prompt_and_answer() -> None:
    questions = [Question(Prompt(f"q{n}", "qa", "x"), (1,) * n, n, 10) for n in (20, 40, 41)]
    asked = fit_questions(questions, GenerationConfig(), 50)
    assert [question.prompt.id for question in asked.questions] == ["q20", "q40"]
    assert asked.skipped == ("q41",)
    assert fit_questions(questions, GenerationConfig(), None).skipped == ()
