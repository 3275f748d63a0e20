"""Who answered: model and server behind a recording, from the config and from what the server says."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pytest_quantguard.baseline.compatibility import Difference, environment_differences
from pytest_quantguard.baseline.manifest import Manifest, ModelRecord, ServerRecord
from pytest_quantguard.config import AttachServer, EmulatorServer, ServerConfig, SglangServer
from pytest_quantguard.serving.answers import Capabilities

SAYS_NOTHING_OF_NUMBERS = frozenset(
    {
        *("port", "host", "nccl_port", "dist_init_addr", "random_seed", "log_level", "log_level_http"),
        *("model_path", "tokenizer_path", "served_model_name", "download_dir", "crash_dump_folder"),
        *("internal_states", "avg_request_latency", "last_gen_throughput", "load_time", "memory_usage"),
        *("model_folder", "process_id", "running", "queued"),
    }
)
"""Server arguments that differ from start to start or machine to machine, at any depth; they are not
recorded.
"""


def describe_model(asked_of: ServerConfig, capabilities: Capabilities, *, vocab_size: int) -> ModelRecord:
    """What the config names the model, completed by what the server says of it."""
    quantization: str | dict[str, str] | None
    if isinstance(asked_of, AttachServer):
        path, quantization = capabilities.model_path or asked_of.url, capabilities.quantization
        dtype, kv_cache_dtype, revision = capabilities.dtype, capabilities.kv_cache_dtype, None
    else:
        path, dtype, kv_cache_dtype = asked_of.model_path, asked_of.dtype, asked_of.kv_cache_dtype
        quantization = asked_of.quantization
        revision = asked_of.revision if isinstance(asked_of, SglangServer) else None
    return ModelRecord(
        model_path=path,
        revision=revision,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        vocab_size=vocab_size,
        tokenizer_digest=_digest_tokenizer(capabilities.model_path),
    )


def _digest_tokenizer(model_path: str | None) -> str | None:
    """SHA-256 (hex) of the model folder's tokenizer.json, where the folder is on this machine."""
    file = Path(model_path) / "tokenizer.json" if model_path else None
    return hashlib.sha256(file.read_bytes()).hexdigest() if file is not None and file.is_file() else None


def describe_server(asked_of: ServerConfig, capabilities: Capabilities) -> ServerRecord:
    """What the server says of itself; the record hides secrets."""
    said = asdict(capabilities)
    arguments: dict[str, Any] = said.pop("server_args")
    del said["model_path"]
    return ServerRecord(
        backend=asked_of.backend,
        kind=capabilities.kind,
        version=capabilities.version,
        arguments=_that_bear_on_numbers(arguments),
        capabilities=said,
        device=capabilities.device,
        faults=list(asked_of.faults) if isinstance(asked_of, EmulatorServer) else [],
    )


def _that_bear_on_numbers(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _that_bear_on_numbers(value) if isinstance(value, Mapping) else value
        for name, value in arguments.items()
        if name not in SAYS_NOTHING_OF_NUMBERS
    }


def describe_environment(device: str | None) -> dict[str, str]:
    """What a recording was made on. device: what answered, see `serving.fingerprint.device_of`."""
    known = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()}
    return known if device is None else {**known, "device": device}


def environment_changes(
    accepted: Manifest, model: ModelRecord, server: ServerRecord, device: str | None
) -> list[Difference]:
    """(what, accepted, now) of everything about model, server, device and environment that differs.

    A drift verdict must say these: KL(accepted || candidate) means little once kernels, batch shapes or
    devices changed, and the paired change of KL to BF16 carries the verdict then.
    """
    before, after = accepted.model.model_dump(), model.model_dump()
    changed = [
        (f"model.{name}", str(before[name]), str(after[name]))
        for name in before
        if before[name] != after[name]
    ]
    now = accepted.model_copy(update={"server": server, "environment": describe_environment(device)})
    return changed + environment_differences(accepted, now)
