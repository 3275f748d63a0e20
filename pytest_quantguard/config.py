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

from pytest_quantguard.config_base import MOST_VALUES, Count, Seconds, Seed, require_room
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

    model_path: str = Field(
        min_length=1, description="A folder (beginning with '.', '~' or '/') or a name on Hugging Face."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="bfloat16", description="Of what is not quantized."
    )
    kv_cache_dtype: str = Field(default="auto", description="Such as fp8_e4m3; auto: as dtype.")
    server_args: dict[str, ServerArg] = Field(
        default_factory=dict,
        description="Any flag of the server. true: a bare flag; null or false: none; a list: --flag a b; a "
        "mapping: as JSON.",
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables beside pytest's own."
    )
    command: list[str] | None = Field(
        default=None,
        description="The program before the flags, such as [srun, sglang, serve]. Default: this Python's.",
    )
    cwd: Path | None = Field(default=None, description="Working folder of the server.")
    port: int | None = Field(default=None, ge=1, le=65535, description="Default: a free one.")
    startup_timeout: Seconds = Field(default=900, description="Seconds without progress in the log.")
    startup_hard_limit: Seconds | None = Field(
        default=None, description="Seconds; default 4 x startup_timeout."
    )
    request_timeout: Seconds = Field(default=600, description="Seconds per request.")
    api_key: str | None = Field(default=None, description="Never shown; write ${NAME} here.")


class SglangServer(LaunchedServer):
    """A server started with SGLang's own launcher."""

    backend: Literal["sglang"]
    revision: str | None = Field(default=None, description="Of the model on Hugging Face.")
    tokenizer_path: str | None = Field(default=None, description="Default: the model's own.")
    quantization: str | None = Field(
        default=None, description="SGLang's name of the method, such as modelopt_fp4 or fp8."
    )
    devices: list[str] | None = Field(
        default=None, description="CUDA_VISIBLE_DEVICES of each xdist worker, in worker order."
    )


class EmulatorServer(LaunchedServer):
    """Our own CPU server; it speaks the same protocol."""

    backend: Literal["emulator"]
    dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="Of what is not quantized.")
    quantization: str | dict[str, str] | None = Field(
        default=None,
        description="A scheme for all linear layers, or ordered patterns -> formats (last match wins).",
    )
    faults: list[str] = Field(
        default_factory=list, description="Defects to switch on: name or name:key=value,..."
    )
    threads: int | None = Field(default=None, ge=1, le=4096, description="Default: all cores.")


class AttachExpectation(Model):
    """What the running server must say of itself."""

    model_path: str | None = Field(default=None, description="null: whatever it says.")
    quantization: str | None = Field(default=None, description="null: whatever it says.")
    kv_cache_dtype: str | None = Field(default=None, description="null: whatever it says.")
    version: str | None = Field(default=None, description="null: whatever it says.")


class AttachServer(Model):
    """A server that is already running, a router or a load balancer."""

    backend: Literal["attach"]
    url: str = Field(min_length=1, description="http:// or https://; a path is fine.")
    api_key: str | None = Field(default=None, description="Never shown; write ${NAME} here.")
    expect: AttachExpectation = Field(
        default=AttachExpectation(), description="A server that says something else is refused."
    )
    request_timeout: Seconds = Field(default=600, description="Seconds per request.")
    startup_timeout: Seconds = Field(default=60, description="Seconds to wait for the server to answer.")

    @field_validator("url")
    @classmethod
    def _no_credentials(cls, value: str) -> str:
        if re.search(r"[@?#]", value):
            raise ValueError(
                "no user name, password, '?' or '#' here, they would be stored in results: use api_key: "
                "${NAME}"
            )
        return value


ServerConfig = Annotated[SglangServer | EmulatorServer | AttachServer, Field(discriminator="backend")]


class SuiteConfig(Model):
    """Which prompts are asked and what is scored."""

    prompts: str = Field(default="builtin", description="'builtin' or the path of a JSONL file.")
    size: Count = Field(default=32, description="Number of built-in prompts.")
    seed: Seed = Field(default=0, description="Of the built-in prompts, and of those that are timed.")
    max_prompt_tokens: int = Field(default=512, ge=8, le=10_000_000, description="Longest built-in prompt.")
    mix: dict[str, float] | None = Field(default=None, description="Weight of each built-in task.")
    score_tokens: Count = Field(
        default=128, description="Positions that are compared, at the end of each text."
    )
    top_logprobs: int = Field(
        default=256, ge=2, le=1_000_000, description="How many tokens of each position."
    )
    batch_sizes: list[Count] = Field(
        default=[1, 3, 8, 32], min_length=1, description="Prompts in one request."
    )
    phases: list[Phase] = Field(default=["prefill", "decode"], min_length=1, description="What is measured.")
    decode_mode: Literal["auto", "forced", "resync"] = Field(
        default="auto",
        description="How the candidate is kept on the reference's text; auto: the best it offers.",
    )
    repeats: int = Field(
        default=3, ge=1, le=1000, description="Captures of each batch size, for the noise floor."
    )

    @field_validator("batch_sizes", "phases")
    @classmethod
    def _no_repetition(cls, value: list[Any]) -> list[Any]:
        if len(set(value)) != len(value):
            raise ValueError("the same entry is given twice")
        return value

    @model_validator(mode="after")
    def _fits_in_memory(self) -> SuiteConfig:
        if self.prompts != "builtin":
            return self  # How many there are, and how long, is known once the file is read.
        require_room(self.size * self.max_prompt_tokens, "size x max_prompt_tokens")
        cells = len(self.phases) * len(self.batch_sizes) * self.repeats
        values = self.size * self.score_tokens * self.top_logprobs * cells
        if values > MOST_VALUES:
            raise ValueError(
                f"size x score_tokens x top_logprobs x phases x batch_sizes x repeats is {values:,} "
                f"log-probabilities; at most {MOST_VALUES:,} can be held in memory"
            )
        return self


