"""What every section of the config is made of: the base of all models, bounds, and allowed increases."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

Decision = Literal["point", "proven_bad", "proven_good"]
"""Broken when: the value is beyond it; its interval is wholly beyond; its interval is not wholly within."""


MOST_TOKENS = 50_000_000
"""Of all prompts of a suite, a task or a scenario together; they are held in memory, 50 bytes each."""
MOST_VALUES = 1_000_000_000
"""Log-probabilities of a capture; they are held in memory, 8 bytes each."""

Seconds = Annotated[float, Field(gt=0, le=2_592_000, allow_inf_nan=False)]
"""Up to 30 days: what is longer is longer than a socket can wait."""
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Tokens = Annotated[int, Field(ge=1, le=10_000_000)]
Weight = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]


def require_room(tokens: int, what: str) -> None:
    """Raise ValueError for more prompt tokens than can be held. what: the keys whose product it is."""
    if tokens > MOST_TOKENS:
        raise ValueError(f"{what} is {tokens:,} tokens; at most {MOST_TOKENS:,} can be held in memory")


class Model(BaseModel):
    """Base of all config models: unknown keys are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Bound(Model):
    """What a metric must hold: at most `max` where lower is better, at least `min` where higher is better."""

    max: float | None = Field(
        default=None, allow_inf_nan=False, description="At most; where lower is better."
    )
    min: float | None = Field(
        default=None, allow_inf_nan=False, description="At least; where higher is better."
    )
    decision: Decision | None = Field(default=None, description="Default: `decision` of the section.")

    @model_validator(mode="after")
    def _one_side(self) -> Bound:
        if (self.max is None) == (self.min is None):
            raise ValueError("give exactly one of 'max' and 'min'")
        return self

    @property
    def limit(self) -> float:
        """The bound itself."""
        limit = self.min if self.max is None else self.max
        assert limit is not None
        return limit

    def __str__(self) -> str:
        return f">= {self.min:g}" if self.max is None else f"<= {self.max:g}"


class Increase(Model):
    """How much worse a metric may become: a share of what it was (`10%`) or a step in its unit (`0.01`)."""

    amount: float = Field(ge=0, allow_inf_nan=False)
    relative: bool

    @model_validator(mode="before")
    @classmethod
    def _from_scalar(cls, value: object) -> object:
        if isinstance(value, dict):
            return value
        if isinstance(value, str) and (share := re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*%\s*", value)):
            return {"amount": float(share[1]) / 100, "relative": True}
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            return {"amount": float(value), "relative": False}
        raise ValueError("give a share such as 10% or a number >= 0 in the metric's own unit")

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {
            "title": "Increase",
            "description": cls.__doc__,
            "anyOf": [
                {"type": "number", "minimum": 0},
                {"type": "string", "pattern": r"^\s*\d+(\.\d*)?\s*%\s*$"},
            ],
        }

    def __str__(self) -> str:
        return f"{self.amount:.3g}" if not self.relative else f"{self.amount * 100:.3g} %"
