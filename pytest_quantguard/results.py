"""What a run found, as the file `result.json`: typed, versioned, written whole or not at all.

The terminal table, reports and other tools read these models; nothing here computes a verdict.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pytest_quantguard.config import Decision, Phase
from pytest_quantguard.errors import QuantguardError
from pytest_quantguard.prompts.analysis import Composition
from pytest_quantguard.whole_files import replace_file

SCHEMA_VERSION: Literal[1] = 1
RESULT_FILE = "result.json"
ELSEWHERE = "another folder with --quantguard-output=DIR"

RELATIVE = "relative"
"""Unit of a change as a share of what was before."""

NOT_RUN = "Not run: "
"""Begins the message of a check that met an error which another check tells in full."""

Kind = Literal["server", "validity", "accuracy", "self_consistency", "drift", "generation", "speed"]
Outcome = Literal["passed", "failed", "warned", "error", "skipped"]


class Result(BaseModel):
    """Base of all result models: unknown keys are errors, values never change. Non-finite numbers become
    null.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class SpeedVerdict(Result):
    """What was decided about one cell's times.

    value: for "accepted" the time over the accepted one, for "reference" the reference's time over ours, else
    the figure. Of the accepted record, as shares: noise, what the time may differ by when nothing changed;
    spread, the standard deviation of its runs, of which there are `runs`. reasons: of a doubt.
    """

    against: Literal["errors", "bound", "accepted", "reference"]
    figure: str
    status: Literal[
        "held", "failed", "improved", "unchanged", "regressed", "reached", "missed", "inconclusive", "refused"
    ]
    value: float | None = None
    bound: float | None = None
    bound_side: Literal["max", "min"] | None = None
    interval: tuple[float, float] | None = None
    noise: float | None = None
    runs: int | None = None
    spread: float | None = None
    sentence: str
    reasons: list[str] = []

    @property
    def failed(self) -> bool:
        """Whether it fails the check; what is inconclusive does so only if the config says."""
        return self.status in ("failed", "regressed", "missed", "refused")


class SpeedResult(Result):
    """One scenario at one level.

    figures: median over the rounds; intervals: 95 % of that median; by_round: every round. compared: the
    figure that is held against other runs. scatter: standard deviation over mean of its rounds. errors: most
    failed requests in a round. reference_rounds: the compared figure of the reference.
    """

    scenario: str
    level: str
    requests: int
    concurrency: int
    request_rate: float | None = None
    input_tokens: int
    output_tokens: int
    rounds: int
    warmup_rounds: int
    steady: bool
    compared: str
    figures: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    by_round: dict[str, list[float]]
    scatter: float
    errors: int
    error_examples: list[str] = []
    cached_tokens: int = 0
    reference_rounds: list[float] = []
    interleaved: bool = False
    machine: dict[str, Any] = {}
    verdicts: list[SpeedVerdict] = []

    @property
    def shown_level(self) -> str:
        """The level; where the scenario has fewer requests, with how many were in flight at most."""
        few = self.level != "max" and self.concurrency < int(self.level)
        return f"{self.level} ({self.concurrency})" if few else self.level


class CheckResult(Result):
    """One check, as one test reports it.

    interval: 95 %, clustered by prompt. noise_floor: the metric between two recordings of the reference.
    detectable_change: the smallest change that this suite could have told from none.
    decision: the rule that turned value, interval and bound into the outcome.
    """

    id: str
    kind: Kind
    phase: Phase | None = None
    batch_size: int | None = None
    metric: str | None = None
    unit: str | None = None
    value: float | None = None
    bound: float | None = None
    bound_side: Literal["max", "min"] | None = None
    interval: tuple[float, float] | None = None
    noise_floor: float | None = None
    detectable_change: float | None = None
    near_bound: bool = False
    decision: Decision | None = None
    outcome: Outcome
    message: str = ""
    extra: dict[str, Any] = Field(default_factory=dict, description="Figures of this kind of check.")
    speed: SpeedResult | None = None

    @property
    def passed(self) -> bool:
        """Whether the check ran and held."""
        return self.outcome in ("passed", "warned")


