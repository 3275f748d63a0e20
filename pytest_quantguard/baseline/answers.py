"""The reference's answers to the generation questions, as an attachment of its recording.

JSON lines: who answered what, then an answer a line, with the token ids that were sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from pytest_quantguard.baseline.manifest import Arguments, Digest
from pytest_quantguard.baseline.store import first_problem, read_attachment, write_attachment
from pytest_quantguard.errors import BaselineError
from pytest_quantguard.generation.answer import GeneratedAnswer, Route, TokenId

ATTACHMENT = "generation"
FORMAT_VERSION: Literal[1] = 1


class AnswersHeader(BaseModel):
    """Who answered, and what was asked.

    questions_digest: `digest_questions`. settings: what of the config went into it, to name a difference.
    skipped: ids of prompts that the context had no room for. noise: by task ("all": all), the metrics of the
    reference's second answers against its first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    format_version: Literal[1] = FORMAT_VERSION
    created: str
    model_path: str | None
    server: Arguments
    route: Route
    questions_digest: Digest
    settings: dict[str, Any]
    skipped: tuple[str, ...] = ()
    noise: dict[str, dict[str, FiniteFloat]] = {}


class ReferenceAnswer(BaseModel):
    """An answer, and the token ids that were sent for it (None on the chat route)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input_ids: tuple[TokenId, ...] | None = Field(default=None, min_length=1)
    answer: GeneratedAnswer

    @model_validator(mode="after")
    def _counted(self) -> ReferenceAnswer:
        if self.input_ids is not None and len(self.input_ids) != self.answer.prompt_tokens:
            raise ValueError(
                f"{self.answer.id}: {len(self.input_ids)} ids were sent, prompt_tokens is "
                f"{self.answer.prompt_tokens}"
            )
        return self


class ReferenceAnswers(BaseModel):
    """The whole attachment; answers in the order of the questions, without the skipped ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    header: AnswersHeader
    answers: tuple[ReferenceAnswer, ...]

    @model_validator(mode="after")
    def _consistent(self) -> ReferenceAnswers:
        times = Counter(stored.answer.id for stored in self.answers)
        repeated = next((name for name, count in times.items() if count > 1), None)
        if repeated is not None:
            raise ValueError(f"{repeated} is answered twice")
        sent = self.header.route == "native"
        odd = next((one.answer.id for one in self.answers if (one.input_ids is not None) != sent), None)
        if odd is not None:
            raise ValueError(f"{odd}: route {self.header.route} {'has' if sent else 'has no'} input_ids")
        return self

    @property
    def by_id(self) -> Mapping[str, ReferenceAnswer]:
        """Prompt id -> answer."""
        return {stored.answer.id: stored for stored in self.answers}


def write_answers(path: Path, answers: ReferenceAnswers) -> None:
    """Store beside the recording at `path`, in place of earlier answers. Raises BaselineError."""
    write_attachment(path, ATTACHMENT, dump_answers(answers))


def dump_answers(answers: ReferenceAnswers) -> bytes:
    """The attachment's content."""
    lines = [answers.header.model_dump_json(), *(stored.model_dump_json() for stored in answers.answers)]
    return "".join(f"{line}\n" for line in lines).encode()


def read_answers(path: Path, *, command: str) -> ReferenceAnswers:
    """Raises BaselineError where there are none, or where they cannot be read. command: what records them."""
    content = read_attachment(path, ATTACHMENT)
    if content is None:
        raise BaselineError(
            f"The baseline at {path} holds no answers of the reference to the generation questions. Record "
            f"them with: {command}"
        )
    try:
        first, *lines = content.splitlines()
        return ReferenceAnswers(
            header=AnswersHeader.model_validate_json(first),
            answers=tuple(ReferenceAnswer.model_validate_json(line) for line in lines),
        )
    except (ValueError, ValidationError) as error:
        raise BaselineError(
            f"The reference's answers in {path} are not in this package's format: {first_problem(error)}. "
            f"Record them anew with: {command}"
        ) from error
