"""Signs that an answer went wrong, whatever its score: it is empty, repeats itself, or repeats the question.

Each looks at one answer alone; whether the reference did the same is the caller's business.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from pytest_quantguard.prompts.measures import tokenize_words
from pytest_quantguard.prompts.scoring import strip_reasoning

LONGEST_PERIOD = 64
LOOP_TOKENS = 32
LOOP_REPEATS = 4
"""A stretch is a loop if it is so long and holds its period so often: "ha ha ha" is none, nor is the rule of
a table (one or a few tokens)."""
ECHO_WORDS = 24
"""So many words in a row are more than a quotation; in scripts without spaces a character is a word."""


def is_empty(text: str) -> bool:
    """Nothing that could be read: no letter, digit or sign outside the reasoning. Control characters and
    marks of direction are nothing.
    """
    return not any(character.isprintable() and not character.isspace() for character in strip_reasoning(text))


def loops(text: str, token_ids: Sequence[int] | None) -> bool:
    """Whether a stretch of the answer repeats itself over and over. By tokens, or by words without them."""
    return longest_loop(token_ids if token_ids is not None else tokenize_words(text)) is not None


def longest_loop(units: Sequence[Hashable]) -> tuple[int, int, int] | None:
    """(start, period, length) of the longest stretch that repeats with a period of at most 64 units.

    Only stretches of at least 32 units and 4 repetitions count; None where there is none.
    """
    numbers: dict[Hashable, int] = {}
    ids = np.array([numbers.setdefault(unit, len(numbers)) for unit in units], dtype=np.int64)
    longest = None
    for period in range(1, min(LONGEST_PERIOD, len(ids) // LOOP_REPEATS) + 1):
        start, matches = _longest_run(ids[period:] == ids[:-period])
        length = matches + period
        if length < max(LOOP_TOKENS, LOOP_REPEATS * period):
            continue
        if longest is None or length > longest[2]:
            longest = (start, period, length)
    return longest


def echoes(text: str, question: str) -> bool:
    """Whether the answer repeats 24 or more consecutive words of the question."""
    asked, answered = tokenize_words(question), tokenize_words(text)
    if len(asked) < ECHO_WORDS or len(answered) < ECHO_WORDS:
        return False
    runs = {tuple(asked[start : start + ECHO_WORDS]) for start in range(len(asked) - ECHO_WORDS + 1)}
    return any(
        tuple(answered[start : start + ECHO_WORDS]) in runs for start in range(len(answered) - ECHO_WORDS + 1)
    )


def first_difference(left: Sequence[Hashable], right: Sequence[Hashable]) -> int | None:
    """Index of the first unit that differs, or that only one side has; None for equal sequences."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def _longest_run(true: np.typing.NDArray[np.bool_]) -> tuple[int, int]:
    """(start, length) of the longest run of True; length 0 where there is none."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], true, [False])).astype(np.int8)))
    if edges.size == 0:
        return 0, 0
    starts, ends = edges[::2], edges[1::2]
    best = int(np.argmax(ends - starts))
    return int(starts[best]), int(ends[best] - starts[best])
