"""A server that is killed at any moment of a gate or a capture: a red run that says so, and nothing left.

The moments are drawn.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from pytest_quantguard.baseline.answers import read_answers
from pytest_quantguard.baseline.store import read_recording
from pytest_quantguard.cli import main
from pytest_quantguard.config_file import load_config
from pytest_quantguard.gate.plan import plan_checks
from pytest_quantguard.results import read_result
from tests.plugin.test_emulated_gate import is_running, tiny_config, wait_for

pytestmark = pytest.mark.slow

SELECTED = ("-m", "slow or not slow", "-p", "no:cacheprovider")
OPTIONS = {"gate": (), "capture": ("--quantguard-update-baseline",), "accept": ("--quantguard-accept",)}
LONGEST = {"gate": 4.5, "capture": 1.6, "accept": 3.5}
"""Seconds between a server's start and its last answer, on a machine that is not busy."""


def whole_config() -> dict[str, Any]:
    """Accuracy, self-consistency, times and generated answers."""
    scenarios = [
        {"kind": "prefill_heavy", "input_tokens": 32, "requests": 8},
        {"kind": "decode_heavy", "input_tokens": 8, "output_tokens": 12, "requests": 8},
    ]
    tasks = {"qa": {"size": 4, "tokens": 90}, "niah": {"size": 4, "tokens": 90}}
    return {
        **tiny_config(),
        "speed": {
            "scenarios": scenarios,
            "rounds": 3,
            "warmup_rounds": 1,
            "levels": [1, 8],
            "max_scatter": 100,
        },
        "generation": {
            "tasks": tasks,
            "max_new_tokens": 24,
            "repeats": 1,
            "relative_score": None,
            "loops": None,
        },
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A gate with its baseline."""
    (tmp_path / "gate.yaml").write_text(yaml.safe_dump(whole_config()), encoding="utf-8")
    assert main(["capture", str(tmp_path / "gate.yaml"), "--output", str(tmp_path / "out")]) == 0
    return tmp_path


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def emulators(process: psutil.Process) -> Iterator[psutil.Process]:
    """Servers among the descendants; the supervisor's own command does not name the emulator."""
    for child in process.children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if "pytest_quantguard.emulator" in " ".join(child.cmdline()):
                yield child


def run_and_kill(folder: Path, mode: str, delay: float) -> int:
    """The exit code of a session whose server is killed `delay` seconds after its start, if it still runs."""
    with (folder / "said.txt").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "--quantguard-config=gate.yaml", *SELECTED, *OPTIONS[mode]],
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, "COLUMNS": "200"},
        )
    try:
        session = psutil.Process(process.pid)
        servers: list[psutil.Process] = []
        wait_for(lambda: servers.extend(emulators(session)) or servers, "the server's start")
        family = session.children(recursive=True)
        time.sleep(delay)
        with suppress(psutil.NoSuchProcess):
            servers[0].kill()
        code = process.wait(120)
        wait_for(lambda: not any(map(is_running, family)), "every process to end")
    finally:
        process.kill()
        process.wait()
    return code


def require_whole(folder: Path, mode: str) -> None:
    """A session that passed had every answer before its server died."""
    if mode != "capture":
        result = read_result(folder / ".quantguard" / "tiny")
        left_out = {"gate": set(), "accept": {"drift"}}[mode]
        planned = [
            check for check in plan_checks(load_config(folder / "gate.yaml")) if check.kind not in left_out
        ]
        assert len(result.checks) == len(planned)
        assert {check.outcome for check in result.checks} <= {"passed", "warned"}


@pytest.mark.parametrize("number", range(8))
def test_any_moment(folder: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A moment after the last answer, as a quick machine may meet, harms nothing; an earlier one follows."""
    monkeypatch.chdir(folder)
    draw = random.Random(number)
    mode = ("gate", "capture", "accept", "gate")[number % 4]
    delay, code = draw.uniform(0, LONGEST[mode]), 0
    while code == 0:
        before = files(folder / "baseline")
        code = run_and_kill(folder, mode, delay)
        if code == 0:
            require_whole(folder, mode)
        delay /= 2
    text = (folder / "said.txt").read_text(encoding="utf-8")
    assert "Traceback" not in text
    assert "INTERNALERROR" not in text
    assert not list(folder.rglob(".tmp-*"))
    assert "the server ended with exit code -9" in text
    if mode != "capture":
        assert read_result(folder / ".quantguard" / "tiny").verdict != "passed"
    assert files(folder / "baseline") == before
    read_recording(folder / "baseline")
    read_answers(folder / "baseline", command="x")
