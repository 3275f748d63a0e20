"""Free-form texts: code, prose, dialogue, Chinese and mathematics, from templates of our own.

They have no right answer; they are there to be continued, and stop in the middle of something.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from pytest_quantguard.prompts.filler import sentences
from pytest_quantguard.prompts.lengths import TokenCounter, cut_text
from pytest_quantguard.prompts.words import GIVEN_NAMES, WORDS, person_name, town_name

_PLACES = ("harbour", "old library", "village", "railway station", "greenhouse", "observatory", "market hall")
_THINGS = (
    "a brass key",
    "a torn map",
    "three letters",
    "a wooden box",
    "a red umbrella",
    "an unfinished violin",
)
_WEATHER = (
    "It had rained all night",
    "The morning was clear",
    "Fog lay over the water",
    "Snow began to fall",
)

Parts = Callable[[random.Random], Iterator[str]]


def make_text(name: str, rng: random.Random, tokens: int, count: TokenCounter) -> str:
    """A text of kind `name` (a key of FREEFORM) with at most `tokens` tokens, and hardly fewer."""
    parts, text = FREEFORM[name](rng), ""
    enough = max(tokens, 8)
    while count(text) <= tokens:
        # Many parts at a time: counting the whole text for each would cost the square of its length.
        text += "".join(itertools.islice(parts, max(2, enough // 40)))
    return cut_text(text, tokens, count)


def _prose(rng: random.Random) -> Iterator[str]:
    """A story."""
    remarks = sentences(rng, "en")
    while True:
        hero, friend = rng.sample(GIVEN_NAMES, 2)
        place, thing = rng.choice(_PLACES), rng.choice(_THINGS)
        yield f"{rng.choice(_WEATHER)} when {hero} came to the {place}. "
        yield f"In {hero}'s bag lay {thing}, and nobody else knew about it. "
        yield f"{friend} was already waiting, with a face that told of bad news. "
        yield f'"You are late," said {friend}. "The {rng.choice(_PLACES)} closes in an hour." '
        yield f"{hero} thought of the long way back and of everything that had been promised. "
        yield from itertools.islice(remarks, rng.randint(1, 4))
        yield f" There were {rng.randint(3, 90)} steps to the top, and {hero} counted every one of them. "
        yield f"If the story about {thing} was true, then {friend} had lied for years.\n\n"


def _code(rng: random.Random) -> Iterator[str]:
    """A Python module."""
    while True:
        noun, field = rng.sample(WORDS["en"], 2)
        limit = rng.randint(2, 500)
        yield f"def total_{field}({noun}s):\n"
        yield f'    """Return the sum of `{field}` over all {noun}s."""\n'
        yield f"    return sum({noun}.{field} for {noun} in {noun}s)\n\n\n"
        yield f"def filter_{noun}s({noun}s, limit={limit}):\n    result = []\n"
        yield f"    for {noun} in {noun}s:\n        if {noun}.{field} > limit:\n            continue\n"
        yield f"        result.append({noun})\n    return result\n\n\n"
        yield f"class {noun.title()}Store:\n    def __init__(self, path):\n        self.path = path\n"
        yield f"        self.{noun}s = {{}}\n\n    def add(self, key, {noun}):\n"
        yield f'        if key in self.{noun}s:\n            raise KeyError(f"{noun} {{key}} exists")\n'
        yield f"        self.{noun}s[key] = {noun}\n\n\n"
        yield f"def test_total_{field}_of_nothing_is_zero():\n    assert total_{field}([]) == 0\n\n\n"


def _dialogue(rng: random.Random) -> Iterator[str]:
    """Two people planning a journey, who digress."""
    remarks = sentences(rng, "en")
    while True:
        first, second = rng.sample(GIVEN_NAMES, 2)
        town, hotel = town_name(rng, "en"), rng.choice(("Blue Heron", "Quiet Lamp", "Third Bridge"))
        lines = [
            f"Have you decided where to go in {rng.choice(('May', 'June', 'October'))}?",
            f"I would like to see {town}, if the trains still run.",
            "How long do you want to stay there?",
            f"About {rng.randint(2, 14)} days, and then back by the coast.",
            "That costs more than last year, doesn't it?",
            f"A little. I saved {rng.randint(3, 19) * 50} euros for it.",
            f"Then take {rng.choice(_THINGS)} with you, and good shoes.",
            f"Did you write down the name of that small hotel in {town}?",
            f"It was called The {hotel}. Ask for the room with the {rng.choice(WORDS['en'])}.",
        ]
        for number, line in enumerate(lines):
            yield f"{first if number % 2 == 0 else second}: {line}"
            yield f" {next(remarks)}\n" if rng.random() < 0.4 else "\n"


def _chinese(rng: random.Random) -> Iterator[str]:
    """A Chinese story."""
    remarks = sentences(rng, "zh")
    while True:
        name, town = person_name(rng, "zh"), town_name(rng, "zh")
        yield f"早上{rng.choice('六七八')}点,{name}来到了{town}。"
        yield f"他的包里有{rng.choice(('一封旧信', '一把铜钥匙', '两张车票', '一本日记'))},别人都不知道。"
        yield f"天气预报说下午有雨,气温只有{rng.randint(3, 18)}度。"
        yield "路边的店还没有开门,街上很安静。"
        yield f"他想起{rng.randint(2, 30)}年前第一次到这里的情形,那时候河上还没有桥。"
        yield from itertools.islice(remarks, rng.randint(1, 4))
        yield f"一个孩子跑过来,问{name}要去哪里。"


def _mathematics(rng: random.Random) -> Iterator[str]:
    """Worked exercises, all of them right."""
    while True:
        a, b, c = rng.randint(2, 30), rng.randint(10, 30), rng.randint(2, 9)
        yield f"Problem. A tank holds {a * b} litres and is filled at {a} litres a minute. "
        yield f"After {c} minutes it holds {a * c} litres, because {a} * {c} = {a * c}. "
        yield f"So {a * b} - {a * c} = {a * b - a * c} litres are missing. "
        yield f"Let x be the number of minutes that remain; then {a} x = {a * b - a * c}, so x = {b - c}. "
        yield f"The square of {b} is {b * b}, and {b * b} - {b} = {b * b - b} is even. "
        yield f"For f(x) = {c} x^2 + {a} x the derivative is f'(x) = {2 * c} x + {a}.\n"


FREEFORM: Mapping[str, Parts] = MappingProxyType(
    {"code": _code, "prose": _prose, "dialogue": _dialogue, "chinese": _chinese, "mathematics": _mathematics}
)
