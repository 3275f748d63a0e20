"""The command line of a server, from its config. SGLang and the emulator differ here and nowhere else.

Typed fields become flags, `server_args` adds, replaces or removes them, `command` replaces the program.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_quantguard.config import EmulatorServer, SglangServer
from pytest_quantguard.errors import ConfigError
from pytest_quantguard.serving.supervisor import MASK

LaunchedConfig = SglangServer | EmulatorServer
FlagValue = object

SGLANG_PROGRAM = (sys.executable, "-m", "sglang.launch_server")
EMULATOR_PROGRAM = (sys.executable, "-m", "pytest_quantguard.emulator")
OWN_KEYS = {"port": "port", "api-key": "api_key", "model-path": "model_path"}
"""Flags that we must know ourselves, and the key of the config that sets them."""
SECRET = re.compile(r"(api|admin|access|auth|private|watermark)[-_]?key|token$|secret|passw", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Launch:
    """What is run, where, and what of it must not be shown."""

    command: tuple[str, ...]
    flags: Mapping[str, FlagValue]
    env: Mapping[str, str]
    cwd: Path | None
    port: int
    secrets: tuple[str, ...]

    @property
    def shown_command(self) -> tuple[str, ...]:
        """The command with every secret replaced."""
        return tuple(mask(word, self.secrets) for word in self.command)


def plan_launch(config: LaunchedConfig, *, port: int, worker: int = 0) -> Launch:
    """The command, environment and folder of a server that listens on 127.0.0.1:`port`.

    worker: index of the xdist worker; picks the entry of `devices`.
    Raises ConfigError for flags in server_args that have a key of their own, or a worker without devices.
    """
    flags = _sglang_flags(config, port) if isinstance(config, SglangServer) else _emulator_flags(config, port)
    for key, value in config.server_args.items():
        name = key.lstrip("-").replace("_", "-")
        if name in OWN_KEYS:
            raise ConfigError(f"server_args.{key}: use the key {OWN_KEYS[name]} of the server itself")
        if value is None or value is False:
            flags.pop(name, None)
        else:
            flags[name] = value
    program = config.command or (SGLANG_PROGRAM if isinstance(config, SglangServer) else EMULATOR_PROGRAM)
    arguments = [word for name, value in flags.items() for word in _words(name, value)]
    return Launch(
        command=(*program, *arguments),
        flags=flags,
        env=_environment(config, worker),
        cwd=config.cwd,
        port=port,
        secrets=_secrets(config, flags),
    )


def mask(text: str, secrets: Sequence[str]) -> str:
    """`text` without the secrets."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    return text


def _sglang_flags(config: SglangServer, port: int) -> dict[str, FlagValue]:
    flags: dict[str, FlagValue] = {"model-path": config.model_path, "host": "127.0.0.1", "port": port}
    optional: dict[str, str | None] = {
        "dtype": config.dtype,
        "quantization": config.quantization,
        "kv-cache-dtype": None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        "revision": config.revision,
        "tokenizer-path": config.tokenizer_path,
        "api-key": config.api_key,
    }
    return flags | {name: value for name, value in optional.items() if value is not None}


def _emulator_flags(config: EmulatorServer, port: int) -> dict[str, FlagValue]:
    flags: dict[str, FlagValue] = {"model-path": config.model_path, "host": "127.0.0.1", "port": port}
    optional: dict[str, FlagValue] = {
        "dtype": config.dtype,
        "quantization": config.quantization,
        "kv-cache-dtype": config.kv_cache_dtype,
        "threads": config.threads,
    }
    flags |= {name: value for name, value in optional.items() if value is not None}
    if config.faults:
        flags["fault"] = _Repeated(config.faults)
    return flags


class _Repeated(list[str]):
    """A flag that is given once per value."""


def _words(name: str, value: FlagValue) -> list[str]:
    flag = f"--{name}"
    if value is True:
        return [flag]
    if isinstance(value, _Repeated):
        return [word for item in value for word in (flag, item)]
    if isinstance(value, list):
        return [flag, *(str(item) for item in value)]
    if isinstance(value, Mapping):
        return [flag, json.dumps(value)]
    return [flag, str(value)]


def _environment(config: LaunchedConfig, worker: int) -> dict[str, str]:
    env = dict(os.environ)
    if isinstance(config, SglangServer) and config.devices is not None:
        if worker >= len(config.devices):
            raise ConfigError(
                f"devices names {len(config.devices)} sets of GPUs, but this is xdist worker {worker + 1}; "
                f"add one per worker or run with -n {len(config.devices)}"
            )
        env["CUDA_VISIBLE_DEVICES"] = config.devices[worker]
    if isinstance(config, EmulatorServer):
        env["CUDA_VISIBLE_DEVICES"] = ""  # It computes on the processor: no GPU is its own.
        if config.api_key is not None:
            env["QUANTGUARD_EMULATOR_API_KEY"] = config.api_key  # other users can read a command line
    env["PYTHONUNBUFFERED"] = "1"  # the log is read while the server starts
    return env | config.env


def _secrets(config: LaunchedConfig, flags: Mapping[str, FlagValue]) -> tuple[str, ...]:
    found = [config.api_key or ""]
    found += [str(value) for name, value in flags.items() if SECRET.search(name) and isinstance(value, str)]
    found += [value for name, value in config.env.items() if SECRET.search(name)]
    return tuple(sorted({secret for secret in found if len(secret) >= 3}, key=len, reverse=True))
