"""The five generation tasks. Each is a generator from a seed, at any length, in English and Chinese."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pytest_quantguard.prompts.tasks import cwe, fwe, mcq, niah, qa
from pytest_quantguard.prompts.tasks.exercise import Exercise, Maker

TASKS: Mapping[str, Maker] = MappingProxyType(
    {"mcq": mcq.make, "qa": qa.make, "niah": niah.make, "cwe": cwe.make, "fwe": fwe.make}
)

__all__ = ["TASKS", "Exercise", "Maker"]
