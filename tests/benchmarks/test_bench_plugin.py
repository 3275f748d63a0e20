"""What the plugin costs a pytest run that does not use it: `pytest --collect-only` with and without it."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.benchmark_suite
ROUNDS = 7


def processor_seconds(folder: Path, *options: str) -> float:
    """User and system time of one run: unlike the clock, it does not depend on what else the machine does."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_cost_of_being_installed(tmp_path: Path) -> None:
    """Rounds alternate, so that both see the same machine."""
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n", encoding="utf-8")
    processor_seconds(tmp_path)
    without, with_plugin = [], []
    for _ in range(ROUNDS):
        without.append(processor_seconds(tmp_path, "-p", "no:quantguard"))
        with_plugin.append(processor_seconds(tmp_path))
    difference = statistics.median(a - b for a, b in zip(with_plugin, without, strict=True))
    print(
        f"\npytest --collect-only: {statistics.median(without) * 1e3:.0f} ms of CPU time without the plugin, "
        f"{statistics.median(with_plugin) * 1e3:.0f} ms with it installed and unused "
        f"(paired difference {difference * 1e3:+.1f} ms, ratio "
        f"{statistics.median(with_plugin) / statistics.median(without):.3f})"
    )