class CellResult(Result):
    """What one cell cost, and every metric of it against the baseline."""

    phase: Phase
    batch_size: int
    mode: str
    warm: bool = False
    repeat: int = 0
    requests: int
    seconds: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    metrics: dict[str, float] = {}
    by_position: dict[str, dict[str, float]] = Field(default={}, description="Parts of the scored span.")
    by_task: dict[str, dict[str, float]] = {}
    standard_errors: dict[str, float] = Field(default={}, description="Of `metrics`, clustered by prompt.")
    notes: list[str] = []


class SpanPart(Result):
    """A stretch of the scored span, positions `begin` up to before `end`, over all prompts."""

    begin: int
    end: int
    kl_mean: float
    kl_p90: float
    agreement: float


class Histogram(Result):
    """Positions by KL. edges: ascending, one more than counts; the outermost counts hold what lies beyond.

    noise: the same for the reference at another batch size against itself, where it was captured at two.
    """

    edges: list[float]
    candidate: list[int]
    noise: list[int] | None = None


class CellDetail(Result):
    """Where in a cell the candidate is far from BF16, and how it compares with the reference's own noise."""

    phase: Phase
    batch_size: int
    along_span: list[SpanPart]
    histogram: Histogram


class PromptDetail(Result):
    """A prompt, and its mean KL and agreement in each cell ("prefill-bs8")."""

    id: str
    task: str
    tokens: int
    kl_mean: dict[str, float]
    agreement: dict[str, float]


class TokenProbability(Result):
    """A token of a distribution's top 10.

    elsewhere: its probability on the other side; None where it is outside that side's top K.
    """

    id: int
    text: str
    probability: float
    elsewhere: float | None


class WorstPosition(Result):
    """A position where the candidate is far from BF16. All texts are raw: whoever shows them escapes them.

    position: within the scored span of `span` positions. phase, batch_size: the cell where it is worst.
    before, after: the text around it; `reference` is the token that stands there.
    flip: the most likely tokens differ. confident: and the baseline was sure of its own.
    """

    prompt: str
    task: str
    position: int
    span: int
    phase: Phase
    batch_size: int
    kl: float
    kl_by_cell: dict[str, float]
    before: str
    reference: str
    after: str
    flip: bool
    confident: bool
    baseline: list[TokenProbability]
    candidate: list[TokenProbability]


class Details(Result):
    """What a report shows beyond the figures of the cells. Bounded in size, whatever the suite."""

    cells: list[CellDetail] = []
    prompts: list[PromptDetail] = Field(default=[], description="The worst ones of a large suite.")
    prompts_left_out: int = 0
    worst: list[WorstPosition] = []


class ServerResult(Result):
    """The server that answered, as it was started and as it describes itself. Holds no secret."""

    backend: str
    model_path: str | None = None
    dtype: str | None = None
    quantization: str | dict[str, str] | None = None
    kv_cache_dtype: str | None = None
    faults: list[str] = []
    command: str | None = None
    seconds_to_ready: float | None = Field(
        default=None, description="From launch to the first token; absent for an attached server."
    )
    url: str | None = None
    log: str | None = None
    capabilities: dict[str, Any] = {}

    @property
    def title(self) -> str:
        """One line for headers."""
        parts = [self.backend, self.model_path or "unknown model"]
        if isinstance(self.quantization, dict):
            parts.append("mixed quantization")
        elif self.quantization:
            parts.append(self.quantization)
        if self.kv_cache_dtype and self.kv_cache_dtype != "auto":
            parts.append(f"KV cache {self.kv_cache_dtype}")
        if self.faults:
            parts.append(f"faults: {', '.join(self.faults)}")
        return ", ".join(parts)


class GeneratedText(Result):
    """One answer. text: its beginning, raw; truncated: there is more. ending: why it ended."""

    text: str
    truncated: bool = False
    tokens: int
    ending: Literal["stop", "length", "deadline"]
    score: float
    seconds: float


class GenerationAnswer(Result):
    """A question with both answers.

    question: its beginning and end. signs: lost, won (scored less or more than the reference); runaway,
    empty, loop, echo (what the reference's answer is not). first_divergence: tokens (characters on the chat
    route) in common; null for the same text.
    """

    id: str
    task: str
    language: str | None = None
    question: str
    gold: list[str]
    reference: GeneratedText
    candidate: GeneratedText
    signs: list[str]
    first_divergence: int | None = None


