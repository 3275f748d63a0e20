"""The YAML that describes a gate, as typed, frozen models.

One file names the reference, the candidate, the stored baseline, what is measured, and what must hold.
Reading such a file is in `config_file.py`; nothing here touches the disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints, field_validator, model_validator
from pydantic_core import PydanticCustomError

from pytest_quantguard.config_base import Bound as Bound
from pytest_quantguard.config_base import Decision as Decision
from pytest_quantguard.config_base import Increase as Increase
from pytest_quantguard.config_base import Model as Model
from pytest_quantguard.config_generation import GenerationConfig
from pytest_quantguard.config_speed import SpeedConfig
from pytest_quantguard.logprobs.metrics import METRICS

Phase = Literal["prefill", "decode"]
RemoteUrl = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9+.-]*://\S+$")]
ServerArg = bool | int | float | str | list[str | int | float] | dict[str, object] | None
"""True is a bare flag, null removes a default, a list repeats its values, a mapping is sent as JSON."""


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
    startup_hard_limit: float | None = Field(
        default=None, gt=0, description="Seconds; default 4 x startup_timeout."
    )
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
        default=None,
        description="A scheme for all linear layers, or ordered patterns -> formats (last match wins).",
    )
    faults: list[str] = Field(
        default_factory=list, description="Defects to switch on: name or name:key=value,..."
    )
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

    @field_validator("batch_sizes", "phases")
    @classmethod
    def _no_repetition(cls, value: list[Any]) -> list[Any]:
        if len(set(value)) != len(value):
            raise ValueError("the same entry is given twice")
        return value


class DriftBound(Model):
    """How much a metric against BF16 may have become worse since the accepted run, position by position."""

    max_increase: Increase
    decision: Decision | None = Field(default=None, description="Default: `decision` of the section.")


class MetricKeys(Model):
    """Base of sections whose keys are metric names beside a few of their own."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _known_metrics(self) -> MetricKeys:
        unknown = [name for name in self.__pydantic_extra__ or {} if name not in METRICS]
        if unknown:
            allowed = [*type(self).model_fields, *METRICS]
            raise PydanticCustomError("unknown_keys", "unknown keys", {"keys": unknown, "allowed": allowed})
        return self


class MetricBounds(MetricKeys):
    """Metric names with their bounds."""

    __pydantic_extra__: dict[str, Bound]

    @model_validator(mode="after")
    def _right_side(self) -> MetricBounds:
        for name, bound in self.bounds.items():
            metric = METRICS.get(name)
            wanted = "min" if metric is not None and metric.better == "higher" else "max"
            if metric is not None and getattr(bound, wanted) is None:
                raise PydanticCustomError(
                    "wrong_side",
                    "{metric} is better {better}: bound it with '{wanted}'",
                    {"metric": name, "better": metric.better, "wanted": wanted},
                )
        return self

    @property
    def bounds(self) -> dict[str, Bound]:
        """Metric name -> bound, in the order of the file."""
        return dict(self.__pydantic_extra__ or {})


class AccuracyOverride(MetricBounds):
    """Other bounds for some cells; where several match, the last one wins."""

    phase: Phase | None = Field(default=None, description="Default: every phase.")
    batch_size: int | None = Field(default=None, ge=1, description="Default: every batch size.")


class DriftConfig(MetricKeys):
    """What may have changed since the accepted run of this candidate."""

    __pydantic_extra__: dict[str, DriftBound]

    decision: Decision = "proven_bad"
    on_failure: Literal["fail", "warn"] = "fail"
    divergence: MetricBounds | None = Field(
        default=None,
        description="Bounds on accepted against candidate, not on their change against BF16: for one build "
        "on one device.",
    )

    @property
    def bounds(self) -> dict[str, DriftBound]:
        """Metric name -> allowed increase, in the order of the file."""
        return dict(self.__pydantic_extra__ or {})

    @model_validator(mode="after")
    def _something(self) -> DriftConfig:
        if not self.bounds and not (self.divergence and self.divergence.bounds):
            raise ValueError(
                "bounds nothing: give a metric with max_increase, e.g. kl_mean: {max_increase: 10%}"
            )
        return self


class AccuracyConfig(MetricBounds):
    """What must hold against the BF16 baseline, in every cell unless overridden."""

    decision: Decision = "point"
    overrides: list[AccuracyOverride] = Field(default_factory=list)
    drift: DriftConfig | None = None

    @model_validator(mode="after")
    def _something(self) -> AccuracyConfig:
        if not self.bounds and not any(override.bounds for override in self.overrides):
            raise ValueError("bounds nothing: give at least one metric, e.g. kl_mean: {max: 0.02}")
        return self

    def bounds_of(self, phase: Phase, batch_size: int) -> dict[str, Bound]:
        """Metric name -> bound for one cell, overrides applied."""
        bounds = self.bounds
        for override in self.overrides:
            if override.phase in (None, phase) and override.batch_size in (None, batch_size):
                bounds.update(override.bounds)
        return bounds


