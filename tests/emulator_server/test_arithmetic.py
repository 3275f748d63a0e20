"""What the emulator says its numbers depend on."""

from __future__ import annotations

import os

import numpy as np
import pytest

from pytest_quantguard.emulator.arithmetic import blas_threads, describe_arithmetic

CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.fixture(autouse=True)
def _no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({}, CPUS),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "64"}, 1),
        ({"OMP_NUM_THREADS": "100000"}, CPUS),
        ({"OMP_NUM_THREADS": "0"}, CPUS),
        ({"OMP_NUM_THREADS": "many"}, CPUS),
    ],
)
def test_threads_are_those_that_openblas_takes(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], threads: int
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert blas_threads() == threads


def test_it_names_library_instructions_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    numpy, blas, instructions, threads = describe_arithmetic().split(", ")
    assert numpy == f"numpy {np.__version__}"
    assert len(blas.split()) == 2
    assert instructions
    assert threads == "1 thread"
