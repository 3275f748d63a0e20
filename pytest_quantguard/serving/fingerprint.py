"""What a measured time depends on besides the code: device, driver, processor, server version and arguments.

Times are comparable only where fingerprints are equal. It holds no clock frequency, which changes by the
second, and no host name, which changes nothing.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil

from pytest_quantguard.serving.answers import Capabilities
from pytest_quantguard.serving.gpu_memory import MIB, decoded, open_nvml, sees
from pytest_quantguard.serving.transport import is_loopback

Fact = str | int | float | bool | None
Fingerprint = dict[str, Fact]
"""Name of a fact -> its value; None where it is not known."""

SMI_SECONDS = 30.0
ELSEWHERE = "not known: the server runs on another machine"

RELEVANT_ARGUMENTS = frozenset(
    {
        "attention_backend", "chunked_prefill_size", "context_length", "cuda_graph_bs", "cuda_graph_max_bs",
        "data_parallel_size", "decode_attention_backend", "device", "disable_cuda_graph",
        "disable_overlap_schedule", "disable_radix_cache", "dp_size", "dtype",
        "enable_deterministic_inference", "enable_dp_attention", "enable_mixed_chunk",
        "enable_torch_compile", "ep_size", "fp4_gemm_backend", "fp8_gemm_backend", "kv_cache_dtype",
        "max_prefill_tokens", "max_running_requests", "moe_runner_backend", "page_size", "pp_size",
        "prefill_attention_backend", "quantization", "sampling_backend", "schedule_conservativeness",
        "schedule_policy", "speculative_algorithm", "speculative_num_draft_tokens", "speculative_num_steps",
        "stream_interval", "tp_size",
    }
)  # fmt: skip
"""Arguments in a server's own report that change its speed."""


def read_fingerprint(capabilities: Capabilities, url: str, devices: str | None = None) -> Fingerprint:
    """The facts of this machine and of the server at `url`.

    devices: the GPUs that the server may use, as in CUDA_VISIBLE_DEVICES; None means all. The emulator uses
    none. For a server on another machine the facts of the machine are not known, and say so.
    """
    facts: Fingerprint = {}
    if is_loopback(url):
        facts |= _gpu_facts(read_gpus(), "" if capabilities.kind == "emulator" else devices)
        facts |= {"cpu": cpu_model(), "cpu_count": psutil.cpu_count() or 0, "system": platform.system()}
    else:
        facts["machine"] = ELSEWHERE
    facts["server"] = capabilities.kind
    facts["server_version"] = capabilities.version
    for name in sorted(RELEVANT_ARGUMENTS & capabilities.server_args.keys()):
        facts[name] = _plain(capabilities.server_args[name])
    emulator = capabilities.server_args.get("quantguard_emulator")
    if isinstance(emulator, Mapping):
        facts["arithmetic"] = _plain(emulator.get("arithmetic"))
    return facts


def device_of(facts: Fingerprint) -> str | None:
    """What the numbers of one build depend on: the GPUs, or the processor and how it computes; None where the
    machine is not known.
    """
    if "machine" in facts:
        return None
    if facts.get("gpu"):
        return f"{facts['gpu_count']} x {facts['gpu']}"
    return ", ".join(str(facts[name]) for name in ("cpu", "arithmetic") if facts.get(name))


