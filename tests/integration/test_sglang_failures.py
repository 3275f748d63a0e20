"""Starts of a real server that fail or are interrupted: explained, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pytest_quantguard.errors import ServerStartError
from pytest_quantguard.serving.launch import start
from tests.integration.real_sglang.server import server_config

pytestmark = pytest.mark.sglang


def test_an_unknown_flag_is_named_with_the_nearest(sglang_venv: Path, smollm2: Path, tmp_path: Path) -> None:
    config = server_config(sglang_venv, smollm2, server_args={"disable_radix_cash": True})
    with pytest.raises(
        ServerStartError, match=r"--disable-radix-cash \(nearest known: --disable-radix-cache\)"
    ):
        start(config, log_path=tmp_path / "server.log")


def test_a_wrong_model_path_is_read_from_the_log(sglang_venv: Path, tmp_path: Path) -> None:
    config = server_config(sglang_venv, tmp_path / "no-model")
    with pytest.raises(
        ServerStartError, match=r"exit code 1 .*\nreading of the log: the model was not found"
    ):
        start(config, log_path=tmp_path / "server.log")


def test_a_format_without_its_checkpoint_is_read_from_the_log(
    sglang_venv: Path, smollm2: Path, tmp_path: Path
) -> None:
    config = server_config(sglang_venv, smollm2, quantization="awq")
    with pytest.raises(ServerStartError, match="the model folder holds no awq quantization config"):
        start(config, log_path=tmp_path / "server.log")


STARTER = """
import sys
from pathlib import Path
from pytest_quantguard.serving.launch import start
from tests.integration.real_sglang.server import server_config

config = server_config(Path(sys.argv[1]), Path(sys.argv[2]))
start(config, log_path=Path(sys.argv[3]), progress=lambda stage: print(stage, flush=True))
"""


@pytest.mark.parametrize("stage", ["starting the engine", "KV cache allocated"])
def test_a_killed_pytest_leaves_no_server(
    sglang_venv: Path, smollm2: Path, tmp_path: Path, stage: str
) -> None:
    """`kill -9` of the process that is starting a server, at two moments of its start."""
    owner = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(sglang_venv), str(smollm2), str(tmp_path / "server.log")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert owner.stdout is not None
    for line in owner.stdout:
        if line.startswith(stage):
            break
    tree = psutil.Process(owner.pid).children(recursive=True)
    assert len(tree) >= 3  # the supervisor, the server and its children
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 40
    while (left := [process for process in tree if process.is_running()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
