"""A needle in a haystack: codes hidden at a chosen depth of a text that says nothing about them."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from pytest_quantguard.prompts.filler import joiner, sentences
from pytest_quantguard.prompts.lengths import TokenCounter
from pytest_quantguard.prompts.tasks.exercise import Exercise, longest_exercise
from pytest_quantguard.prompts.words import WORDS, Language

ValueKind = Literal["uuid", "number", "word"]
Hay = Literal["sentences", "codes"]
VALUE_KINDS: tuple[ValueKind, ...] = ("uuid", "number", "word")

LONG = 250
"""Tokens from which there is room for more than one needle."""
CODES_SHARE = 0.3

_NEEDLE = {"en": "The secret code of the {key} is {value}.", "zh": "{key}的密码是{value}。"}
_INSTRUCTION = {
    "en": "Read the text and remember the secret codes in it.",
    "zh": "请阅读下文,并记住其中的密码。",
}
_QUESTION = {
    "en": "What is the secret code of the {key}? Answer with the code only.",
    "zh": "{key}的密码是什么?只回答密码。",
}


def make(rng: random.Random, tokens: int, language: Language, count: TokenCounter) -> Exercise:
    """One needle, several keys, several values of one key, or a hay of codes; at most `tokens` tokens."""
    keys, values = rng.choice([(1, 1), (1, 1), (3, 1), (1, 2)]) if tokens > LONG else (1, 1)
    hay: Hay = "codes" if tokens > LONG and rng.random() < CODES_SHARE else "sentences"
    return make_niah(
        rng,
        tokens,
        language,
        count,
        keys=keys,
        values=values,
        kind=rng.choice(VALUE_KINDS),
        depth=rng.random(),
        hay=hay,
    )


def make_niah(
    rng: random.Random,
    tokens: int,
    language: Language,
    count: TokenCounter,
    *,
    keys: int = 1,
    values: int = 1,
    kind: ValueKind = "uuid",
    depth: float = 0.5,
    hay: Hay = "sentences",
) -> Exercise:
    """A haystack with `keys` keys of `values` values each, of which the first key is asked for.

    depth: where its first value lies, 0 the beginning and 1 the end of the text; the other needles lie
    anywhere. hay: sentences that say nothing of codes, or the codes of other keys, which are UUIDs
    themselves. gold: the values of the key; any of them is accepted.
    """
    if not 0 <= depth <= 1 or keys < 1 or values < 1:
        raise ValueError(
            f"need 0 <= depth <= 1 and at least one key and value, not {depth}, {keys}, {values}"
        )
    names = rng.sample(WORDS[language], keys)
    make_value = _value_makers(language, names)[kind]
    needles: list[tuple[str, str]] = []
    while len(needles) < keys * values:
        value = make_value(rng)
        if value not in (other for _, other in needles):
            needles.append((names[len(needles) // values], value))
    seed = rng.getrandbits(64)
    return longest_exercise(
        lambda size: _build(seed, language, size - 1, needles, depth, hay), tokens, count, least=1
    )


def _build(
    seed: int,
    language: Language,
    size: int,
    needles: Sequence[tuple[str, str]],
    depth: float,
    kind: Hay,
) -> Exercise:
    """size: number of sentences of hay."""
    rng = random.Random(seed)
    supply = sentences(rng, language) if kind == "sentences" else _other_codes(rng, language)
    hay = [next(supply) for _ in range(size)]
    places = random.Random(seed + 1)
    asked = needles[0][0]
    told = [_NEEDLE[language].format(key=key, value=value) for key, value in needles]
    # From the back, so that earlier places do not move.
    inserts = [(round(depth * size), told[0]), *((round(places.random() * size), text) for text in told[1:])]
    for place, text in sorted(inserts, key=lambda insert: insert[0], reverse=True):
        hay.insert(place, text)
    space = joiner(language)
    text = f"{_INSTRUCTION[language]}\n{space.join(hay)}\n{_QUESTION[language].format(key=asked)}"
    return Exercise(text, tuple(value for key, value in needles if key == asked))


def _other_codes(rng: random.Random, language: Language) -> Iterator[str]:
    while True:
        yield _NEEDLE[language].format(key=_uuid(rng), value=_uuid(rng))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _value_makers(
    language: Language, taken: Sequence[str]
) -> Mapping[ValueKind, Callable[[random.Random], str]]:
    free = [word for word in WORDS[language] if word not in taken]
    space = "-" if language == "en" else ""
    return {
        "uuid": _uuid,
        "number": lambda rng: str(rng.randint(1_000_000, 9_999_999)),
        "word": lambda rng: space.join(rng.sample(free, 2)),
    }
