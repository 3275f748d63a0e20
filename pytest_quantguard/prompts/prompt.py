"""One prompt, whoever made it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked, and by what the answer is judged.

    Exactly one of `text` and `token_ids` is given. gold: what a right answer holds; its meaning is the
    task's. Empty for free-form prompts, which are compared but never scored.
    """

    id: str
    task: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    gold: tuple[str, ...] = ()
    language: str | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.token_ids is None):
            raise ValueError(f"prompt {self.id}: give either text or token_ids")
