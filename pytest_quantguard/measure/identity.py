"""Who answered: model and server behind a recording, from the config and from what the server says."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pytest_quantguard.baseline.manifest import Manifest, ModelRecord, ServerRecord
from pytest_quantguard.config import AttachServer, EmulatorServer, ServerConfig, SglangServer
from pytest_quantguard.serving.answers import Capabilities

_SECRET = re.compile(r"key|token$|password|secret", re.IGNORECASE)

CHANGES_EVERY_START = frozenset(
    {
        *("port", "host", "nccl_port", "dist_init_addr", "random_seed", "log_level", "log_level_http"),
        *("model_path", "tokenizer_path", "served_model_name", "download_dir", "crash_dump_folder"),
        *("internal_states", "avg_request_latency", "last_gen_throughput", "load_time", "memory_usage"),
    }
)
"""Server arguments that say nothing about its numbers, or are compared elsewhere."""


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
    """What the server says of itself. Arguments that may hold a secret are left out."""
    said = asdict(capabilities)
    arguments: dict[str, Any] = said.pop("server_args")
    return ServerRecord(
        backend=asked_of.backend,
        kind=capabilities.kind,
        version=capabilities.version,
        arguments={name: value for name, value in arguments.items() if not _SECRET.search(name)},
        capabilities=said,
        device=capabilities.device,
        faults=list(asked_of.faults) if isinstance(asked_of, EmulatorServer) else [],
    )


def environment_changes(
    accepted: Manifest, model: ModelRecord, server: ServerRecord
) -> tuple[tuple[str, str, str], ...]:
    """(what, accepted, now) of everything about model, server and device that may change numbers.

    A drift verdict must say these: KL(accepted || candidate) means little once kernels, batch shapes or
    devices changed, and the paired change of KL to BF16 carries the verdict then.
    """
    before = _numbers_depend_on(accepted.model, accepted.server)
    after = _numbers_depend_on(model, server)
    return tuple(
        (name, _show(before.get(name)), _show(after.get(name)))
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    )


def _numbers_depend_on(model: ModelRecord, server: ServerRecord) -> dict[str, Any]:
    arguments = {name: value for name, value in server.arguments.items() if name not in CHANGES_EVERY_START}
    return {
        **_flatten(model.model_dump(), "model."),
        "server.kind": server.kind,
        "server.version": server.version,
        "server.device": server.device,
        "server.faults": server.faults,
        **_flatten(arguments, "argument "),
    }


def _flatten(record: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Nested mappings as one, with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _show(value: object) -> str:
    return "not stated" if value is None else str(value)
