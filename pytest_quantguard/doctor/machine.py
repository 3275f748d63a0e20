"""What this machine has: Python, packages, GPUs, shared memory. Looks only; changes nothing, sends
nothing.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

import pytest_quantguard
from pytest_quantguard.doctor.finding import Finding, Status

DISTRIBUTION = "pytest-quantguard"
QUERY = "index,name,memory.total,memory.used,driver_version,compute_cap"
SMI_SECONDS = 30
SHARED_MEMORY = Path("/dev/shm")
ENOUGH_SHARED_BYTES = 1 << 30
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device as nvidia-smi tells of it. Memory in MiB; capability such as (10, 0)."""

    index: int
    name: str
    total: int
    used: int
    driver: str
    capability: tuple[int, int]


def examine_python() -> Finding:
    """The interpreter and this package."""
    text = f"{platform.python_version()} ({sys.executable}), {DISTRIBUTION} {pytest_quantguard.__version__}"
    return Finding("Python", "ok", text)


def examine_packages(needed: Collection[str]) -> list[Finding]:
    """The required packages, and each extra of `needed`: installed, and new enough."""
    findings = []
    for extra in ("", *needed):
        name = f"extra [{extra}]" if extra else "packages"
        wrong = _unmet(extra)
        if wrong:
            install = f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {DISTRIBUTION}"
            findings.append(Finding(name, "problem", "; ".join(wrong), install))
        else:
            findings.append(Finding(name, "ok", "all there"))
    return findings


def _unmet(extra: str) -> list[str]:
    """What of the package's requirements with this extra (without: "") is missing or too old."""
    wrong = []
    for line in importlib.metadata.requires(DISTRIBUTION) or ():
        requirement = Requirement(line)
        of_extra = requirement.marker is not None and "extra" in str(requirement.marker)
        if of_extra != bool(extra):
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is not installed")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} is {found}, needed is {requirement.specifier}")
    return wrong


def read_gpus() -> list[Gpu]:
    """NVIDIA GPUs of this machine, as nvidia-smi sees them; none where there is no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=SMI_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(done.stdout)


def parse_gpus(text: str) -> list[Gpu]:
    """The devices in the CSV of nvidia-smi; lines of devices that do not answer are left out."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 6 or not re.fullmatch(r"\d+\.\d+", fields[5]):
            continue
        major, minor = fields[5].split(".")
        numbers = [int(field) if field.isdigit() else 0 for field in (fields[0], fields[2], fields[3])]
        gpus.append(Gpu(numbers[0], fields[1], numbers[1], numbers[2], fields[4], (int(major), int(minor))))
    return gpus


def examine_gpus(gpus: Collection[Gpu], *, needed: bool) -> Finding:
    """Whether there are devices, with how much free memory."""
    if not gpus:
        if not needed:
            return Finding("GPU", "skipped", "none found, none needed here")
        return Finding(
            "GPU",
            "problem",
            "none: nvidia-smi is missing or lists no device, and the config starts SGLang",
            "Run on a GPU machine (in a container with --gpus all), check the driver with nvidia-smi; or try "
            "the gate with `backend: emulator` on the CPU.",
        )
    text = "\n".join(
        f"{gpu.index}: {gpu.name}, {(gpu.total - gpu.used) / 1024:.0f} of {gpu.total / 1024:.0f} GiB free, "
        f"driver {gpu.driver}, compute capability {gpu.capability[0]}.{gpu.capability[1]}"
        for gpu in gpus
    )
    busy = [gpu for gpu in gpus if gpu.used > gpu.total * 0.1]
    if busy and needed:
        remedy = "Another process holds memory of a GPU: end it, or give others with `devices`."
        return Finding("GPU", "warning", text, remedy)
    return Finding("GPU", "ok", text)


def examine_shared_memory(*, tensor_parallel: bool) -> Finding:
    """NCCL and the server's own processes exchange data there; containers have 64 MB by default."""
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return Finding("shared memory", "skipped", f"there is no {SHARED_MEMORY}")
    text = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free at {SHARED_MEMORY}"
    if usage.free >= ENOUGH_SHARED_BYTES:
        return Finding("shared memory", "ok", text)
    status: Status = "problem" if tensor_parallel else "warning"
    remedy = "Give the container more: docker run --shm-size=16g (or --ipc=host); in Kubernetes an emptyDir "
    return Finding("shared memory", status, text, remedy + "with medium: Memory at /dev/shm.")
