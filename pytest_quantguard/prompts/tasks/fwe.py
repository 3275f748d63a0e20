"""Frequent words: a text of coded words, as unevenly frequent as natural ones; three are asked for."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator

from pytest_quantguard.prompts.lengths import TokenCounter
from pytest_quantguard.prompts.tasks.exercise import Exercise, longest_exercise
from pytest_quantguard.prompts.words import Language

WANTED = 3
_TEXT = {
    "en": "Below is a coded text. Find its three most frequent coded words.\n{words}\n"
    "Which three coded words occur most often? Answer with the three words only.",
    "zh": "下面是一段加密文字,请找出其中出现最多的三个密语。\n{words}\n"
    "出现次数最多的三个密语是哪些?只回答这三个密语。",
}


def make(rng: random.Random, tokens: int, language: Language, count: TokenCounter) -> Exercise:
    """A coded text and a question of at most `tokens` tokens; gold: the three words, most frequent first."""
    seed = rng.getrandbits(64)
    return longest_exercise(lambda size: _build(seed, language, size), tokens, count, least=12)


def _build(seed: int, language: Language, size: int) -> Exercise:
    """size: number of coded words in the text."""
    rng = random.Random(seed)
    counts = word_counts(size)
    supply = _coded_words(rng, "xdx" if size <= 200 else "xdxd")
    words = [next(supply) for _ in counts]
    listed = [word for word, times in zip(words, counts, strict=True) for _ in range(times)]
    random.Random(seed + 1).shuffle(listed)
    return Exercise(_TEXT[language].format(words=" ".join(listed)), tuple(words[:WANTED]))


def word_counts(size: int) -> list[int]:
    """How often each word occurs, most frequent first: about size / (3 rank).

    The first three are all different, and the others fewer. Their sum is `size`, which must be at least 12.
    """
    third = max(2, size // (3 * WANTED))
    second = max(third + 1, size // 6)
    counts = [max(second + 1, size // 3), second, third]
    while (left := size - sum(counts)) > 0:
        wanted = size // (3 * (len(counts) + 1))
        counts.append(min(left, max(1, min(wanted, third - 1))))
    return counts


def _coded_words(rng: random.Random, pattern: str) -> Iterator[str]:
    """Distinct words of letters (x) and digits (d), such as k7v2: no tokenizer knows them, so all are equally
    hard.
    """
    seen: set[str] = set()
    alphabets = {"x": string.ascii_lowercase, "d": string.digits}
    while True:
        word = "".join(rng.choice(alphabets[kind]) for kind in pattern)
        if word not in seen:
            seen.add(word)
            yield word
