"""The config's section `generation`: which questions are asked, how, and what the answers must hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from pytest_quantguard.config_base import (
    Bound,
    Count,
    Decision,
    Model,
    Seconds,
    Seed,
    Tokens,
    require_room,
)
from pytest_quantguard.generation.metrics import GENERATION_METRICS
from pytest_quantguard.prompts.tasks import TASKS

BUILTIN_SIZE = 30
BUILTIN_TOKENS = 512
LEAST_BUDGET = 128


class GenerationBounds(Model):
    """What generated answers must hold; null: nothing."""

    score: Bound | None = None
    relative_score: Bound | None = None
    loss_p: Bound | None = None
    runaways: Bound | None = None
    empty_answers: Bound | None = None
    loops: Bound | None = None
    echoes: Bound | None = None
    length_ratio: Bound | None = None
    text_agreement: Bound | None = None

    @model_validator(mode="after")
    def _right_side(self) -> GenerationBounds:
        for name, bound in self.bounds.items():
            metric = GENERATION_METRICS[name]
            wanted = "min" if metric.better == "higher" else "max"
            if getattr(bound, wanted) is None:
                raise PydanticCustomError(
                    "wrong_side",
                    "{metric} is better {better}: bound it with '{wanted}'",
                    {"metric": name, "better": metric.better, "wanted": wanted},
                )
            if name == "loss_p" and bound.decision not in (None, "point"):
                raise ValueError("loss_p is a test of its own: its decision is always point")
        return self

    @property
    def bounds(self) -> dict[str, Bound]:
        """Metric name -> bound, in the order of `GENERATION_METRICS`."""
        found = ((name, getattr(self, name)) for name in GENERATION_METRICS)
        return {name: bound for name, bound in found if bound is not None}


class TaskConfig(GenerationBounds):
    """One task: how much of it is asked, and bounds for its answers alone."""

    size: Count | None = Field(
        default=None, description="Prompts. Default: 30 built-in ones; all that a file has."
    )
    tokens: int | None = Field(
        default=None,
        ge=8,
        le=10_000_000,
        description="Length of a built-in question, as estimated. Default: 512.",
    )
    languages: list[Literal["en", "zh"]] | None = Field(
        default=None, min_length=1, description="Of built-in questions; they take turns. Default: en."
    )
    max_new_tokens: Tokens | None = Field(default=None, description="Default: that of the section.")

    @model_validator(mode="after")
    def _fits_in_memory(self) -> TaskConfig:
        require_room((self.size or BUILTIN_SIZE) * (self.tokens or BUILTIN_TOKENS), "size x tokens")
        return self


class GenerationConfig(GenerationBounds):
    """Questions that the candidate answers in full; its answers are held against the reference's.

    The bounds are for all prompts together; each task may have its own.
    """

    prompts: str = Field(
        default="builtin", description="'builtin' or the path of a JSONL file of task, question and gold."
    )
    tasks: dict[str, TaskConfig] = Field(
        default_factory=lambda: {task: TaskConfig() for task in TASKS},
        min_length=1,
        description="Which tasks. Default: all five built-in ones, or all that the file has.",
    )
    seed: Seed = Field(default=0, description="Of built-in questions.")
    route: Literal["native", "chat"] = Field(
        default="native",
        description="native: token ids to /generate, the template applied here; chat: messages to "
        "/v1/chat/completions, the template applied by the server.",
    )
    chat_template: bool = Field(default=True, description="false: the question as plain text.")
    tokenizer: Path | None = Field(
        default=None, description="Folder of tokenizer.json. Default: the reference's model folder."
    )
    system: str | None = Field(default=None, description="A system message before each question.")
    template_variables: dict[str, Any] = Field(
        default_factory=dict, description="Further variables of the template, e.g. enable_thinking: false."
    )
    concurrency: int = Field(default=8, ge=1, le=1024, description="Questions asked at the same time.")
    max_new_tokens: Tokens = Field(default=256, description="Longest answer.")
    budget_factor: float | None = Field(
        default=4.0,
        ge=1,
        le=1e6,
        allow_inf_nan=False,
        description="An answer may be so many times as long as the reference's, at least 128 tokens and at "
        "most max_new_tokens; null: max_new_tokens.",
    )
    deadline: Seconds = Field(default=300, description="Seconds; an answer that takes longer is ended.")
    too_long: Literal["skip", "error"] = Field(
        default="skip", description="What becomes of prompts that the server's context has no room for."
    )
    repeats: int = Field(
        default=2, ge=1, le=2, description="2: the reference answers twice at capture, to know its own noise."
    )
    resume: bool = Field(default=True, description="Take over finished answers of an interrupted run.")
    decision: Decision = Field(default="point", description="Of bounds that give none.")

    relative_score: Bound | None = Bound(min=0.95)
    runaways: Bound | None = Bound(max=0.02)
    empty_answers: Bound | None = Bound(max=0.02)
    loops: Bound | None = Bound(max=0.02)
    echoes: Bound | None = Bound(max=0.02)
    length_ratio: Bound | None = Bound(max=1.5)

    @model_validator(mode="after")
    def _tasks_fit_prompts(self) -> GenerationConfig:
        if self.prompts == "builtin":
            unknown = [task for task in self.tasks if task not in TASKS]
            if unknown:
                raise PydanticCustomError(
                    "unknown_task",
                    "there is no built-in task {task}; known: {known}",
                    {"task": repr(unknown[0]), "known": ", ".join(TASKS)},
                )
            return self
        for task, config in self.tasks.items():
            given = [key for key in ("tokens", "languages") if getattr(config, key) is not None]
            if given:
                raise PydanticCustomError(
                    "builtin_only",
                    "tasks.{task}.{key} is for built-in questions; those of a file are as they are",
                    {"task": task, "key": given[0]},
                )
        return self

    @model_validator(mode="after")
    def _template_fits_route(self) -> GenerationConfig:
        if self.route == "chat" and not self.chat_template:
            raise ValueError("route chat always goes through the server's template: use route native")
        if not self.chat_template and (self.system is not None or self.template_variables):
            raise ValueError("system and template_variables need the chat template")
        return self

    @property
    def file_tasks(self) -> dict[str, TaskConfig] | None:
        """The tasks to take from a file; None for all that it has."""
        return self.tasks if "tasks" in self.model_fields_set else None
