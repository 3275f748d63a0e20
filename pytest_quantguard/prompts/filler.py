"""Harmless sentences without end: what hides a needle and lengthens a passage. No sentence holds a digit."""

from __future__ import annotations

import random
from collections.abc import Iterator

from pytest_quantguard.prompts.words import GIVEN_NAMES, WORDS, Language, given_name

_ENGLISH = (
    "The {a} stood beside the {b}, as it had always done.",
    "{name} carried the {a} across the {b} without a word.",
    "Nobody remembered who had left the {a} under the {b}.",
    "In the evening the {a} looked almost like a {b}.",
    "There is a {a} on the shelf, and behind it hangs a small {b}.",
    "{name} said that a {a} is worth more than any {b}.",
    "Slowly the light moved from the {a} to the {b}.",
    "After the rain the {a} smelled of {b} and old wood.",
    "{name} drew a {a}, then a {b}, and then fell asleep.",
    "Between the {a} and the {b} there was just enough room for a chair.",
    "Whenever the {a} was moved, the {b} made a strange sound.",
    "It was said that {name} had once traded a {a} for a {b}.",
)
_CHINESE = (
    "{a}放在{b}旁边,一直没有人动过。",
    "{name}带着{a},慢慢地走过了{b}。",
    "没有人记得是谁把{a}留在{b}下面。",
    "到了傍晚,{a}看上去有点像{b}。",
    "架子上有{a},后面挂着小小的{b}。",
    "{name}说,{a}比{b}更值得珍惜。",
    "光线从{a}慢慢移到了{b}上。",
    "雨后的{a}带着{b}的味道。",
    "{name}画了{a},又画了{b},然后睡着了。",
    "听说{name}曾经用{a}换来了{b}。",
)


def sentences(rng: random.Random, language: Language) -> Iterator[str]:
    """Sentences, one after the other, the same for the same generator state."""
    words = WORDS[language]
    templates = _CHINESE if language == "zh" else _ENGLISH
    while True:
        first, second = rng.sample(words, 2)
        name = given_name(rng, language) if language == "zh" else rng.choice(GIVEN_NAMES)
        yield rng.choice(templates).format(a=first, b=second, name=name)


def joiner(language: Language) -> str:
    """What stands between two sentences."""
    return "" if language == "zh" else " "
