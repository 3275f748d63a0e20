"""The built-in suite: seeded prompts of many kinds, short to long.

All five tasks and free-form texts, in English and Chinese. They are asked as plain text: log-probabilities of
any text show a numeric fault, with or without a chat template. Most prompts are short, because they cost
less; a few reach the length limit.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from pytest_quantguard.errors import ConfigError
from pytest_quantguard.prompts.freeform import FREEFORM, make_text
from pytest_quantguard.prompts.lengths import TokenCounter, TooShortError, estimate_tokens
from pytest_quantguard.prompts.prompt import Prompt
from pytest_quantguard.prompts.tasks import TASKS, Exercise
from pytest_quantguard.prompts.words import Language

K = TypeVar("K", bound=Hashable)

SHORTEST = 32
SHORT_SHARE = 2.5
"""Exponent: at 1 the logarithms of the lengths would be spread evenly; more makes more prompts short."""
GOLDEN_RATIO = 0.6180339887498949
CHINESE_EVERY = 4
ATTEMPTS = 32
"""Exercises of one task differ in their shortest length; so many are tried before giving up."""


def builtin_prompts(
    *,
    size: int,
    max_prompt_tokens: int,
    mix: Mapping[str, float] | None = None,
    seed: int = 0,
    count: TokenCounter = estimate_tokens,
) -> tuple[Prompt, ...]:
    """`size` prompts of at most `max_prompt_tokens` tokens, the same for the same arguments.

    mix: weight of each kind, of TASKS and FREEFORM; None weighs all alike. count: without a tokenizer the
    lengths are estimates. Raises ConfigError for unknown kinds, and for kinds that cannot be so short.
    """
    shares = apportion(_weights(mix, max_prompt_tokens, count), size)
    kinds = [(kind, number) for kind, share in shares.items() for number in range(share)]
    random.Random(f"order/{seed}").shuffle(kinds)
    shift = random.Random(f"lengths/{seed}").random()
    prompts = []
    for index, (kind, number) in enumerate(kinds):
        # Multiples of the golden ratio are spread evenly, whichever of them a kind gets.
        spread = (shift + index * GOLDEN_RATIO) % 1
        shortest = min(SHORTEST, max_prompt_tokens)
        tokens = int(shortest * (max_prompt_tokens / shortest) ** (spread**SHORT_SHARE))
        rng = random.Random(f"{kind}/{number}/{seed}")
        prompts.append(_make(kind, number, rng, tokens, max_prompt_tokens, count))
    return tuple(prompts)


def task_prompts(
    task: str,
    size: int,
    tokens: int,
    *,
    seed: int = 0,
    languages: Sequence[Language] = ("en",),
    count: TokenCounter = estimate_tokens,
) -> tuple[Prompt, ...]:
    """`size` prompts of one task, each as long as `tokens` allows; the languages take turns.

    Raises TooShortError where the task needs more tokens.
    """
    prompts = []
    for number in range(size):
        language = languages[number % len(languages)]
        exercise = TASKS[task](random.Random(f"{task}/{number}/{seed}"), tokens, language, count)
        prompts.append(_prompt(task, number, language, exercise))
    return tuple(prompts)


def apportion(weights: Mapping[K, float], size: int) -> dict[K, int]:
    """Whole numbers in proportion to `weights` that add up to `size` (largest remainders; ties in order)."""
    total = sum(weights.values())
    exact = {kind: size * weight / total for kind, weight in weights.items()}
    shares = {kind: int(value) for kind, value in exact.items()}
    by_remainder = sorted(exact, key=lambda kind: shares[kind] - exact[kind])
    for kind in by_remainder[: size - sum(shares.values())]:
        shares[kind] += 1
    return shares


def _weights(
    mix: Mapping[str, float] | None, max_prompt_tokens: int, count: TokenCounter
) -> Mapping[str, float]:
    """The given mix, checked; or all kinds that can be so short."""
    kinds = [*TASKS, *FREEFORM]
    least = {task: _least_tokens(task, count) for task in TASKS}
    if mix is None:
        return {kind: 1.0 for kind in kinds if least.get(kind, 0) <= max_prompt_tokens}
    for kind, weight in mix.items():
        if kind not in kinds:
            near = difflib.get_close_matches(kind, kinds, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"suite.mix: there is no task {kind!r}.{hint} Known: {', '.join(kinds)}.")
        if not 0 <= weight < float("inf"):
            raise ConfigError(f"suite.mix.{kind}: {weight} is no weight; give a number of at least 0.")
        if weight and least.get(kind, 0) > max_prompt_tokens:
            raise ConfigError(
                f"suite.mix.{kind}: this task needs at least {least[kind]} tokens, but "
                f"suite.max_prompt_tokens is {max_prompt_tokens}. Raise it, or take {kind} out of suite.mix."
            )
    if not sum(mix.values()):
        raise ConfigError("suite.mix: at least one task needs a weight above 0.")
    return {kind: weight for kind, weight in mix.items() if weight}


def _least_tokens(task: str, count: TokenCounter) -> int:
    """Tokens of the shortest of a few English exercises of a task."""
    least = []
    for attempt in range(ATTEMPTS):
        try:
            TASKS[task](random.Random(attempt), 0, "en", count)
        except TooShortError as error:
            least.append(error.least)
    return min(least)


def _make(
    kind: str, number: int, rng: random.Random, tokens: int, max_prompt_tokens: int, count: TokenCounter
) -> Prompt:
    if kind in FREEFORM:
        text = make_text(kind, rng, tokens, count)
        return Prompt(f"{kind}-{number:03}", kind, text, language="zh" if kind == "chinese" else "en")
    seeds = [rng.getrandbits(64) for _ in range(ATTEMPTS)]
    chinese = number % CHINESE_EVERY == CHINESE_EVERY - 1
    for language in ("zh", "en") if chinese else ("en",):
        for seed in seeds:
            exercise = _make_task(kind, seed, tokens, max_prompt_tokens, language, count)
            if exercise is not None:
                return _prompt(kind, number, language, exercise)
    raise ConfigError(
        f"suite.max_prompt_tokens is {max_prompt_tokens}, which is too short for the task {kind}. "
        f"Raise it, or take {kind} out of suite.mix."
    )


def _make_task(
    task: str, seed: int, tokens: int, max_prompt_tokens: int, language: Language, count: TokenCounter
) -> Exercise | None:
    """The task's exercise of this length, or its shortest if that is longer; None if even that exceeds the
    limit.
    """
    try:
        return TASKS[task](random.Random(seed), tokens, language, count)
    except TooShortError as error:
        if error.least > max_prompt_tokens:
            return None
        return TASKS[task](random.Random(seed), error.least, language, count)


def _prompt(kind: str, number: int, language: Language, exercise: Exercise) -> Prompt:
    return Prompt(f"{kind}-{number:03}", kind, exercise.text, gold=exercise.gold, language=language)
