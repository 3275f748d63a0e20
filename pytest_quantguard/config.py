"""The YAML that describes a gate, as typed, frozen models.

One file names the reference, the candidate, the stored baseline, what is measured, and what must hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Phase = Literal["prefill", "decode"]
ServerArg = bool | int | float | str | list[str | int | float] | dict[str, object] | None
"""True is a bare flag, null removes a default, a list repeats its values, a mapping is sent as JSON."""


class Model(BaseModel):
    """Base of all config models: unknown keys are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class LaunchedServer(Model):
    """What every server that we start ourselves has."""

    model_path: str = Field(min_length=1)
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "bfloat16"
    kv_cache_dtype: str = "auto"
    server_args: dict[str, ServerArg] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    command: list[str] | None = Field(default=None, description="Replaces the start of the command line.")
    cwd: Path | None = None
    port: int | None = Field(default=None, ge=1, le=65535, description="Default: a free one.")
    startup_timeout: float = Field(default=900, gt=0, description="Seconds without progress in the log.")
    startup_hard_limit: float | None = Field(default=None, gt=0, description="Seconds; default 4 x startup_timeout.")
    request_timeout: float = Field(default=600, gt=0, description="Seconds per request.")
    api_key: str | None = None


class SglangServer(LaunchedServer):
    """A server started with SGLang's own launcher."""

    backend: Literal["sglang"]
    revision: str | None = None
    tokenizer_path: str | None = None
    quantization: str | None = None
    devices: list[str] | None = Field(
        default=None, description="CUDA_VISIBLE_DEVICES of each xdist worker, in worker order."
    )


class EmulatorServer(LaunchedServer):
    """Our own CPU server; it speaks the same protocol."""

    backend: Literal["emulator"]
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    quantization: str | dict[str, str] | None = Field(
        default=None, description="A scheme for all linear layers, or ordered patterns -> formats (last match wins)."
    )
    faults: list[str] = Field(default_factory=list, description="Defects to switch on: name or name:key=value,...")
    threads: int | None = Field(default=None, ge=1)


class AttachExpectation(Model):
    """What the running server must say of itself."""

    model_path: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    version: str | None = None


class AttachServer(Model):
    """A server that is already running, a router or a load balancer."""

    backend: Literal["attach"]
    url: str = Field(min_length=1)
    api_key: str | None = None
    expect: AttachExpectation = AttachExpectation()
    request_timeout: float = Field(default=600, gt=0)
    startup_timeout: float = Field(default=60, gt=0, description="Seconds to wait for the server to answer.")


ServerConfig = Annotated[SglangServer | EmulatorServer | AttachServer, Field(discriminator="backend")]


class SuiteConfig(Model):
    """Which prompts are asked and what is scored."""

    prompts: str = Field(default="builtin", description="'builtin' or the path of a JSONL file.")
    size: int = Field(default=32, ge=1, description="Number of built-in prompts.")
    seed: int = 0
    max_prompt_tokens: int = Field(default=512, ge=8)
    mix: dict[str, float] | None = Field(default=None, description="Weight of each built-in task.")
    score_tokens: int = Field(default=128, ge=1)
    top_logprobs: int = Field(default=256, ge=2)
    batch_sizes: list[Annotated[int, Field(ge=1)]] = Field(default=[1, 3, 8, 32], min_length=1)
    phases: list[Phase] = Field(default=["prefill", "decode"], min_length=1)
    decode_mode: Literal["auto", "forced", "resync"] = "auto"
    repeats: int = Field(default=3, ge=1, description="Captures of each batch size, for the noise floor.")
