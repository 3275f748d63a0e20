"""`quantguard doctor` asks a real SGLang for its version and flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_quantguard.doctor.program import examine_program
from tests.integration.real_sglang.server import VERSION, server_config

pytestmark = pytest.mark.sglang


def test_version_and_flags(sglang_venv: Path, smollm2: Path) -> None:
    """One start of --help: the version is read, known flags pass, a misspelt one is named."""
    config = server_config(sglang_venv, smollm2)
    config = config.model_copy(update={"server_args": {**config.server_args, "disable_radix_cash": True}})
    version, flags = examine_program("candidate", config, ask=True)
    assert (version.status, version.text) == ("ok", VERSION)
    assert flags.status == "problem", flags.text
    assert flags.text == (
        "this version of SGLang does not know --disable-radix-cash (nearest known: --disable-radix-cache)"
    )
