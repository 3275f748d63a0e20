"""What of a fingerprint bears on numbers, and not on time only."""

from __future__ import annotations

import pytest

from pytest_quantguard.serving.fingerprint import Fingerprint, device_of

MACHINE: Fingerprint = {"gpu": None, "gpu_count": 0, "cpu": "EPYC 9575F", "cpu_count": 16, "system": "Linux"}


@pytest.mark.parametrize(
    ("facts", "device"),
    [
        ({**MACHINE, "gpu": "NVIDIA H200", "gpu_count": 2, "driver": "570.1"}, "2 x NVIDIA H200"),
        ({**MACHINE, "server_version": "0.5.23"}, "EPYC 9575F"),
        ({**MACHINE, "arithmetic": "numpy 2.4.6, 2 threads"}, "EPYC 9575F, numpy 2.4.6, 2 threads"),
        ({"machine": "not known: the server runs on another machine", "server_version": "0.5.23"}, None),
    ],
)
def test_the_device_of_a_fingerprint(facts: Fingerprint, device: str | None) -> None:
    assert device_of(facts) == device
