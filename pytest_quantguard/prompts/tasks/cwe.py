"""Common words: a list in which ten words occur often and all others rarely; the ten are asked for."""

from __future__ import annotations

import random

from pytest_quantguard.prompts.lengths import TokenCounter
from pytest_quantguard.prompts.tasks.exercise import Exercise, longest_exercise
from pytest_quantguard.prompts.words import WORDS, Language

COMMON = 10
_TEXT = {
    "en": "Below is a list of words. Some of them occur more often than the others.\n{words}\n"
    "Which ten words occur most often in the list? Answer with the ten words only.",
    "zh": "下面是一个词语列表,其中有些词语出现得更多。\n{words}\n"
    "列表中出现次数最多的十个词语是哪些?只回答这十个词语。",
}


def make(rng: random.Random, tokens: int, language: Language, count: TokenCounter) -> Exercise:
    """A list of at most `tokens` tokens with its question; gold are the ten words, in alphabetical order."""
    seed = rng.getrandbits(64)
    return longest_exercise(lambda size: _build(seed, language, size), tokens, count, least=3 * COMMON)


def _build(seed: int, language: Language, size: int) -> Exercise:
    """size: about the number of words in the list."""
    rng = random.Random(seed)
    words = rng.sample(WORDS[language], len(WORDS[language]))
    common, rare = words[:COMMON], words[COMMON:]
    often, seldom = frequencies(size, len(rare))
    rest = size - COMMON * often
    listed = [word for word in common for _ in range(often)]
    listed += [rare[index % len(rare)] for index in range(min(rest, seldom * len(rare)))]
    rng.shuffle(listed)
    separator = ", " if language == "en" else "、"
    return Exercise(_TEXT[language].format(words=separator.join(listed)), tuple(sorted(common)))


def frequencies(size: int, rare: int) -> tuple[int, int]:
    """How often a common word occurs, and a rare one at most: ten to one where there is room, at least two to
    one.
    """
    seldom = max(1, -(-size // rare))
    often = max(2 * seldom, min(10 * seldom, size // (2 * COMMON)))
    return often, seldom
