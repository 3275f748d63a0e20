"""A question that a server is asked, and what it wrote. Plain data; nothing here asks or judges."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import orjson
from pydantic import BaseModel, ConfigDict, Field

from pytest_quantguard.prompts.prompt import Prompt

Ending = Literal["stop", "length", "deadline"]
"""Why an answer ended: the model ended it, its token budget was used up, or its time."""
Route = Literal["native", "chat"]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]


class Question(NamedTuple):
    """A prompt as it goes to a server.

    input_ids: what is sent on the native route; None on the chat route, which is sent the prompt's text.
    prompt_tokens: its length; on the chat route perhaps without what the server's template adds.
    max_new_tokens: the token budget of the answer.
    """

    prompt: Prompt
    input_ids: tuple[int, ...] | None
    prompt_tokens: int
    max_new_tokens: int


class GeneratedAnswer(BaseModel):
    """What a server wrote for one prompt.

    output_ids: None where the route does not tell them. seconds: from sending to the whole answer.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    text: str
    output_ids: tuple[TokenId, ...] | None = None
    ending: Ending
    prompt_tokens: Count
    completion_tokens: Count
    seconds: float = Field(ge=0, allow_inf_nan=False)

    @property
    def ran_on(self) -> bool:
        """Whether it was cut off instead of ended."""
        return self.ending != "stop"


def digest_questions(prompts: Sequence[Prompt], settings: dict[str, Any]) -> str:
    """SHA-256 (hex) of everything that bears on the answers: prompts in order, their gold, and how they are
    asked.
    """
    digest = hashlib.sha256(orjson.dumps(settings, option=orjson.OPT_SORT_KEYS))
    for prompt in prompts:
        parts = [prompt.id, prompt.task, prompt.text, prompt.token_ids, prompt.gold]
        digest.update(b"\n" + orjson.dumps(parts))
    return digest.hexdigest()
