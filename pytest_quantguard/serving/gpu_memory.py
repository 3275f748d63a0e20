"""Waits until a stopped server's GPU memory is free again, so that the next server can have it.

The driver frees the memory of a killed process some seconds after its end. Without NVML (no NVIDIA driver,
or no `nvidia-ml-py`) nothing is waited for.
"""

from __future__ import annotations

import time
from typing import Any

MIB = 1 << 20
SLACK_BYTES = 256 * MIB
"""Other processes come and go; so much more than before the start counts as free again."""
WAIT_SECONDS = 60.0

UsedBytes = tuple[int, ...]
"""Memory in use on each device, in bytes."""


def used_bytes() -> UsedBytes:
    """What is in use now; empty without NVML."""
    nvml = open_nvml()
    if nvml is None:
        return ()
    try:
        return tuple(
            int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(index)).used)
            for index in range(nvml.nvmlDeviceGetCount())
        )
    finally:
        nvml.nvmlShutdown()


def wait_until_freed(before: UsedBytes, *, seconds: float = WAIT_SECONDS) -> str | None:
    """Wait until no device uses more than `before` plus slack; a sentence if one still does at the end."""
    deadline = time.monotonic() + seconds
    while before:
        over = [
            (index, now - then)
            for index, (then, now) in enumerate(zip(before, used_bytes(), strict=False))
            if now > then + SLACK_BYTES
        ]
        if not over:
            break
        if time.monotonic() > deadline:
            index, excess = max(over, key=lambda one: one[1])
            return (
                f"{seconds:g} s after the server ended, GPU {index} still uses {excess // MIB} MiB more "
                "than before "
                "its start"
            )
        time.sleep(0.2)
    return None


def open_nvml() -> Any:
    """The initialised NVML binding, or None where there is none."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
