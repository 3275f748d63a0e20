"""Waiting for GPU memory, with a stand-in for NVML."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from pytest_quantguard.serving import gpu_memory

GIB = 1 << 30


class FakeNvml(ModuleType):
    """Two devices; the second one's memory is what `later` says, call by call."""

    def __init__(self, later: list[int], *, driver: bool = True) -> None:
        super().__init__("pynvml")
        self.later = later
        self.driver = driver
        self.NVMLError = RuntimeError

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise self.NVMLError("no driver")

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, index: int) -> bytes:  # noqa: N802
        return f"GPU-0{index}".encode()

    def nvmlDeviceGetMemoryInfo(self, index: int) -> SimpleNamespace:  # noqa: N802
        if index == 0:
            return SimpleNamespace(used=GIB)
        return SimpleNamespace(used=self.later.pop(0) if len(self.later) > 1 else self.later[0])


def test_it_waits_until_the_memory_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([2 * GIB, 40 * GIB, 20 * GIB, 2 * GIB + 100 * gpu_memory.MIB])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    before = gpu_memory.used_bytes()
    assert before == {0: GIB, 1: 2 * GIB}
    assert gpu_memory.wait_until_freed(before) is None
    assert len(nvml.later) == 1


@pytest.mark.parametrize(
    ("devices", "seen"),
    [("0", [0]), ("1", [1]), ("GPU-01", [1]), ("1,0", [0, 1]), ("", []), ("MIG-1", [0, 1])],
)
def test_other_peoples_devices_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, devices: str, seen: list[int]
) -> None:
    """Another server that starts on the second device while ours on the first one ends."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([GIB, 40 * GIB]))
    before = gpu_memory.used_bytes(devices)
    assert before == dict.fromkeys(seen, GIB)
    sentence = gpu_memory.wait_until_freed(before, devices, seconds=0.1)
    assert (sentence is not None) == (1 in seen)


def test_memory_that_stays_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([42 * GIB]))
    sentence = gpu_memory.wait_until_freed({0: GIB, 1: 2 * GIB}, seconds=0.1)
    assert sentence == "0.1 s after the server ended, GPU 1 still uses 40960 MiB more than before its start"


def test_without_nvml_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_memory.used_bytes() == {}
    assert gpu_memory.wait_until_freed({}) is None
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([GIB], driver=False))
    assert gpu_memory.used_bytes() == {}
