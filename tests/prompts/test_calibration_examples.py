"""The example scripts need a GPU; their arguments and how they read a set can be tested without one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pytest_quantguard.prompts.calibration import CalibrationSet, write_calibration_set
from pytest_quantguard.prompts.prompt import Prompt

FOLDER = Path(__file__).parent.parent.parent / "examples" / "calibration"
NEEDED = ["--model", "org/model", "--calibration", "c.jsonl", "--output", "out"]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Recorder:
    """Stands in for a Hugging Face tokenizer; keeps what it was asked."""

    device = "cpu"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def __call__(self, text: Any, **options: Any) -> Any:
        self.calls.append((text, options))
        return Batch(input_ids=[[1, 2]])

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        return f"<user>{messages[0]['content']}<assistant>"


class Batch(dict[str, Any]):
    def to(self, device: str) -> Batch:
        assert device == "cpu"
        return self


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    path = tmp_path / "c.jsonl"
    prompts = tuple(Prompt(f"p{n}", "qa", f"text {n}\u2028more", language="en") for n in range(5))
    write_calibration_set(path, CalibrationSet(prompts, {}, ()))
    return path


def test_modelopt_arguments() -> None:
    script = load("modelopt_calibrate")
    parsed = script.parse_arguments(NEEDED)
    assert (parsed.format, parsed.kv_cache, parsed.max_tokens, parsed.batch_size) == ("nvfp4", "fp8", 2048, 4)
    assert script.parse_arguments([*NEEDED, "--format", "fp8", "--kv-cache", "none"]).format == "fp8"


def test_modelopt_calibration_passes_every_text_once(calibration: Path) -> None:
    script = load("modelopt_calibrate")
    arguments = script.parse_arguments([*NEEDED, "--batch-size", "2", "--max-tokens", "7"])
    texts = script.read_texts(calibration)
    assert texts == [f"text {n}\u2028more" for n in range(5)]
    tokenizer = Recorder()
    seen: list[dict[str, Any]] = []

    class Model:
        device = "cpu"

        def __call__(self, **inputs: Any) -> None:
            seen.append(inputs)

    script.calibration_loop(texts, tokenizer, arguments)(Model())
    assert [call[0] for call in tokenizer.calls] == [texts[:2], texts[2:4], texts[4:]]
    assert all(call[1]["max_length"] == 7 and call[1]["add_special_tokens"] for call in tokenizer.calls)
    assert len(seen) == 3


def test_llmcompressor_arguments_and_encoding() -> None:
    script = load("llmcompressor_calibrate")
    parsed = script.parse_arguments(NEEDED)
    assert (parsed.scheme, parsed.kv_cache, parsed.ignore) == ("NVFP4", "none", ["lm_head"])
    tokenizer = Recorder()
    assert script.encode({"text": "a", "task": "qa"}, tokenizer, parsed) == {"input_ids": [[1, 2]]}
    chat = script.parse_arguments([*NEEDED, "--chat", "--ignore", "lm_head", "re:.*gate$"])
    assert chat.ignore == ["lm_head", "re:.*gate$"]
    script.encode({"text": "a"}, tokenizer, chat)
    assert [call[0] for call in tokenizer.calls] == ["a", "<user>a<assistant>"]
    assert [call[1]["add_special_tokens"] for call in tokenizer.calls] == [True, False]


@pytest.mark.parametrize("name", ["modelopt_calibrate", "llmcompressor_calibrate"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --model, --calibration, --output"),
        ([*NEEDED, "--max-tokens", "0"], "must be at least 1"),
        ([*NEEDED, "--kv-cache", "int3"], "invalid choice: 'int3'"),
    ],
)
def test_bad_arguments(
    name: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load(name).parse_arguments(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_an_empty_set(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="holds no texts"):
        load("modelopt_calibrate").read_texts(tmp_path / "c.jsonl")
