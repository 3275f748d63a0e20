"""What the emulator says its numbers depend on."""

from __future__ import annotations

import numpy as np

from pytest_quantguard.emulator.arithmetic import describe_arithmetic


def test_it_names_library_and_instructions() -> None:
    numpy, blas, instructions = describe_arithmetic().split(", ")
    assert numpy == f"numpy {np.__version__}"
    assert len(blas.split()) == 2
    assert instructions
