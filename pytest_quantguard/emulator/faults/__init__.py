"""The catalogue of faults: everything that can be wrong with an emulated server, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pytest_quantguard.emulator.faults.answers import ANSWER_FAULTS
from pytest_quantguard.emulator.faults.base import Fault, Severity, hooks_for, parse_fault
from pytest_quantguard.emulator.faults.runtime import RUNTIME_FAULTS
from pytest_quantguard.emulator.faults.weights import WEIGHT_FAULTS

__all__ = ["FAULTS", "Fault", "Severity", "hooks_for", "parse_fault"]

FAULTS: Mapping[str, type[Fault]] = MappingProxyType(
    {fault.name: fault for fault in (*WEIGHT_FAULTS, *RUNTIME_FAULTS, *ANSWER_FAULTS)}
)
