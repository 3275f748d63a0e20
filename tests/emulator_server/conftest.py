"""Servers that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pytest_quantguard.emulator.models import resolve_model

from .processes import Emulator, emulator


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """A server of a random two-layer model with 512 tokens and a context of 512."""
    with emulator(tmp_path_factory.mktemp("tiny") / "server.log") as running:
        yield running


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """A server of SmolLM2-135M in BF16, the model of the recorded answers."""
    resolve_model("smollm2-135m")
    with emulator(tmp_path_factory.mktemp("smollm2") / "server.log", "smollm2-135m") as running:
        yield running
