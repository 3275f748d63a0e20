"""What all tests share: the long ones run only when a marker expression asks for them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

LONG = {"slow", "sglang", "benchmark_suite"}
HERE = Path(__file__).parent


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