class SelfCheck(Model):
    """One way of asking the candidate against another way that should give the same.

    With quantized activations two correct kernels differ a lot position by position, so the first judge is
    the paired change of KL to BF16; `max_kl` bounds the KL between the two ways, and suits candidates whose
    own noise is small.
    """

    max_increase: Increase = Increase(amount=0.25, relative=True)
    max_kl: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    decision: Decision = "proven_bad"


class SelfConsistencyConfig(Model):
    """Checks of the candidate against itself. null switches one off."""

    decode_against_prefill: SelfCheck | None = SelfCheck()
    batch: SelfCheck | None = Field(default=SelfCheck(), description="Each batch size against the smallest.")
    warm_cache: SelfCheck | None = Field(
        default=None, description="Prompts met in the prefix cache against cold ones. Needs a prefix cache."
    )
    repeat: SelfCheck | None = Field(default=None, description="The same question asked again.")


class ValidityConfig(Model):
    """What makes an answer unusable, whatever its numbers."""

    min_captured_mass: float = Field(
        default=0.05, ge=0, le=1, description="Least probability that the top K covers at every position."
    )
    require_quantized: bool | None = Field(
        default=None,
        description="Fail a candidate that answers as the reference. Default: if the config says quantized.",
    )


class SelftestConfig(Model):
    """What `quantguard selftest` tries on this gate."""

    faults: list[str] = Field(
        default_factory=list, description="name or name:key=value,...; default: the whole catalogue."
    )
    must_catch: list[str] = Field(
        default=["catastrophic"],
        description="Faults or severities (catastrophic, clear, subtle) that must not be missed.",
    )
    clean_runs: int = Field(default=3, ge=1, description="Runs without a fault; an alarm in one is false.")
    prompts: int = Field(default=8, ge=1, description="How many of the suite's prompts are asked.")
    score_tokens: int = Field(default=16, ge=1, description="How many positions of each span are scored.")


class GateConfig(Model):
    """One gate: who the reference is, who is on trial, and what must hold."""

    version: Literal[1]
    name: str = Field(
        max_length=100,
        description="Names the tests and the output folder: letters, digits, '.', '_' and '-'.",
    )
    reference: ServerConfig | None = Field(default=None, description="Needed to capture the baseline.")
    candidate: ServerConfig
    baseline: RemoteUrl | Path = Field(
        description="Folder of the stored recording of the reference, or a URL that fsspec understands (hf://, "
        "s3://, https://, ...), with '#sha256=' of its manifest where it must never change."
    )
    suite: SuiteConfig = SuiteConfig()
    validity: ValidityConfig = ValidityConfig()
    accuracy: AccuracyConfig
    self_consistency: SelfConsistencyConfig = SelfConsistencyConfig()
    speed: SpeedConfig | None = Field(default=None, description="Timed scenarios; null: nothing is timed.")
    generation: GenerationConfig | None = Field(
        default=None, description="Questions answered in full, held against the reference's answers. Slow."
    )
    selftest: SelftestConfig = SelftestConfig()

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
            raise ValueError(
                "allowed are letters, digits, '.', '_' and '-', beginning with a letter or digit"
            )
        return value

    @field_validator("baseline")
    @classmethod
    def _no_credentials(cls, value: str | Path) -> str | Path:
        if isinstance(value, str) and re.search(r"://[^/@]*:[^/@]*@", value):
            raise ValueError(
                "no credentials here, they would be stored in results: give them in the environment"
            )
        return value

    @model_validator(mode="after")
    def _overrides_match_suite(self) -> GateConfig:
        for index, override in enumerate(self.accuracy.overrides):
            for key, value, known in (
                ("phase", override.phase, self.suite.phases),
                ("batch_size", override.batch_size, self.suite.batch_sizes),
            ):
                if value is not None and value not in known:
                    raise PydanticCustomError(
                        "override_matches_nothing",
                        "accuracy.overrides[{index}].{key} is {value}; the suite measures only: {known}",
                        {"index": index, "key": key, "value": value, "known": ", ".join(map(str, known))},
                    )
        return self

    @model_validator(mode="after")
    def _speed_has_its_reference(self) -> GateConfig:
        if self.speed is not None and self.speed.needs_reference and self.reference is None:
            raise ValueError(
                "speed.min_speedup_vs_reference and speed.score need `reference`: add the server of the "
                "unquantized model"
            )
        return self

    @property
    def expects_quantization(self) -> bool:
        """Whether the candidate's answers must differ from the reference's."""
        if self.validity.require_quantized is not None:
            return self.validity.require_quantized
        candidate = self.candidate.expect if isinstance(self.candidate, AttachServer) else self.candidate
        kv_cache = candidate.kv_cache_dtype or "auto"
        return candidate.quantization not in (None, "bf16") or kv_cache.startswith(("fp8", "fp4", "int8"))

    def cells(self) -> Iterator[tuple[Phase, int]]:
        """Every (phase, batch size) of the suite, in order."""
        for phase in self.suite.phases:
            for batch_size in self.suite.batch_sizes:
                yield phase, batch_size
