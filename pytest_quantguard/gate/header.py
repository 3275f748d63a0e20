"""What a run says before anything is started: which config, who is on trial, against what, on what device."""

from __future__ import annotations

from collections import Counter

import pytest_quantguard
from pytest_quantguard.config import AttachServer, EmulatorServer, ServerConfig
from pytest_quantguard.gate.summary import describe_candidate
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.paths import shown_path, with_short_paths
from pytest_quantguard.report.visible import visible
from pytest_quantguard.serving.fingerprint import cpu_model, read_gpus


def header_lines(trial: Trial) -> list[str]:
    """For pytest's header; asks no server, only the driver of the GPUs."""
    config = trial.config
    lines = [
        f"quantguard {pytest_quantguard.__version__}: {config.name} ({shown_path(trial.config_path)})",
        f"  candidate: {describe_candidate(trial).title}",
        f"  device: {_device(config.candidate)}",
        f"  baseline: {shown_path(config.baseline)}",
    ]
    return [visible(with_short_paths(line)) for line in lines]


def _device(server: ServerConfig) -> str:
    if isinstance(server, AttachServer):
        return f"that of {server.url}"
    if isinstance(server, EmulatorServer):
        return f"CPU ({cpu_model()})"
    gpus = Counter(gpu.name for gpu in read_gpus())
    return ", ".join(f"{count} x {name}" for name, count in gpus.items()) or f"CPU ({cpu_model()})"
