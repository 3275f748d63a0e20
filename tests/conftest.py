"""What all tests share: the long ones run only when a marker expression asks for them.

Hypothesis tries the same examples every time, so that a failure belongs to the commit that has it;
`--hypothesis-profile=explore` draws new ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

pytest_plugins = ["pytester"]

LONG = {"slow", "sglang", "benchmark_suite"}
HERE = Path(__file__).parent

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeatable")


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
