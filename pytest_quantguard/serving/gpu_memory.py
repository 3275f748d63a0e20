"""Waits until a stopped server's GPU memory is free again, so that the next server can have it.

The driver frees the memory of a killed process some seconds after its end. Without NVML (no NVIDIA driver,
or no `nvidia-ml-py`) nothing is waited for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

MIB = 1 << 20
SLACK_BYTES = 256 * MIB
"""Other processes come and go; so much more than before the start counts as free again."""
WAIT_SECONDS = 60.0

UsedBytes = Mapping[int, int]
"""Index of a device -> memory in use, in bytes."""


def sees(devices: str | None, index: int, uuid: str) -> bool:
    """Whether a process with these CUDA_VISIBLE_DEVICES sees the device; of unknown form, it sees all.

    None: as this process.
    """
    text = os.environ.get("CUDA_VISIBLE_DEVICES") if devices is None else devices
    if text is None:
        return True
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() or part.startswith("GPU-") for part in wanted):
        return True
    return any(part == str(index) or uuid.startswith(part) for part in wanted)


def seen_devices(nvml: Any, *devices: str | None) -> dict[int, Any]:
    """Index -> NVML's handle of each device that one of these CUDA_VISIBLE_DEVICES lets a process see."""
    handles = {index: nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())}
    return {
        index: handle
        for index, handle in handles.items()
        if any(sees(some, index, decoded(nvml.nvmlDeviceGetUUID(handle))) for some in devices)
    }


def used_bytes(devices: str | None = None) -> UsedBytes:
    """What is in use now on the devices that these CUDA_VISIBLE_DEVICES let a process see: what happens on
    others is none of a server's business. Empty without NVML.
    """
    nvml = open_nvml()
    if nvml is None:
        return {}
    try:
        seen = seen_devices(nvml, devices)
        return {index: int(nvml.nvmlDeviceGetMemoryInfo(handle).used) for index, handle in seen.items()}
    finally:
        nvml.nvmlShutdown()


def wait_until_freed(
    before: UsedBytes, devices: str | None = None, *, seconds: float = WAIT_SECONDS
) -> str | None:
    """Wait until no device uses more than `before` plus slack; a sentence if one still does at the end."""
    deadline = time.monotonic() + seconds
    while before:
        now = used_bytes(devices)
        over = [
            (index, now[index] - then)
            for index, then in before.items()
            if now.get(index, 0) > then + SLACK_BYTES
        ]
        if not over:
            break
        if time.monotonic() > deadline:
            index, excess = max(over, key=lambda one: one[1])
            return (
                f"{seconds:g} s after the server ended, GPU {index} still uses {excess // MIB} MiB more "
                "than before its start"
            )
        time.sleep(0.2)
    return None


def decoded(value: str | bytes) -> str:
    """Text of NVML; older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value


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