class GenerationFigures(Result):
    """Of one task, or of all. Counts of signs are those that the reference's answers do not show."""

    prompts: int
    score: float
    reference_score: float
    relative_score: float | None = None
    relative_interval: tuple[float, float] | None = None
    lost: int
    won: int
    mcnemar_p: float
    runaways: int
    empty_answers: int
    loops: int
    echoes: int
    reference_runaways: int
    reference_empty: int
    reference_loops: int
    reference_echoes: int
    length_ratio: float | None = None
    text_agreement: float
    first_divergence_median: float | None = None
    output_tokens: int
    reference_tokens: int


class GenerationResult(Result):
    """What became of the generation questions.

    answers: those with a sign, worst first; left_out: how many more there are. skipped: ids of prompts that
    the context had no room for. resumed: answers of an interrupted run that were taken over.
    """

    route: Literal["native", "chat"]
    tasks: dict[str, GenerationFigures]
    overall: GenerationFigures
    answers: list[GenerationAnswer] = []
    left_out: int = 0
    skipped: list[str] = []
    resumed: int = 0
    concurrency: int
    seconds: float
    notes: list[str] = []


class TrialResult(Result):
    """What the process that ran a config knows beyond its checks."""

    name: str
    config_path: str
    config: dict[str, Any]
    started: str
    candidate: ServerResult | None = None
    baseline_path: str
    baseline: dict[str, Any] | None = Field(default=None, description="Its manifest, without file digests.")
    accepted: dict[str, Any] | None = None
    environment: dict[str, Any] = {}
    cells: list[CellResult] = []
    details: Details = Details()
    generation: GenerationResult | None = None
    prompts: Composition | None = Field(
        default=None, description="What the suite is made of, as `quantguard analyze` tells it."
    )
    diagnosis: list[str] = []
    notes: list[str] = []


class RunResult(TrialResult):
    """The whole of `result.json`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    verdict: Literal["passed", "failed", "incomplete"]
    partial: bool = Field(description="The run ended before every selected check had a result.")
    unselected: int = Field(default=0, description="Checks of the config that -k, -m or ids left out.")
    finished: str
    seconds: float
    checks: list[CheckResult]

    @property
    def failures(self) -> list[CheckResult]:
        """Checks that failed or could not run."""
        return [check for check in self.checks if check.outcome in ("failed", "error")]


def write_result(folder: Path, result: RunResult) -> Path:
    """Write `folder/result.json` atomically; raises `QuantguardError` where that is not possible."""
    body = to_json(result.model_dump(mode="json"), orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    return write_whole(folder / RESULT_FILE, body, "The result")


def to_json(value: Any, option: int = 0) -> bytes:
    """UTF-8; lone surrogates, which undecodable file names and broken servers make, become escapes."""
    try:
        return orjson.dumps(value, option=option)
    except TypeError:
        return orjson.dumps(_encodable(value), option=option)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list) else value


def write_whole(path: Path, body: bytes, what: str, elsewhere: str = ELSEWHERE) -> Path:
    """Write a file of a run so that it appears whole or not at all.

    Raises `QuantguardError` that names `what` it was, and that it may go `elsewhere`.
    """
    try:
        replace_file(path, body)
    except OSError as error:
        raise QuantguardError(
            f"{what} could not be written to {path}: {error.strerror or error}. Free space or "
            f"permissions there, or choose {elsewhere}."
        ) from error
    return path


def read_result(path: Path) -> RunResult:
    """Read a `result.json`, or the one in a folder; raises `QuantguardError` that says what is wrong."""
    file = path / RESULT_FILE if path.is_dir() else path
    try:
        loaded = orjson.loads(file.read_bytes())
    except FileNotFoundError:
        raise QuantguardError(
            f"There is no result at {file}. Run the gate first: quantguard run CONFIG."
        ) from None
    except OSError as error:
        raise QuantguardError(f"{file} cannot be read: {error.strerror or error}.") from error
    except orjson.JSONDecodeError as error:
        raise QuantguardError(f"{file} is not JSON: {error}. Run the gate again.") from error
    version = loaded.get("schema_version") if isinstance(loaded, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise QuantguardError(
            f"{file} has schema version {version}; this pytest-quantguard reads up to {SCHEMA_VERSION}. "
            "Upgrade with: pip install -U pytest-quantguard."
        )
    try:
        return RunResult.model_validate(loaded)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise QuantguardError(
            f"{file} is not a result of pytest-quantguard: {where}: {first['msg']}."
        ) from error
