"""Free-form texts: code, prose, dialogue, Chinese and mathematics, from templates of our own.

They have no right answer; they are there to be continued. Every maker takes a random generator and an
approximate length in tokens, and returns a text that stops in the middle of something.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from pytest_quantguard.prompts.lengths import estimate_tokens

_NAMES = ("Anna", "Tom", "Mirela", "Jonas", "Priya", "Kofi", "Lucia", "Haruto", "Elif", "Samuel")
_PLACES = (
    "harbour",
    "old library",
    "mountain village",
    "railway station",
    "greenhouse",
    "observatory",
    "market",
)
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
    "The morning was clear and cold",
    "Fog lay over the water",
    "Snow began to fall",
)


def prose(rng: random.Random, tokens: int) -> str:
    """The beginning of a story."""
    hero, friend = rng.sample(_NAMES, 2)
    sentences = [
        f"{rng.choice(_WEATHER)} when {hero} came to the {rng.choice(_PLACES)}.",
        f"In {hero}'s bag lay {rng.choice(_THINGS)}, and nobody else knew about it.",
        f"{friend} was already waiting, with a face that told of bad news.",
        f"They had not spoken since the summer in which the {rng.choice(_PLACES)} was closed.",
        f'"You are late," said {friend}, without looking up from {rng.choice(_THINGS)}.',
        f"{hero} thought of the long way back, of the wind, and of everything that had been promised.",
        f"Behind the {rng.choice(_PLACES)} a dog barked twice and then was silent.",
        f"There were {rng.randint(3, 90)} steps to the top, and {hero} counted every one of them.",
        f"If the story about {rng.choice(_THINGS)} was true, then {friend} had lied for years.",
        "Nothing in the room had been moved, and yet something was different.",
    ]
    return _fill(sentences, rng, tokens, " ") + " Then"


def code(rng: random.Random, tokens: int) -> str:
    """The beginning of a Python module."""
    noun = rng.choice(("order", "sensor", "invoice", "player", "route", "message", "sample"))
    field = rng.choice(("price", "weight", "score", "length", "delay", "count"))
    limit = rng.randint(2, 500)
    blocks = [
        f"def total_{field}({noun}s):\n"
        f'    """Return the sum of `{field}` over all {noun}s."""\n'
        f"    return sum({noun}.{field} for {noun} in {noun}s)\n",
        f"def filter_{noun}s({noun}s, limit={limit}):\n"
        f"    result = []\n    for {noun} in {noun}s:\n"
        f"        if {noun}.{field} > limit:\n            continue\n"
        f"        result.append({noun})\n    return result\n",
        f"class {noun.title()}Store:\n    def __init__(self, path):\n        self.path = path\n"
        f"        self.{noun}s = {{}}\n\n    def add(self, key, {noun}):\n        if key in self.{noun}s:\n"
        f'            raise KeyError(f"{noun} {{key}} exists")\n        self.{noun}s[key] = {noun}\n',
        f"def test_total_{field}_of_nothing_is_zero():\n    assert total_{field}([]) == 0\n",
    ]
    return _fill(blocks, rng, tokens, "\n\n") + f"\n\ndef mean_{field}("


def dialogue(rng: random.Random, tokens: int) -> str:
    """A talk between two people, up to the next one's turn."""
    first, second = rng.sample(_NAMES, 2)
    city = rng.choice(("Lisbon", "Oslo", "Nairobi", "Kyoto", "Cusco", "Vienna"))
    days = rng.randint(2, 14)
    lines = [
        f"{first}: Have you decided where to go in {rng.choice(('May', 'June', 'October'))}?",
        f"{second}: I would like to see {city}, if the trains still run.",
        f"{first}: How long do you want to stay there?",
        f"{second}: About {days} days, and then back by the coast.",
        f"{first}: That costs more than last year, doesn't it?",
        f"{second}: A little. I saved {rng.randint(3, 19) * 50} euros for it.",
        f"{first}: Then take a good pair of shoes, the streets are steep.",
        f"{second}: Did you write down the name of that small hotel?",
        f"{first}: It was called The {rng.choice(('Blue Heron', 'Quiet Lamp', 'Third Bridge'))}.",
    ]
    return _fill(lines, rng, tokens, "\n") + f"\n{second}:"


def chinese(rng: random.Random, tokens: int) -> str:
    """A Chinese text that goes on."""
    name = rng.choice(("小林", "王老师", "阿珍", "李医生", "张明"))
    place = rng.choice(("图书馆", "火车站", "海边的小镇", "山里的村子", "菜市场"))
    thing = rng.choice(("一封旧信", "一把铜钥匙", "两张车票", "一本日记"))
    sentences = [
        f"早上七点,{name}来到了{place}。",
        f"他的包里有{thing},别人都不知道。",
        f"天气预报说下午有雨,气温只有{rng.randint(3, 18)}度。",
        "路边的店还没有开门,街上很安静。",
        f"他想起{rng.randint(2, 30)}年前第一次到这里的情形。",
        "那时候河上还没有桥,人们要坐船过去。",
        "一个孩子跑过来,问他要去哪里。",
        f"他笑了笑,把{thing}拿了出来。",
    ]
    return _fill(sentences, rng, tokens, "") + "后来,"


def mathematics(rng: random.Random, tokens: int) -> str:
    """A worked exercise, up to the point where the result would follow."""
    a, b, c = rng.randint(2, 30), rng.randint(2, 30), rng.randint(2, 9)
    steps = [
        f"Problem. A tank holds {a * b} litres and is filled at {a} litres a minute.",
        f"After {c} minutes it holds {a * c} litres, because {a} * {c} = {a * c}.",
        f"So {a * b} - {a * c} = {a * b - a * c} litres are missing.",
        f"Let x be the number of minutes that remain; then {a} x = {a * b - a * c}.",
        f"Check: the square of {b} is {b * b}, and {b * b} - {b} = {b * b - b} is even.",
        f"The mean of {a}, {b} and {c} is ({a} + {b} + {c}) / 3.",
        f"For f(x) = {c} x^2 + {a} x the derivative is f'(x) = {2 * c} x + {a}.",
    ]
    return _fill(steps, rng, tokens, " ") + " Therefore"


def _fill(parts: list[str], rng: random.Random, tokens: int, separator: str) -> str:
    """Join parts in order until the text is long enough; then again in another order."""
    text = parts[0]
    rest = parts[1:]
    while estimate_tokens(text) < tokens:
        if not rest:
            rest = rng.sample(parts, len(parts))
        text += separator + rest.pop(0)
    return text


FREEFORM: Mapping[str, Callable[[random.Random, int], str]] = {
    "code": code,
    "prose": prose,
    "dialogue": dialogue,
    "chinese": chinese,
    "mathematics": mathematics,
}
