"""Starts of a real server that fail or are interrupted: explained, and nothing is left."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pytest_quantguard.errors import ServerStartError
from pytest_quantguard.serving.launch import start
from tests.integration.gating import as_yaml
from tests.integration.killing import LONGEST_DELAY, kill_during
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
        ServerStartError, match=r"exit code 1, .*\nreading of the log: the model was not found"
    ):
        start(config, log_path=tmp_path / "server.log")


def test_a_format_without_its_checkpoint_is_read_from_the_log(
    sglang_venv: Path, smollm2: Path, tmp_path: Path
) -> None:
    config = server_config(sglang_venv, smollm2, quantization="awq")
    with pytest.raises(ServerStartError, match="the model folder holds no awq quantization config"):
        start(config, log_path=tmp_path / "server.log")


@pytest.mark.parametrize(
    ("victim", "moment"), [("pytest", "loading"), ("scheduler", "warming up"), ("pytest", "measuring")]
)
def test_nothing_is_left_of_a_killed_gate(
    sglang_venv: Path, smollm2: Path, tmp_path: Path, victim: str, moment: str
) -> None:
    """`kill -9` at a time drawn once for the moment; `tests.integration.killing` does more of them."""
    candidate = as_yaml(server_config(sglang_venv, smollm2, server_args={"disable_radix_cache": True}))
    delay = random.Random(moment).uniform(0, LONGEST_DELAY[moment])
    outcome = kill_during(tmp_path, candidate, victim=victim, moment=moment, delay=delay)
    print(outcome)
    assert outcome.victim == victim
    assert outcome.processes >= 4  # pytest, the supervisor, the server and its children
    assert outcome.left == ()
    if victim != "pytest":
        assert outcome.exit_code == 1  # the gate noticed