class DriftBound(Model):
    """How much a metric against BF16 may have become worse since the accepted run, position by position."""

    max_increase: Increase = Field(description="Since the accepted run.")
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
    batch_size: Count | None = Field(default=None, description="Default: every batch size.")


class DivergenceBounds(MetricBounds):
    """Bounds on accepted against candidate, not on their change against BF16."""

    other_device: Literal["judge", "skip"] = Field(
        default="judge",
        description="Where the accepted run was computed on another processor or GPU, which rounds "
        "differently. skip: not judged, and said so.",
    )


class DriftConfig(MetricKeys):
    """What may have changed since the accepted run of this candidate."""

    __pydantic_extra__: dict[str, DriftBound]

    decision: Decision = Field(default="proven_bad", description="Of bounds that give none.")
    on_failure: Literal["fail", "warn"] = Field(default="fail", description="warn: shown, but no failure.")
    divergence: DivergenceBounds | None = Field(
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

    decision: Decision = Field(
        default="point",
        description="Broken when: the value is beyond the bound; its whole interval is (proven_bad); its "
        "interval is not wholly within (proven_good).",
    )
    overrides: list[AccuracyOverride] = Field(
        default_factory=list, description="Other bounds for some phases or batch sizes."
    )
    drift: DriftConfig | None = Field(default=None, description="Against the last accepted run.")

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

    max_increase: Increase = Field(
        default=Increase(amount=0.25, relative=True), description="Of the mean KL to BF16; default 25%."
    )
    max_kl: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="Mean KL between the two ways."
    )
    decision: Decision = Field(default="proven_bad", description="As in `accuracy`.")


class WarmCacheCheck(SelfCheck):
    """Prompts met in the prefix cache against cold ones, at the smallest batch size."""

    phases: list[Phase] = Field(
        default=["prefill", "decode"], min_length=1, description="Decode costs one more pass per token."
    )


class SelfConsistencyConfig(Model):
    """Checks of the candidate against itself. null switches one off."""

    decode_against_prefill: SelfCheck | None = Field(
        default=SelfCheck(), description="Decode of a batch size against prefill of the same positions."
    )
    batch: SelfCheck | None = Field(default=SelfCheck(), description="Each batch size against the smallest.")
    warm_cache: WarmCacheCheck | None = Field(
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
    clean_runs: int = Field(
        default=3, ge=1, le=1000, description="Runs without a fault; an alarm in one is false."
    )
    prompts: Count = Field(default=8, description="How many of the suite's prompts are asked.")
    score_tokens: Count = Field(default=16, description="How many positions of each span are scored.")


class GateConfig(Model):
    """One gate: who the reference is, who is on trial, and what must hold."""

    version: Literal[1] = Field(description="Of this format.")
    name: str = Field(
        max_length=100,
        description="Names the tests and the output folder: letters, digits, '.', '_' and '-'.",
    )
    reference: ServerConfig | None = Field(default=None, description="Needed to capture the baseline.")
    candidate: ServerConfig = Field(description="On trial in every run.")
    baseline: RemoteUrl | Path = Field(
        description="Folder of the stored recording of the reference, or a URL that fsspec understands "
        "(hf://, "
        "s3://, https://, ...), with '#sha256=' of its manifest where it must never change."
    )
    suite: SuiteConfig = Field(default=SuiteConfig(), description="What is asked.")
    validity: ValidityConfig = Field(default=ValidityConfig(), description="What makes answers unusable.")
    accuracy: AccuracyConfig = Field(description="What must hold against BF16.")
    self_consistency: SelfConsistencyConfig = Field(
        default=SelfConsistencyConfig(), description="The candidate against itself."
    )
    speed: SpeedConfig | None = Field(default=None, description="Timed scenarios; null: nothing is timed.")
    generation: GenerationConfig | None = Field(
        default=None, description="Questions answered in full, held against the reference's answers. Slow."
    )
    selftest: SelftestConfig = Field(
        default=SelftestConfig(), description="What `quantguard selftest` tries."
    )

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
        if isinstance(value, str) and re.search(r"://[^/@]*:[^/@]*@|^https?://[^/]*@|://.*\?", value):
            raise ValueError(
                "no credentials and no '?...' here, they would be stored in results: give them in the "
                "environment"
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
