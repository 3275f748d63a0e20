"""The commands `analyze` and `calibration-set`, as their parsers and functions are called by `quantguard`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType

import orjson
import pytest

from pytest_quantguard.commands import analyze, calibration_set
from pytest_quantguard.errors import ConfigError, QuantguardError
from pytest_quantguard.prompts.builtin import task_prompts
from pytest_quantguard.prompts.tasks import TASKS

pytest.importorskip("datasketch")


def run(module: ModuleType, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return int(module.execute(parser.parse_args(arguments)))


@pytest.fixture
def evaluation(tmp_path: Path) -> str:
    """The public form of an evaluation set: task, question, gold."""
    path = tmp_path / "eval.jsonl"
    prompts = [prompt for task in TASKS for prompt in task_prompts(task, 6, 400)]
    path.write_bytes(
        b"".join(
            orjson.dumps({"task": prompt.task, "question": prompt.text, "gold": list(prompt.gold)}) + b"\n"
            for prompt in prompts
        )
    )
    return str(path)


def test_analyze_as_text(evaluation: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(analyze, evaluation, "--against", "builtin") == 0
    printed = capsys.readouterr().out
    assert "30 prompts, tokens estimated" in printed
    for task in TASKS:
        assert f"{task} " in printed
    assert "distance from builtin" in printed


def test_analyze_as_a_page(evaluation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "sub" / "page.html"
    hostile = tmp_path / "<b>x.jsonl"
    hostile.write_text(
        '{"task": "<script>alert(1)</script>", "text": "a\\u202eb <img src=x> c"}\n', encoding="utf-8"
    )
    assert run(analyze, evaluation, "--against", str(hostile), "--html", str(page)) == 0
    assert f"page written to {page}" in capsys.readouterr().err
    markup = page.read_text(encoding="utf-8")
    assert "<script" not in markup
    assert "<img" not in markup
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in markup
    for title in ("Share of each task", "Tokens of a prompt", "Low-meaning text by task"):
        assert f"<figcaption>{title}</figcaption>" in markup
    assert f"<title>fwe, {evaluation}: 20.0%</title>" in markup


def test_analyze_as_json(evaluation: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(
            analyze,
            "builtin",
            "--size",
            "20",
            "--max-prompt-tokens",
            "100",
            "--json",
            "--against",
            evaluation,
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["total"]["prompts"] == 20
    assert found["total"]["lengths"]["most"] <= 100
    assert found["against"]["name"] == evaluation
    assert 0 < found["against"]["tasks"] < 1


def test_calibration_set(evaluation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "calibration.jsonl"
    arguments = ["--like", evaluation, "--output", str(output), "--size", "40", "--max-tokens", "600"]
    assert run(calibration_set, *arguments, "--scale", "low_meaning=0.5", "--scale", "mcq=0", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompts"] == 40 == len(output.read_bytes().splitlines())
    assert all(kind["wanted"] == kind["found"] for kind in found["kinds"])
    assert "mcq" not in {kind["task"] for kind in found["kinds"]}
    assert run(calibration_set, *arguments) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("40 prompts")
    assert str(output) in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scale", "low_meaning"], "'low_meaning' is not NAME=FACTOR, such as low_meaning=0.3"),
        (["--scale", "cwe=much"], "'cwe=much' is not NAME=FACTOR"),
        (["--size", "0"], "expected a whole number above 0, found '0'"),
        (["--size", "many"], "expected a whole number above 0, found 'many'"),
        (["--max-tokens", "-5"], "expected a whole number above 0, found '-5'"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(calibration_set, "--like", "x", "--output", "y", *arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--size", "0"), ("--size", "-1"), ("--max-prompt-tokens", "0")])
def test_a_builtin_set_has_prompts(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(analyze, "builtin", f"{words[0]}={words[1]}")
    assert "expected a whole number above 0" in capsys.readouterr().err


def test_what_is_read_is_not_replaced(evaluation: str, tmp_path: Path) -> None:
    """The evaluation set, and the pool, under whatever name."""
    content = Path(evaluation).read_bytes()
    (tmp_path / "link.jsonl").symlink_to(evaluation)
    for output in (evaluation, str(tmp_path / "link.jsonl")):
        for words in (["--like", evaluation], ["--like", str(tmp_path / "none"), "--pool", evaluation]):
            with pytest.raises(ConfigError, match=r"would replace .*eval\.jsonl, which is read"):
                run(calibration_set, *words, "--output", output)
        for words in ([evaluation], ["builtin", "--against", evaluation]):
            with pytest.raises(ConfigError, match=r"would replace .*eval\.jsonl, which is read"):
                run(analyze, *words, "--html", output)
    assert Path(evaluation).read_bytes() == content


def test_a_page_that_cannot_be_written(evaluation: str, tmp_path: Path) -> None:
    with pytest.raises(
        QuantguardError, match=r"The page could not be written to .*, or choose another FILE\."
    ):
        run(analyze, evaluation, "--html", str(Path(evaluation) / "page.html"))
    assert [path.name for path in tmp_path.iterdir()] == ["eval.jsonl"]


def test_files_that_are_missing(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read"):
        run(analyze, missing)
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read"):
        run(calibration_set, "--like", missing, "--output", str(tmp_path / "out.jsonl"))
    assert not (tmp_path / "out.jsonl").exists()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        run(analyze, "builtin", "--tokenizer", str(tmp_path))
