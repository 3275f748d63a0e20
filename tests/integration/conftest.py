"""A real SGLang server for the tests of this folder. Its start takes half a minute, so that tests share
it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_quantguard.serving.launch import RunningServer, start
from tests.integration.real_sglang.server import ensure_installed, server_config, why_impossible


@pytest.fixture(scope="session")
def sglang_venv() -> Path:
    """The virtual environment with SGLang; skips with the reason where there can be none."""
    reason = why_impossible()
    if reason is not None:
        pytest.skip(f"no real SGLang server: {reason}")
    return ensure_installed()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The BF16 folder of SmolLM2-135M-Instruct."""
    from pytest_quantguard.emulator.models import resolve_model

    return resolve_model("smollm2-135m")


@pytest.fixture(scope="module")
def bf16_server(
    sglang_venv: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A BF16 server without the overlap scheduler, shared by a module."""
    log = tmp_path_factory.mktemp("bf16") / "server.log"
    with start(server_config(sglang_venv, smollm2), log_path=log) as server:
        yield server
