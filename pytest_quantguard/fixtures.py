"""Public fixtures for tests that users write beside the built-in gate. Their types load when they are
used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_quantguard.baseline.recording import Recording
    from pytest_quantguard.config import GateConfig
    from pytest_quantguard.gate.handle import Quantguard
    from pytest_quantguard.serving.launch import RunningServer


@pytest.fixture(scope="session")
def quantguard(request: pytest.FixtureRequest) -> Quantguard:
    """Measure the candidate and assert on its metrics; shares server and measurements with the built-in gate.

    With several `--quantguard-config` a test runs once for each.
    """
    from pytest_quantguard.gate.handle import handle_for

    return handle_for(request)


@pytest.fixture(scope="session")
def quantguard_config(quantguard: Quantguard) -> GateConfig:
    """The config as typed, frozen models."""
    return quantguard.config


@pytest.fixture(scope="session")
def quantguard_server(quantguard: Quantguard) -> RunningServer:
    """The running candidate: `.client`, `.url`, `.capabilities`, `.command`, `.log_path`."""
    return quantguard.server


@pytest.fixture(scope="session")
def quantguard_baseline(quantguard: Quantguard) -> Recording:
    """The stored recording of the BF16 reference: `.prompts`, `.cells`, `.noise_floor`, `.manifest`."""
    return quantguard.baseline
