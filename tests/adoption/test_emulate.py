"""`quantguard emulate` serves like the emulator that a config starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_quantguard.cli import main
from pytest_quantguard.config import EmulatorServer
from pytest_quantguard.serving.answers import GenerateRequest
from pytest_quantguard.serving.launch import start
from pytest_quantguard.serving.ports import HeldPort

TINY = Path(__file__).parents[1] / "data" / "models" / "bf16-tiny"


def test_serves_and_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest_quantguard.cli", "emulate"]
    config = EmulatorServer(
        backend="emulator", model_path=str(TINY), quantization="nvfp4", command=command, threads=1
    )
    with start(config, log_path=tmp_path / "server.log") as server:
        assert server.capabilities.quantization == "nvfp4"
        [answer] = server.client.generate([GenerateRequest(input_ids=(1, 2, 3), max_new_tokens=2)])
        assert len(answer.output_ids) == 2
        assert " emulate --model-path " in " ".join(server.command or ())


def test_what_cannot_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with HeldPort(None) as held:
        port = str(held.port)
    assert main(["emulate", "--model-path", str(tmp_path), "--port", port]) == 3
    assert "holds no config.json" in capsys.readouterr().err
