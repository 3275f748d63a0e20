"""The config of a real SGLang server on this machine's CPU, and the virtual environment that it runs in."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import filelock

from pytest_quantguard.config import SglangServer

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
VERSION = "0.5.23"
INSTALL_SECONDS = 1800

BASE_ARGS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "max_total_tokens": 32768,
    "max_running_requests": 48,
    "sleep_on_idle": True,
    "enable_custom_logit_processor": True,
}


def why_impossible() -> str | None:
    """Why no real server can run here; None where one can."""
    if os.environ.get("QUANTGUARD_SKIP_SGLANG") == "1":
        return "QUANTGUARD_SKIP_SGLANG=1"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"its wheels are for Linux on x86_64, not {sys.platform} on {platform.machine()}"
    return None


def ensure_installed() -> Path:
    """The virtual environment with SGLang, installed on first use; one process at a time."""
    venv = _venv_path()
    venv.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{venv}.lock", timeout=INSTALL_SECONDS):
        if not _is_complete(venv):
            subprocess.run([str(HERE / "install"), str(venv)], check=True, timeout=INSTALL_SECONDS)
    return venv


def server_config(
    venv: Path, model: Path, *, cache: Literal["bf16", "fp8_e4m3"] = "bf16", **overrides: Any
) -> SglangServer:
    """A server of `model` with a BF16 or FP8 KV cache. `server_args` in overrides are merged into the usual
    ones."""
    shim, cpu_engine = ("shim_bf16", "1") if cache == "bf16" else ("shim_kvfp8", "0")
    env = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "PYTHONPATH": str(HERE / shim),
        "SGLANG_USE_CPU_ENGINE": cpu_engine,
        # Otherwise a torch store listens on every interface.
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{_unused_file()}",
    }
    options: dict[str, Any] = {
        "backend": "sglang",
        "model_path": str(model),
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto" if cache == "bf16" else cache,
        "command": [str(venv / "bin" / "python"), "-m", "sglang.launch_server"],
        "startup_timeout": 300,
    }
    options |= overrides
    options["server_args"] = BASE_ARGS | overrides.get("server_args", {})
    options["env"] = env | overrides.get("env", {})
    return SglangServer(**options)


def _venv_path() -> Path:
    named = os.environ.get("QUANTGUARD_SGLANG_VENV")
    if named:
        return Path(named)
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    return Path.home() / ".cache" / "quantguard-tests" / f"sglang-{digest}"


def _is_complete(venv: Path) -> bool:
    """Whether the last package of the install script is there (pip writes its metadata last)."""
    return any(venv.glob(f"lib/python3*/site-packages/sglang-{VERSION}.dist-info/RECORD"))


def _unused_file() -> Path:
    return Path(tempfile.mkdtemp(prefix="quantguard-sglang-")) / "rendezvous"
