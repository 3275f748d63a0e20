"""Which questions a config asks, and every way in which a file of questions can be wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_quantguard.config_file import load_config
from pytest_quantguard.config_generation import GenerationConfig
from pytest_quantguard.config_schema import json_schema
from pytest_quantguard.errors import ConfigError
from pytest_quantguard.gate.plan import plan_checks
from pytest_quantguard.generation.metrics import GENERATION_METRICS
from pytest_quantguard.prompts.questions import load_questions

GOOD = {"task": "qa", "question": "Who?", "gold": "Ines"}


def load(tmp_path: Path, *lines: object, **keys: Any) -> list[str]:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (tmp_path / "mine.jsonl").write_text(text, encoding="utf-8")
    config = GenerationConfig.model_validate({"prompts": "mine.jsonl", **keys})
    return [prompt.id for prompt in load_questions(config, base_folder=tmp_path)]


def test_all_five_tasks_by_default(tmp_path: Path) -> None:
    prompts = load_questions(GenerationConfig(), base_folder=tmp_path)
    counts = {
        task: sum(prompt.task == task for prompt in prompts) for task in ("mcq", "qa", "niah", "cwe", "fwe")
    }
    assert set(counts.values()) == {30}
    assert all(prompt.gold for prompt in prompts)
    assert load_questions(GenerationConfig(), base_folder=tmp_path) == prompts, "the same on every run"
    assert load_questions(GenerationConfig(seed=1), base_folder=tmp_path) != prompts


def test_size_length_and_languages(tmp_path: Path) -> None:
    config = GenerationConfig.model_validate(
        {
            "tasks": {
                "qa": {"size": 4, "tokens": 120, "languages": ["en", "zh"]},
                "niah": {"size": 2, "tokens": 90},
            }
        }
    )
    prompts = load_questions(config, base_folder=tmp_path)
    assert [prompt.task for prompt in prompts] == ["qa"] * 4 + ["niah"] * 2
    assert [prompt.language for prompt in prompts[:4]] == ["en", "zh", "en", "zh"]


def test_a_task_that_cannot_be_so_short(tmp_path: Path) -> None:
    config = GenerationConfig.model_validate({"tasks": {"cwe": {"tokens": 20}}})
    with pytest.raises(
        ConfigError, match=r"cwe\.tokens is 20, but some of its questions need \d+ tokens"
    ) as caught:
        load_questions(config, base_folder=tmp_path)
    enough = re.search(r"need (\d+) tokens", str(caught.value))
    assert enough is not None
    mended = GenerationConfig.model_validate({"tasks": {"cwe": {"tokens": int(enough[1])}}})
    assert len(load_questions(mended, base_folder=tmp_path)) == 30


def test_the_public_form_is_read(tmp_path: Path) -> None:
    lines = [
        GOOD,
        {"task": "lcx", "question": "x", "gold": ["a", "b"]},
        {"task": "my own", "question": "y", "gold": 7},
    ]
    assert load(tmp_path, *lines) == ["line-1", "line-2", "line-3"]


def test_tasks_choose_from_a_file(tmp_path: Path) -> None:
    lines = [GOOD, {**GOOD, "task": "cwe"}, GOOD, GOOD]
    assert load(tmp_path, *lines, tasks={"qa": {"size": 2}}) == ["line-1", "line-3"]
    with pytest.raises(
        ConfigError, match=r"generation\.tasks\.fwe: mine\.jsonl has no prompt of this task; it has cwe, qa"
    ):
        load(tmp_path, *lines, tasks={"fwe": {}})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{not json", "line 2: no JSON"),
        ("", "line 2: empty"),
        ({"task": "qa", "question": "Who?"}, "line 2: there is no gold answer"),
        ({**GOOD, "task": "mcq", "gold": "Ines"}, "line 2: the gold answer of an mcq must be one letter"),
        ({**GOOD, "gold": "?!"}, "line 2: the gold answer '\\?!' holds nothing that could be compared"),
        ({**GOOD, "gold": []}, "line 2: `gold` must be an answer or a list of answers"),
        ({"task": "qa", "question": " ", "gold": "x"}, "line 2: `question` must be a text that is not blank"),
        ("[1, 2]", "line 2: not an object"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, bad: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, GOOD, bad, GOOD)


def test_no_file_names_the_key(tmp_path: Path) -> None:
    config = GenerationConfig(prompts="none.jsonl")
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read.*`generation\.prompts`"):
        load_questions(config, base_folder=tmp_path)


def test_token_ids_cannot_go_by_chat(tmp_path: Path) -> None:
    line = {"task": "qa", "token_ids": [1, 2], "gold": "x"}
    assert load(tmp_path, line) == ["line-1"]
    with pytest.raises(ConfigError, match=r"line-1 of mine\.jsonl has token ids and no text.*route: native"):
        load(tmp_path, line, route="chat")


# --- the config ---

GATE = {
    "version": 1,
    "name": "g",
    "candidate": {"backend": "attach", "url": "http://127.0.0.1:1"},
    "baseline": "base",
    "accuracy": {"kl_mean": {"max": 1}},
}


def gate(tmp_path: Path, generation: Any) -> Any:
    path = tmp_path / "gate.yaml"
    path.write_text(yaml.safe_dump({**GATE, "generation": generation}), encoding="utf-8")
    return load_config(path)


def checks(tmp_path: Path, generation: Any) -> list[str]:
    return [check.name for check in plan_checks(gate(tmp_path, generation)) if check.kind == "generation"]


def test_checks_of_all_and_of_single_tasks(tmp_path: Path) -> None:
    names = checks(
        tmp_path, {"tasks": {"qa": {"score": {"min": 0.5}}, "cwe": {}}, "echoes": None, "loops": None}
    )
    assert names == [
        "generation[relative_score]",
        "generation[runaways]",
        "generation[empty_answers]",
        "generation[length_ratio]",
        "generation[qa-score]",
    ]


def test_without_the_section_nothing_is_asked(tmp_path: Path) -> None:
    assert checks(tmp_path, None) == []


def test_paths_start_at_the_file(tmp_path: Path) -> None:
    config = gate(tmp_path, {"prompts": "q.jsonl", "tokenizer": "model"})
    assert config.generation.prompts == str(tmp_path / "q.jsonl")
    assert config.generation.tokenizer == tmp_path / "model"
    assert gate(tmp_path, {}).generation.prompts == "builtin"


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"tasks": {"quiz": {}}}, "there is no built-in task 'quiz'; known: mcq, qa, niah, cwe, fwe"),
        ({"prompts": "q.jsonl", "tasks": {"qa": {"tokens": 9}}}, "tasks.qa.tokens is for built-in questions"),
        ({"runaways": {"min": 1}}, "runaways is better lower: bound it with 'max'"),
        ({"tasks": {"qa": {"score": {"max": 1}}}}, "score is better higher: bound it with 'min'"),
        ({"loss_p": {"min": 0.01, "decision": "proven_bad"}}, "its decision is always point"),
        ({"route": "chat", "chat_template": False}, "route chat always goes through the server's template"),
        ({"chat_template": False, "system": "Hi"}, "need the chat template"),
        ({"concurrency": 0}, "generation.concurrency is 0"),
        ({"deadline": 0}, "generation.deadline is 0"),
        ({"task": {}}, "did you mean 'tasks'?"),
        ({"tasks": {}}, "generation.tasks"),
    ],
)
def test_impossible_settings(tmp_path: Path, generation: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        gate(tmp_path, generation)
    assert message in str(caught.value)
    assert "gate.yaml" in str(caught.value)


def test_every_metric_has_a_key() -> None:
    properties = json_schema()["$defs"]["GenerationConfig"]["properties"]
    assert set(GENERATION_METRICS) <= set(properties)
