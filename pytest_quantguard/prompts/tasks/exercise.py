"""What every task gives: a question with a provable answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from pytest_quantguard.prompts.lengths import TokenCounter, fit_longest
from pytest_quantguard.prompts.words import Language


@dataclass(frozen=True, slots=True)
class Exercise:
    """A question and what a right answer holds; how they are compared is the task's rule (`scoring`)."""

    text: str
    gold: tuple[str, ...]


Maker = Callable[[random.Random, int, Language, TokenCounter], Exercise]
"""(generator, tokens at most, language, token counter) -> Exercise. Raises TooShortError."""


def longest_exercise(
    build: Callable[[int], Exercise], tokens: int, count: TokenCounter, *, least: int
) -> Exercise:
    """The longest of build(least), build(least + 1), ... of at most `tokens` tokens. Raises TooShortError."""
    return fit_longest(build, tokens, lambda exercise: count(exercise.text), least=least)
