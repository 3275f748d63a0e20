"""The gate over real servers: the emulator with a tiny model, and with the model of the examples."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from pytest_quantguard.baseline.answers import read_answers
from pytest_quantguard.cli import main
from pytest_quantguard.prompts.tokenizer import ChatTokenizer
from pytest_quantguard.results import RunResult, read_result
from tests.generation.gate import without_answers

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "data" / "models" / "bf16-tiny"


def write_tiny(folder: Path, *, faults: list[str] | None = None, **generation: Any) -> Path:
    """A gate over the tiny model, which never ends an answer by itself."""
    server = {"backend": "emulator", "model_path": str(TINY), "threads": 1}
    config = {
        "version": 1,
        "name": "tiny",
        "reference": server,
        "candidate": {**server, "quantization": "nvfp4", "faults": faults or []},
        "baseline": "baseline",
        "accuracy": {"kl_mean": {"max": 1}},
        "speed": None,
        "generation": {
            "tasks": {"qa": {"size": 4, "tokens": 90}, "niah": {"size": 4, "tokens": 90}},
            "max_new_tokens": 24,
            "repeats": 1,
            "relative_score": None,
            "loops": None,
            **generation,
        },
    }
    path = folder / "gate.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


@pytest.fixture
def tiny(pytester: pytest.Pytester) -> Path:
    """A folder with the tiny model's stored answers."""
    without_answers(pytester.path / "baseline")
    gate = write_tiny(pytester.path)
    assert main(["capture", str(gate), "--generation", "--output", str(pytester.path / "out")]) == 0
    return pytester.path


def result_of(folder: Path, name: str = "tiny") -> RunResult:
    return read_result(folder / ".quantguard" / name)


def test_both_ways_through_a_real_server(tiny: Path, pytester: pytest.Pytester) -> None:
    stored = read_answers(tiny / "baseline", command="x")
    ids = stored.answers[0].input_ids
    assert ids is not None
    text = ChatTokenizer(TINY).decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>user")
    assert text.count("<|im_start|>") == 2, "no token is doubled"
    assert {answer.answer.ending for answer in stored.answers} == {"length"}
    result = pytester.runpytest("--quantguard-config=gate.yaml", "-m", "slow")
    assert (result.ret, result.parseoutcomes()["passed"]) == (0, 4)
    found = result_of(tiny).generation
    assert found is not None
    assert (found.overall.prompts, found.overall.runaways, found.overall.reference_runaways) == (8, 0, 8)
    assert found.overall.output_tokens == 8 * 24


@pytest.mark.slow
def test_an_interrupted_run_goes_on(tiny: Path) -> None:
    write_tiny(tiny, faults=["slow_step:share=20"], concurrency=1)
    kept = tiny / ".quantguard" / "tiny" / "generation.jsonl"
    # A runner in the background has SIGINT ignored, and its children inherit that.
    heeded = "import signal, pytest; signal.signal(2, signal.default_int_handler); pytest.console_main()"
    command = [sys.executable, "-c", heeded, "--quantguard-config=gate.yaml", "-m", "slow"]
    process = subprocess.Popen(command, cwd=tiny, stdout=subprocess.DEVNULL, env={**os.environ})
    try:
        deadline = time.monotonic() + 120
        while not (kept.is_file() and len(kept.read_bytes().splitlines()) >= 3):
            assert time.monotonic() < deadline, "no answer was kept"
            assert process.poll() is None, "the run was over before it could be interrupted"
            time.sleep(0.02)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.wait(60)
        assert not [child for child in family if child.is_running() and child.status() != "zombie"]
    finally:
        process.kill()
        process.wait()
    before = len(kept.read_bytes().splitlines()) - 1
    assert 2 <= before < 8
    subprocess.run(command, cwd=tiny, check=True, stdout=subprocess.DEVNULL)
    result = result_of(tiny)
    assert result.verdict == "passed"
    assert result.generation is not None
    assert result.generation.resumed == before
    assert any("taken over from the interrupted run" in note for note in result.generation.notes)
    assert not kept.exists()


# --- the model of the examples ---


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The generation example with few prompts, and the answers of its reference."""
    folder = tmp_path_factory.mktemp("smollm2")
    without_answers(folder / "baseline")
    config = {
        "extends": str(ROOT / "examples" / "smollm2-generation.yaml"),
        "name": "small",
        "baseline": "baseline",
        "generation": {
            "tasks": {
                "mcq": {"size": 3},
                "qa": {"size": 4},
                "niah": {"size": 5, "score": {"min": 0.5}},
                "cwe": {"size": 1},
                "fwe": {"size": 4},
            },
            "max_new_tokens": 64,
            "repeats": 1,
            "concurrency": 17,
            "relative_score": {"min": 0.7},
            "runaways": {"max": 0.3},
        },
    }
    (folder / "small.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    for name, candidate in (("four-bit", {"quantization": "nvfp4"}), ("runaway", {"faults": ["runaway"]})):
        changed = {"extends": "small.yaml", "name": name, "candidate": candidate}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(changed), encoding="utf-8")
    assert main(["capture", str(folder / "small.yaml"), "--generation", "--output", str(folder / "out")]) == 0
    yield folder
    shutil.rmtree(folder)


def run(folder: Path, name: str) -> RunResult:
    command = [sys.executable, "-m", "pytest", f"--quantguard-config={name}.yaml", "-m", "slow", "-q"]
    subprocess.run(command, cwd=folder, check=False, stdout=subprocess.DEVNULL)
    return result_of(folder, name)


@pytest.mark.slow
def test_fp8_answers_like_bf16(small: Path) -> None:
    result = run(small, "small")
    assert result.verdict == "passed", [check.message for check in result.failures]
    assert result.generation is not None
    assert set(result.generation.tasks) == {"mcq", "qa", "niah", "cwe", "fwe"}
    assert result.generation.tasks["niah"].reference_score >= 0.8, "the reference can do it"


@pytest.mark.slow
def test_four_bits_lose_answers_of_so_small_a_model(small: Path) -> None:
    result = run(small, "four-bit")
    assert "generation[relative_score]" in [check.id for check in result.failures]
    assert result.generation is not None
    assert result.generation.overall.lost > result.generation.overall.won
    flips = [answer for answer in result.generation.answers if "lost" in answer.signs]
    assert flips
    assert all(answer.reference.text and answer.question for answer in flips)


@pytest.mark.slow
def test_a_runaway_is_cut_off_and_caught(small: Path) -> None:
    result = run(small, "runaway")
    assert "generation[runaways]" in [check.id for check in result.failures]
    assert result.generation is not None
    overall = result.generation.overall
    assert overall.runaways + overall.reference_runaways == overall.prompts, "no answer ends by itself"
    assert overall.output_tokens <= overall.prompts * 64