def differences(one: Mapping[str, Fact], other: Mapping[str, Fact]) -> list[tuple[str, Fact, Fact]]:
    """(fact, in one, in the other) wherever they differ, in the order of the first."""
    names = dict.fromkeys([*one, *other])
    return [(name, one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device. power_limit: watts. None where the driver does not say."""

    index: int
    uuid: str
    name: str
    memory_mib: int
    power_limit: float | None
    persistence: bool | None
    driver: str
    cuda: str


def read_gpus() -> tuple[Gpu, ...]:
    """NVIDIA's devices through `nvidia-smi` if it is there, NVML otherwise; none without both."""
    program = shutil.which("nvidia-smi")
    if program is not None:
        try:
            said = subprocess.run(
                [program, "-q", "-x"], capture_output=True, timeout=SMI_SECONDS, check=True
            ).stdout
            return parse_smi(said)
        except (OSError, subprocess.SubprocessError, ElementTree.ParseError, ValueError):
            pass  # A tool that does not work says nothing; NVML may.
    return _from_nvml()


def parse_smi(xml: bytes) -> tuple[Gpu, ...]:
    """The devices of `nvidia-smi -q -x`. Raises ParseError or ValueError for anything else."""
    root = ElementTree.fromstring(xml)
    driver, cuda = _text(root, "driver_version"), _text(root, "cuda_version")
    return tuple(
        Gpu(
            index=index,
            uuid=_text(device, "uuid"),
            name=_text(device, "product_name"),
            memory_mib=int(_number(_text(device, "fb_memory_usage/total")) or 0),
            power_limit=_first_number(device, "gpu_power_readings", "power_readings"),
            persistence={"Enabled": True, "Disabled": False}.get(_text(device, "persistence_mode")),
            driver=driver,
            cuda=cuda,
        )
        for index, device in enumerate(root.findall("gpu"))
    )


def cpu_model() -> str:
    """The processor's name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return " ".join(value.split())
    return platform.processor() or platform.machine()


def _gpu_facts(gpus: Sequence[Gpu], devices: str | None) -> Fingerprint:
    used = [gpu for gpu in gpus if sees(devices, gpu.index, gpu.uuid)]
    if not used:
        return {"gpu": None, "gpu_count": 0}
    return {
        "gpu": ", ".join(dict.fromkeys(gpu.name for gpu in used)),
        "gpu_count": len(used),
        "gpu_memory_mib": min(gpu.memory_mib for gpu in used),
        "driver": used[0].driver,
        "cuda": used[0].cuda,
        "power_limit_w": min((gpu.power_limit for gpu in used if gpu.power_limit is not None), default=None),
        "persistence": all(gpu.persistence for gpu in used),
    }


def _from_nvml() -> tuple[Gpu, ...]:
    nvml = open_nvml()
    if nvml is None:
        return ()
    try:
        driver, version = decoded(nvml.nvmlSystemGetDriverVersion()), nvml.nvmlSystemGetCudaDriverVersion()
        cuda = f"{version // 1000}.{version % 1000 // 10}"
        return tuple(_nvml_gpu(nvml, index, driver, cuda) for index in range(nvml.nvmlDeviceGetCount()))
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()


def _nvml_gpu(nvml: Any, index: int, driver: str, cuda: str) -> Gpu:
    device = nvml.nvmlDeviceGetHandleByIndex(index)

    def known(ask: Any) -> Any:
        try:
            return ask(device)
        except nvml.NVMLError:
            return None  # Not every device answers every question.

    limit, mode = known(nvml.nvmlDeviceGetEnforcedPowerLimit), known(nvml.nvmlDeviceGetPersistenceMode)
    return Gpu(
        index=index,
        uuid=decoded(nvml.nvmlDeviceGetUUID(device)),
        name=decoded(nvml.nvmlDeviceGetName(device)),
        memory_mib=int(nvml.nvmlDeviceGetMemoryInfo(device).total) // MIB,
        power_limit=None if limit is None else limit / 1000,
        persistence=None if mode is None else bool(mode),
        driver=driver,
        cuda=cuda,
    )


def _text(element: ElementTree.Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _number(text: str) -> float | None:
    """The number before a unit: "700.00 W"; None for "N/A"."""
    try:
        return float(text.split()[0])
    except (IndexError, ValueError):
        return None


def _first_number(device: ElementTree.Element, *sections: str) -> float | None:
    """The power limit, which drivers name differently."""
    for section in sections:
        for name in ("current_power_limit", "power_limit", "enforced_power_limit"):
            found = _number(_text(device, f"{section}/{name}"))
            if found is not None:
                return found
    return None


def _plain(value: Any) -> Fact:
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
