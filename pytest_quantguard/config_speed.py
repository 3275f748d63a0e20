"""The `speed:` section: what is timed, how often, and what must hold."""

from __future__ import annotations

import re
from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from pytest_quantguard.config_base import Bound, Count, Decision, Model, Seconds, Tokens, Weight, require_room
from pytest_quantguard.stats.figures import FIGURES, canonical
from pytest_quantguard.stats.speed import MIN_ROUNDS

Level = Count | Literal["max"]
"""How many requests are in flight; "max": all of them."""

DEFAULT_WEIGHTS = {"1": 0.4, "8": 0.3, "max": 0.3}
DEFAULT_CORRECTNESS = ((0.97, 0.0), (0.99, 1.0))
MAX_WEIGHT_ERROR = 1e-6


def _share(value: object) -> object:
    """`5%` as 0.05; other values as they are."""
    if isinstance(value, str) and (found := re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*%\s*", value)):
        return float(found[1]) / 100
    return value


SHARE_SCHEMA = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^\s*\d+(\.\d*)?\s*%\s*$"}]}
Share = Annotated[
    float,
    BeforeValidator(_share),
    Field(allow_inf_nan=False),
    WithJsonSchema(SHARE_SCHEMA, mode="validation"),
]
"""A share, written 0.05 or 5%."""

LengthRange = Annotated[tuple[Tokens, Tokens], Field(description="Shortest and longest.")]
Length = Tokens | LengthRange


class ScenarioBase(Model):
    """What every scenario has."""

    name: str | None = Field(default=None, description="Names the tests; default: the kind.")
    levels: list[Level] | None = Field(default=None, min_length=1, description="Default: `speed.levels`.")
    requests: Count = Field(default=32, description="Requests of one round, at every level.")
    request_rate: float | None = Field(
        default=None,
        ge=0.001,
        le=1e6,
        allow_inf_nan=False,
        description="Requests per second (open loop); a level then limits how many wait.",
    )
    arrivals: Literal["poisson", "constant"] = Field(
        default="poisson", description="How an open loop spaces its requests."
    )

    @field_validator("name")
    @classmethod
    def _plain(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._]*", value):
            raise ValueError("allowed are letters, digits, '.' and '_', beginning with a letter or digit")
        return value


class SyntheticScenario(ScenarioBase):
    """Random prompts of exact length, none of which begins as another does."""

    shared_prefix: NonNegativeInt = Field(
        default=0,
        le=10_000_000,
        description="Tokens that all prompts have in common, to measure the prefix cache.",
    )

    @abstractmethod
    def lengths(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shortest and longest prompt, shortest and longest answer, in tokens."""

    @model_validator(mode="after")
    def _possible(self) -> SyntheticScenario:
        (shortest, longest), (least, most) = self.lengths()
        if shortest > longest or least > most:
            raise ValueError("a range of lengths is written [shortest, longest]")
        if self.shared_prefix >= shortest:
            raise ValueError(f"shared_prefix must be shorter than the shortest prompt ({shortest} tokens)")
        require_room(self.requests * longest, "requests x input_tokens")
        require_room(self.requests * most, "requests x output_tokens")
        return self


class PrefillHeavy(SyntheticScenario):
    """Long prompts, one token out: the time of the prompt's computation."""

    kind: Literal["prefill_heavy"]
    input_tokens: Tokens = Field(default=2048, description="Of each prompt.")
    output_tokens: Tokens = Field(default=1, description="Of each answer, exactly.")

    def lengths(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (self.input_tokens, self.input_tokens), (self.output_tokens, self.output_tokens)


class DecodeHeavy(SyntheticScenario):
    """Short prompts, long answers: the time of token after token."""

    kind: Literal["decode_heavy"]
    input_tokens: Tokens = Field(default=64, description="Of each prompt.")
    output_tokens: Tokens = Field(default=256, description="Of each answer, exactly.")

    def lengths(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (self.input_tokens, self.input_tokens), (self.output_tokens, self.output_tokens)


class Mixed(SyntheticScenario):
    """Prompts and answers of many lengths, drawn from the suite's seed."""

    kind: Literal["mixed"]
    input_tokens: Length = Field(default=(64, 1024), description="Of each prompt, or shortest and longest.")
    output_tokens: Length = Field(default=(16, 256), description="Of each answer, or shortest and longest.")

    def lengths(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return _as_range(self.input_tokens), _as_range(self.output_tokens)


class Replay(ScenarioBase):
    """Requests of a JSONL file: {"question", "model_response"}, or SGLang's {"conversations"}."""

    kind: Literal["replay"]
    file: Path = Field(description="The JSONL file.")
    requests: Count | None = Field(default=None, description="Only the first so many; default: all.")  # type: ignore[assignment]


Synthetic = PrefillHeavy | DecodeHeavy | Mixed
Scenario = Annotated[PrefillHeavy | DecodeHeavy | Mixed | Replay, Field(discriminator="kind")]


class Slo(Model):
    """Limits that a request must meet to count for goodput, in milliseconds."""

    ttft_ms: float | None = Field(default=None, gt=0, description="Time to first token.")
    tpot_ms: float | None = Field(default=None, gt=0, description="Mean time of each further token.")
    itl_ms: float | None = Field(default=None, gt=0, description="For the 99th percentile of its own gaps.")
    e2e_latency_ms: float | None = Field(default=None, gt=0, description="From sending to the last token.")

    @property
    def limits(self) -> dict[str, float]:
        """Latency -> most milliseconds."""
        given = self.model_dump(exclude_none=True)
        return {name.removesuffix("_ms"): limit for name, limit in given.items()}

    @model_validator(mode="after")
    def _something(self) -> Slo:
        if not self.limits:
            raise ValueError("limits nothing: give ttft_ms, tpot_ms, itl_ms or e2e_latency_ms")
        return self


class Score(Model):
    """The composite score of serving competitions: how many times as fast as the reference, weighted."""

    weights: dict[str, Weight] = Field(default=DEFAULT_WEIGHTS, description="Level -> weight; they sum to 1.")
    scenarios: list[str] | None = Field(
        default=None, description="Names of the scenarios whose durations are added; default: all."
    )
    correctness: list[tuple[Share, Weight]] = Field(
        default=list(DEFAULT_CORRECTNESS),
        min_length=1,
        description="Task score over the reference's -> coefficient; linear between, equal scores: a step.",
    )
    min: float | None = Field(default=None, gt=0, description="Fail below this score.")

    @field_validator("weights", mode="before")
    @classmethod
    def _levels_as_text(cls, value: object) -> object:
        return {str(level): weight for level, weight in value.items()} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _possible(self) -> Score:
        if abs(sum(self.weights.values()) - 1) > MAX_WEIGHT_ERROR:
            raise ValueError(f"the weights sum to {sum(self.weights.values()):g}; they must sum to 1")
        known = [score for score, _ in self.correctness]
        if known != sorted(known):
            raise ValueError("correctness must be listed by rising score")
        return self


class FigureBounds(Model):
    """Names of figures with their bounds, beside a section's own keys."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Bound]

    @model_validator(mode="after")
    def _known_figures(self) -> FigureBounds:
        given = self.__pydantic_extra__ or {}
        unknown = [name for name in given if canonical(name) not in FIGURES]
        if unknown:
            allowed = [*type(self).model_fields, *FIGURES]
            raise PydanticCustomError("unknown_keys", "unknown keys", {"keys": unknown, "allowed": allowed})
        meant: dict[str, str] = {}
        for name in given:
            if (other := meant.setdefault(canonical(name), name)) != name:
                raise ValueError(f"{other} and {name} are one figure, which can have one bound")
        for name, bound in given.items():
            wanted = "min" if FIGURES[canonical(name)].better == "higher" else "max"
            if getattr(bound, wanted) is None:
                raise PydanticCustomError(
                    "wrong_side",
                    "{metric} is better {better}: bound it with '{wanted}'",
                    {"metric": name, "better": FIGURES[canonical(name)].better, "wanted": wanted},
                )
        return self

    @property
    def bounds(self) -> dict[str, Bound]:
        """Figure -> bound, in the order of the file, by its name in `FIGURES`."""
        return {canonical(name): bound for name, bound in (self.__pydantic_extra__ or {}).items()}


class SpeedRules(FigureBounds):
    """What must hold of a scenario at a level."""

    max_slowdown: Share | None = Field(
        default=None, ge=0, description="Against the accepted record: 5% or 0.05."
    )
    min_speedup_vs_reference: float | None = Field(
        default=None, gt=0, description="The reference's time over the candidate's, in the same session."
    )

    @field_validator("max_slowdown", mode="before")
    @classmethod
    def _percent_is_written(cls, value: object) -> object:
        if isinstance(value, int | float) and value >= 1:
            raise ValueError(f"{value:g} would be {value:.0%}: write {value:g}% or {value / 100:g}")
        return value


class SpeedOverride(SpeedRules):
    """Other rules for some scenarios or levels; where several match, the last one wins."""

    scenario: str | None = Field(default=None, description="Default: every scenario.")
    level: Level | None = Field(default=None, description="Default: every level.")


class SpeedConfig(SpeedRules):
    """What is timed and what must hold. Without any rule, figures are only reported."""

    scenarios: list[Scenario] = Field(
        default=[PrefillHeavy(kind="prefill_heavy"), DecodeHeavy(kind="decode_heavy")],
        min_length=1,
        description="What is timed; default: one prefill_heavy and one decode_heavy.",
    )
    levels: list[Level] = Field(
        default=[1, 8, "max"], min_length=1, description="Requests in flight; max: all at once."
    )
    rounds: int = Field(
        default=7, ge=1, le=10_000, description="Timed repetitions of each scenario at each level."
    )
    warmup_rounds: NonNegativeInt = Field(
        default=5,
        le=10_000,
        description="At most so many untimed rounds, until two in a row agree within 5 %.",
    )
    decision: Decision = Field(default="point", description="Of bounds that give none.")
    max_scatter: Share = Field(
        default=0.1, gt=0, description="Rounds with a larger standard deviation over mean prove nothing."
    )
    on_inconclusive: Literal["warn", "fail"] = Field(
        default="warn", description="What becomes of a bound or comparison about which times prove nothing."
    )
    allowed_errors: NonNegativeInt = Field(
        default=0, le=1_000_000, description="Requests of a round that may fail."
    )
    stall_timeout: Seconds = Field(
        default=120, description="Seconds without a byte after which a request is given up."
    )
    reference_rounds: Literal["auto", "interleaved", "in_turn"] = Field(
        default="auto", description="auto: interleaved where both servers fit, otherwise one after the other."
    )
    slo: Slo | None = Field(default=None, description="Limits that a request must keep, for goodput.")
    score: Score | None = Field(default=None, description="One number over scenarios and levels.")
    overrides: list[SpeedOverride] = Field(
        default_factory=list, description="Other rules for some scenarios or levels."
    )

    @field_validator("scenarios")
    @classmethod
    def _named_apart(cls, value: list[Scenario]) -> list[Scenario]:
        names = [name_of(scenario) for scenario in value]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two scenarios are called '{twice[0]}': give each a `name`")
        return value

    @model_validator(mode="after")
    def _enough_rounds(self) -> SpeedConfig:
        judged = any(
            rules.max_slowdown is not None or rules.min_speedup_vs_reference is not None
            for rules in (self, *self.overrides)
        )
        if judged and self.rounds < MIN_ROUNDS:
            raise ValueError(
                f"rounds is {self.rounds}; max_slowdown and min_speedup_vs_reference need at least "
                f"{MIN_ROUNDS}, fewer give no interval"
            )
        return self

    @model_validator(mode="after")
    def _overrides_match(self) -> SpeedConfig:
        known = {(name, str(level)) for name, level in self.cells()}
        for index, override in enumerate(self.overrides):
            wanted = (override.scenario, None if override.level is None else str(override.level))
            if not any(all(w in (None, k) for w, k in zip(wanted, cell, strict=True)) for cell in known):
                raise PydanticCustomError(
                    "override_matches_nothing",
                    "speed.overrides[{index}] matches no scenario at no level; there are: {known}",
                    {"index": index, "known": ", ".join("-".join(cell) for cell in sorted(known))},
                )
        return self

    @model_validator(mode="after")
    def _score_is_measured(self) -> SpeedConfig:
        if self.score is None:
            return self
        names = [name_of(scenario) for scenario in self.scenarios]
        for name in self.score.scenarios or names:
            if name not in names:
                raise ValueError(f"score.scenarios names '{name}'; there are: {', '.join(names)}")
            if self.scenario(name).request_rate is not None:
                raise ValueError(
                    f"the score adds durations, and that of '{name}' is the one of its arrivals "
                    "(request_rate): name the other scenarios in score.scenarios"
                )
            levels = {str(level) for known, level in self.cells() if known == name}
            missing = [level for level in self.score.weights if level not in levels]
            if missing:
                raise ValueError(
                    f"score.weights has level {missing[0]}, at which '{name}' is not timed: add it to its "
                    "levels, or give other weights"
                )
        return self

    def cells(self) -> list[tuple[str, Level]]:
        """Every (scenario, level) that is timed, in order."""
        return [
            (name_of(scenario), level)
            for scenario in self.scenarios
            for level in dict.fromkeys(scenario.levels or self.levels)
        ]

    def scenario(self, name: str) -> Scenario:
        """The scenario of this name."""
        return next(scenario for scenario in self.scenarios if name_of(scenario) == name)

    def rules_of(self, name: str, level: Level) -> SpeedRules:
        """What must hold of one scenario at one level, overrides applied."""
        bounds: dict[str, Bound] = self.bounds
        slowdown, speedup = self.max_slowdown, self.min_speedup_vs_reference
        for override in self.overrides:
            if override.scenario in (None, name) and override.level in (None, level):
                bounds.update(override.bounds)
                slowdown = slowdown if override.max_slowdown is None else override.max_slowdown
                speedup = (
                    speedup
                    if override.min_speedup_vs_reference is None
                    else override.min_speedup_vs_reference
                )
        rules: dict[str, Any] = {"max_slowdown": slowdown, "min_speedup_vs_reference": speedup, **bounds}
        return SpeedRules.model_construct(**rules)  # Of validated values: 100% is 1.0 by now.

    @property
    def needs_reference(self) -> bool:
        """Whether something is held against the reference in the same session."""
        rules = (self, *self.overrides)
        return self.score is not None or any(rule.min_speedup_vs_reference is not None for rule in rules)


def name_of(scenario: Scenario) -> str:
    """How tests and results call the scenario."""
    return scenario.name or scenario.kind


def _as_range(length: int | tuple[int, int]) -> tuple[int, int]:
    return (length, length) if isinstance(length, int) else length
