"""What all tests share: the long ones run only when a marker expression asks for them, and what the machine
or a CI service says of itself reaches none.

Hypothesis tries the same examples every time, so that a failure belongs to the commit that has it;
`--hypothesis-profile=explore` draws new ones.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

with contextlib.suppress(ImportError):
    import datasketch  # noqa: F401 - here, as its parts in C load once per process and pytester forgets modules

pytest_plugins = ["pytester"]

LONG = {"slow", "sglang", "benchmark_suite"}
HERE = Path(__file__).parent

FOREIGN = (
    "CI",
    "BUILD_NUMBER",
    "CUDA_VISIBLE_DEVICES",
    "FORCE_COLOR",
    "NO_COLOR",
    "PY_COLORS",
    "PYTEST_ADDOPTS",
)
FOREIGN_PREFIXES = ("BUILDKITE_", "CI_", "GITHUB_", "SLURM_")

with contextlib.suppress(ImportError):  # Who runs an example here needs no more than the gate does.
    from hypothesis import settings

    settings.register_profile("repeatable", deadline=None, derandomize=True)
    settings.register_profile("explore", deadline=None)
    settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Leave out what changes outputs from machine to machine; a test sets what it needs.

    Proxies stay: the first use of the example's model goes through them. A gate that runs from a checkout is
    no test of ours, and hears everything.
    """
    if config.getoption("quantguard_config", None):
        return
    for name in list(os.environ):
        if name in FOREIGN or name.startswith(FOREIGN_PREFIXES):
            del os.environ[name]
    os.environ["COLUMNS"] = "80"
    sys.modules["pynvml"] = None  # type: ignore[assignment]  # what others do on this machine's GPUs


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("markexpr") or config.getoption("keyword"):
        return
    long_ones = [
        item
        for item in items
        if item.path.is_relative_to(HERE) and LONG & {m.name for m in item.iter_markers()}
    ]
    if long_ones:
        config.hook.pytest_deselected(items=long_ones)
        items[:] = [item for item in items if item not in set(long_ones)]
