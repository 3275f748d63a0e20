"""Reading: a passage about invented towns, and a question that one or two of its sentences answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_quantguard.prompts.filler import joiner, sentences
from pytest_quantguard.prompts.lengths import TokenCounter
from pytest_quantguard.prompts.tasks.exercise import Exercise, longest_exercise
from pytest_quantguard.prompts.words import WORDS, Language, person_name, river_name, town_name

_INSTRUCTION = {
    "en": "Answer the question from the text, in a few words.",
    "zh": "请根据短文用几个词回答问题。",
}


@dataclass(frozen=True, slots=True)
class _Town:
    name: str
    mayor: str
    river: str
    founded: int
    ware: str


def make(rng: random.Random, tokens: int, language: Language, count: TokenCounter) -> Exercise:
    """A passage and a question of at most `tokens` tokens; gold lists every accepted answer."""
    seed = rng.getrandbits(64)
    return longest_exercise(lambda size: _build(seed, language, size), tokens, count, least=1)


def _build(seed: int, language: Language, size: int) -> Exercise:
    """size: number of sentences beyond the shortest passage, in steps of a town or a remark."""
    rng = random.Random(seed)
    asking = random.Random(seed + 1)
    remarks = sentences(random.Random(seed + 2), language)
    towns = []
    paragraphs = []
    supply = _towns(rng, language)
    for index in range(size):
        # Every third part is a remark that answers nothing.
        if index % 3 == 2:
            paragraphs.append(next(remarks))
            continue
        town = next(supply)
        towns.append(town)
        paragraphs.append(_describe(town, language))
    question, gold = _ask(asking, towns, language)
    space = joiner(language)
    return Exercise(f"{_INSTRUCTION[language]}\n{space.join(paragraphs)}\n{question}", gold)


def _towns(rng: random.Random, language: Language) -> Iterator[_Town]:
    """Towns that share no name, mayor, river, year or ware; when the wares are used up, they are joined in
    pairs.
    """
    seen: set[object] = set()
    wares = [word for word in WORDS[language] if word not in ("town", "river")]
    rng.shuffle(wares)
    number = 0
    while True:
        # The short names are used up after a while.
        parts = 1 if number < 500 else 3
        first = wares[number % len(wares)]
        second = wares[(number // len(wares) + number) % len(wares)]
        ware = (
            first
            if number < len(wares)
            else (f"{first} and {second}" if language == "en" else first + second)
        )
        town = _Town(
            town_name(rng, language, parts),
            person_name(rng, language),
            river_name(rng, language, parts),
            rng.randint(1000, 1999) if number < 400 else rng.randint(2000, 99_999),
            ware,
        )
        values = (town.name, town.mayor, town.river, town.founded)
        if seen.isdisjoint(values):
            seen.update(values)
            number += 1
            yield town


def _describe(town: _Town, language: Language) -> str:
    if language == "zh":
        return (
            f"{town.name}位于{town.river}边,建于{town.founded}年。镇长是{town.mayor},当地以{town.ware}闻名。"
        )
    return (
        f"{town.name} lies on the river {town.river} and was founded in {town.founded}. "
        f"Its mayor is {town.mayor}, and it is known for its {town.ware}."
    )


def _ask(rng: random.Random, towns: list[_Town], language: Language) -> tuple[str, tuple[str, ...]]:
    """(question, accepted answers)."""
    town = rng.choice(towns)
    mayor = (town.mayor, town.mayor.split()[-1]) if language == "en" else (town.mayor,)
    english = {
        f"Who is the mayor of {town.name}?": mayor,
        f"On which river does {town.name} lie?": (town.river,),
        f"In which year was {town.name} founded?": (str(town.founded),),
        f"Which town lies on the river {town.river}?": (town.name,),
        f"In which year was the town founded whose mayor is {town.mayor}?": (str(town.founded),),
        f"On which river lies the town that is known for its {town.ware}?": (town.river,),
    }
    chinese = {
        f"{town.name}的镇长是谁?": mayor,
        f"{town.name}位于哪条河边?": (town.river,),
        f"{town.name}建于哪一年?": (str(town.founded), f"{town.founded}年"),
        f"哪个地方位于{town.river}边?": (town.name,),
        f"镇长是{town.mayor}的地方建于哪一年?": (str(town.founded), f"{town.founded}年"),
        f"以{town.ware}闻名的地方位于哪条河边?": (town.river,),
    }
    return rng.choice(list((chinese if language == "zh" else english).items()))
