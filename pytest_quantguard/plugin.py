"""pytest options, markers and fixtures. Thin: everything else loads when a config is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_quantguard.fixtures import (
    quantguard,
    quantguard_baseline,
    quantguard_config,
    quantguard_server,
)

__all__ = ["quantguard", "quantguard_baseline", "quantguard_config", "quantguard_server"]

NEED_CONFIG = {
    "quantguard_update_baseline": "--quantguard-update-baseline",
    "quantguard_accept": "--quantguard-accept",
    "quantguard_add_times": "--quantguard-add-times",
    "quantguard_push": "--quantguard-push",
    "quantguard_repeats": "--quantguard-repeats",
    "quantguard_output": "--quantguard-output",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options, in a group of their own."""
    group = parser.getgroup("quantguard", "quantguard: a gate for quantized LLM servers")
    group.addoption(
        "--quantguard-config",
        action="append",
        default=[],
        metavar="FILE",
        help="YAML of a gate. Repeatable. Without paths on the command line only the gates run.",
    )
    group.addoption(
        "--quantguard-update-baseline",
        action="store_true",
        help="Start the reference server and record the baseline instead of running the gate.",
    )
    group.addoption(
        "--quantguard-accept",
        action="store_true",
        help="If everything else passes, store this run's answers as the accepted run for drift checks.",
    )
    group.addoption(
        "--quantguard-add-times",
        action="store_true",
        help="Time only, and add the times to those of the accepted run, as one more run.",
    )
    group.addoption(
        "--quantguard-push",
        action="store_true",
        help="Store the baseline or accepted run also at the URL that the config names as its baseline.",
    )
    group.addoption(
        "--quantguard-repeats",
        type=int,
        default=None,
        metavar="N",
        help="Measure each cell N times, to know the candidate's own jitter (default: once).",
    )
    group.addoption(
        "--quantguard-output",
        type=Path,
        default=None,
        metavar="DIR",
        help="Where results and logs go, one folder per config (default: .quantguard).",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register markers; start a session of ours if a config is given."""
    config.addinivalue_line("markers", "quantguard: a check of a quantguard gate")
    config.addinivalue_line("markers", "timed: times requests (deselect with -m 'not timed')")
    config.addinivalue_line("markers", "slow: takes long (deselect with -m 'not slow')")
    if config.getoption("quantguard_config"):
        from pytest_quantguard.gate.hooks import start_session

        start_session(config)
        return
    for option, flag in NEED_CONFIG.items():
        if config.getoption(option) not in (None, False):
            raise pytest.UsageError(f"{flag} needs --quantguard-config=FILE.")
