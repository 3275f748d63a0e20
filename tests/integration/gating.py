"""Runs whole gates in processes of their own, as a user does, and reads their results."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pytest_quantguard.config import SglangServer
from pytest_quantguard.results import CellResult, RunResult, read_result

SUITE: dict[str, Any] = {
    "size": 8,
    "score_tokens": 32,
    "max_prompt_tokens": 128,
    "batch_sizes": [1, 8],
    "repeats": 2,
}
"""Small, since a real server on two cores decodes 20 tokens a second."""
SECONDS = 1200

Cells = Mapping[tuple[str, int], CellResult]


@dataclass(frozen=True)
class Gate:
    """What one run of pytest left behind."""

    exit_code: int
    output: str
    result: RunResult | None

    @property
    def cells(self) -> Cells:
        """The cold, first measurement of each (phase, batch size)."""
        assert self.result is not None
        return {
            (cell.phase, cell.batch_size): cell
            for cell in self.result.cells
            if not cell.warm and cell.repeat == 0
        }

    def failures(self) -> list[str]:
        assert self.result is not None
        return [check.id for check in self.result.failures]


def as_yaml(config: SglangServer) -> dict[str, Any]:
    """A server's part of the YAML."""
    return config.model_dump(mode="json", exclude_unset=True)


def emulated(**options: Any) -> dict[str, Any]:
    """A server's part of the YAML for the emulator of SmolLM2."""
    return {
        "backend": "emulator",
        "model_path": "smollm2-135m",
        "server_args": {"disable_radix_cache": True},
    } | options


def run_gate(folder: Path, name: str, config: dict[str, Any], *options: str) -> Gate:
    """Run `pytest --quantguard-config` in `folder`; the config is written to `<name>.yaml` there."""
    path = folder / f"{name}.yaml"
    accuracy = {"kl_mean": {"max": 1.0}}
    whole = {"version": 1, "name": name, "suite": SUITE, "accuracy": accuracy, "speed": None} | config
    path.write_text(yaml.safe_dump(whole, sort_keys=False))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", f"--quantguard-config={path}", "-q", *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    print(run.stdout)
    result_file = folder / ".quantguard" / name / "result.json"
    return Gate(run.returncode, run.stdout, read_result(result_file) if result_file.exists() else None)
