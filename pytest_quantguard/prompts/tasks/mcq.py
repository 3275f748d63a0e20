"""Multiple choice: four options, one right. An order of ages or a table to read, arithmetic if there is
little room.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pytest_quantguard.prompts.lengths import TokenCounter, TooShortError
from pytest_quantguard.prompts.tasks.exercise import Exercise, longest_exercise
from pytest_quantguard.prompts.words import GIVEN_NAMES, WORDS, Language, person_name

LETTERS = "ABCD"
AGES_UP_TO = 140
"""Tokens; a longer chain of ages would need more first names than there are."""

_INSTRUCTION = {
    "en": "Answer with the letter of the right option, in the form ANSWER: X.",
    "zh": "请用正确选项的字母回答,格式为 ANSWER: X。",
}


class _Question(NamedTuple):
    text: str
    right: str
    wrong: Sequence[str]


_Kind = Callable[[random.Random, Language, int], _Question]


def make(rng: random.Random, tokens: int, language: Language, count: TokenCounter) -> Exercise:
    """A question of at most `tokens` tokens; gold is one of the letters A to D."""
    seed = rng.getrandbits(64)
    kinds: list[_Kind] = [_table, _ages] if tokens <= AGES_UP_TO else [_table]
    rng.shuffle(kinds)
    for kind in kinds:

        def build(size: int, kind: _Kind = kind) -> Exercise:
            return _lay_out(kind(random.Random(seed), language, size), seed, language)

        try:
            return longest_exercise(build, tokens, count, least=4)
        except TooShortError:
            continue
    exercise = _lay_out(_arithmetic(random.Random(seed), language), seed, language)
    if count(exercise.text) > tokens:
        raise TooShortError(count(exercise.text), tokens)
    return exercise


def _lay_out(question: _Question, seed: int, language: Language) -> Exercise:
    """The question with its options in random order."""
    options = [question.right, *question.wrong]
    random.Random(seed + 1).shuffle(options)
    lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=True)]
    text = "\n".join([question.text, *lines, _INSTRUCTION[language]])
    return Exercise(text, (LETTERS[options.index(question.right)],))


def _arithmetic(rng: random.Random, language: Language) -> _Question:
    a, b, c = rng.randint(12, 99), rng.randint(3, 19), rng.randint(5, 99)
    result = a * b - c
    wrong = [str(result + offset) for offset in rng.sample([-20, -10, -2, 2, 10, 20, b, -b], 8)]
    wrong = list(dict.fromkeys(wrong))[:3]
    if language == "zh":
        return _Question(f"{a} × {b} - {c} 等于多少?", str(result), wrong)
    return _Question(f"What is {a} * {b} - {c}?", str(result), wrong)


def _ages(rng: random.Random, language: Language, size: int) -> _Question:
    """`size` people, each older than the next; told in random order."""
    names = rng.sample(GIVEN_NAMES, size) if language == "en" else list(_distinct_people(rng, size))
    order = random.Random(rng.getrandbits(64))
    pairs = list(itertools.pairwise(names))
    order.shuffle(pairs)
    oldest = order.random() < 0.5
    right = names[0] if oldest else names[-1]
    wrong = order.sample([name for name in names if name != right], 3)
    if language == "zh":
        told = "".join(f"{older}比{younger}年长。" for older, younger in pairs)
        return _Question(f"{told}谁的年纪最{'大' if oldest else '小'}?", right, wrong)
    told = " ".join(f"{older} is older than {younger}." for older, younger in pairs)
    return _Question(f"{told} Who is the {'oldest' if oldest else 'youngest'}?", right, wrong)


def _distinct_people(rng: random.Random, size: int) -> Iterator[str]:
    seen: set[str] = set()
    while len(seen) < size:
        name = person_name(rng, "zh")
        if name not in seen:
            seen.add(name)
            yield name


def _table(rng: random.Random, language: Language, size: int) -> _Question:
    """A table of `size` goods with distinct prices and stocks; one cell or one extreme is asked for."""
    asked = random.Random(rng.getrandbits(64))
    rows = list(_goods(rng, language, size))
    column = asked.choice([1, 2])
    label = {"en": ["", "price", "stock"], "zh": ["", "价格", "库存"]}[language][column]
    head = "item | price | stock" if language == "en" else "商品 | 价格 | 库存"
    table = "\n".join([head, *(f"{name} | {price} | {stock}" for name, price, stock in rows)])
    if asked.random() < 0.5:
        row, *others = asked.sample(rows, 4)
        question = (
            f"What is the {label} of the {row[0]}?" if language == "en" else f"{row[0]}的{label}是多少?"
        )
        return _Question(f"{table}\n{question}", str(row[column]), [str(other[column]) for other in others])
    highest = asked.random() < 0.5
    ranked = sorted(rows, key=lambda row: row[column], reverse=highest)
    if language == "zh":
        question = f"哪种商品的{label}最{'高' if highest else '低'}?"
    else:
        question = f"Which item has the {'highest' if highest else 'lowest'} {label}?"
    return _Question(f"{table}\n{question}", ranked[0][0], [row[0] for row in asked.sample(ranked[1:], 3)])


def _goods(rng: random.Random, language: Language, size: int) -> Iterator[tuple[str, int, int]]:
    """(name, price, stock) rows in which no name, price or stock occurs twice."""
    words = WORDS[language]
    space = " " if language == "en" else ""
    seen: tuple[set[object], set[object], set[object]] = (set(), set(), set())
    while len(seen[0]) < size:
        largest = 999 if len(seen[0]) < 300 else 99_999
        row = (space.join(rng.sample(words, 2)), rng.randint(10, largest), rng.randint(10, largest))
        if any(value in column for value, column in zip(row, seen, strict=True)):
            continue
        for value, column in zip(row, seen, strict=True):
            column.add(value)
        yield row
