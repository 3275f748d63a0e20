"""Every gold answer is proved from its own prompt's text, by rules that know nothing of how it was made."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_quantguard.prompts.builtin import task_prompts
from pytest_quantguard.prompts.lengths import TooShortError, estimate_tokens
from pytest_quantguard.prompts.scoring import score
from pytest_quantguard.prompts.tasks import TASKS, Exercise
from pytest_quantguard.prompts.tasks.fwe import word_counts
from pytest_quantguard.prompts.tasks.niah import make_niah
from pytest_quantguard.prompts.words import WORDS, Language

SEEDS = st.integers(0, 2**32)
LENGTHS = st.sampled_from([60, 90, 130, 180, 260, 400, 900, 2500])
LANGUAGES = st.sampled_from(["en", "zh"])
COUNTERS = {
    "estimate": estimate_tokens,
    "words": lambda text: len(re.findall(r"\w+|\S", text)),
    "thirds": lambda text: len(text.encode()) // 3,
}


def make(task: str, seed: int, tokens: int, language: Language) -> Exercise | None:
    try:
        return TASKS[task](random.Random(seed), tokens, language, estimate_tokens)
    except TooShortError:
        return None


# --- proofs ---


def prove_mcq(text: str) -> str:
    options = dict(re.findall(r"^([A-D])\. (.+)$", text, re.MULTILINE))
    assert sorted(options) == ["A", "B", "C", "D"]
    assert len(set(options.values())) == 4
    right = answer_mcq(text)
    (letter,) = [letter for letter, option in options.items() if option == right]
    return letter


def answer_mcq(text: str) -> str:
    if numbers := re.search(r"(\d+) [*×] (\d+) - (\d+)", text):
        a, b, c = map(int, numbers.groups())
        return str(a * b - c)
    older = re.findall(r"(\w+) is older than (\w+)\.", text) or re.findall(r"(\w{3})比(\w{3})年长", text)
    if older:
        parents, children = [pair[0] for pair in older], [pair[1] for pair in older]
        first, last = set(parents) - set(children), set(children) - set(parents)
        # One chain: everybody but the ends is older than one and younger than one.
        assert len(first) == len(last) == 1
        assert len(set(parents)) == len(set(children)) == len(older)
        return (first if re.search("oldest|最大", text) else last).pop()
    rows = [line.split(" | ") for line in text.splitlines() if " | " in line]
    head, goods = rows[0], {name: [int(value) for value in values] for name, *values in rows[1:]}
    assert len(goods) == len(rows) - 1
    for column in (0, 1):
        assert len({values[column] for values in goods.values()}) == len(goods)
    if asked := re.search(r"What is the (\w+) of the (.+)\?|^(.+)的(价格|库存)是多少", text, re.MULTILINE):
        label, name = (asked[1], asked[2]) if asked[1] else (asked[4], asked[3])
        return str(goods[name][head.index(label) - 1])
    asked = re.search(r"the (highest|lowest) (\w+)\?|的(价格|库存)最(高|低)", text)
    assert asked
    best = max if (asked[1] or asked[4]) in ("highest", "高") else min
    column = head.index(asked[2] or asked[3]) - 1
    return best(goods, key=lambda name: goods[name][column])


def prove_qa(text: str) -> set[str]:
    facts = re.findall(
        r"(\w+) lies on the river (\w+) and was founded in (\d+)\. "
        r"Its mayor is (\w+ \w+), and it is known for its ([\w ]+)\.",
        text,
    ) or re.findall(r"([^。\n]+)位于([^。]+)边,建于(\d+)年。镇长是(\w+),当地以(\w+)闻名。", text)
    question = text.splitlines()[-1]
    for column in range(5):
        assert len({fact[column] for fact in facts}) == len(facts)

    def named_in(names: list[str]) -> list[int]:
        return [i for i, name in enumerate(names) if re.search(rf"(?<![A-Za-z]){name}(?![A-Za-z])", question)]

    # Exactly one fact of one town occurs in the question; what else is asked is read off its words.
    found = [(column, row) for column in range(5) for row in named_in([fact[column] for fact in facts])]
    # Of "pine" and "pine and clove" the longer one is meant.
    ((column, row),) = [
        (column, row)
        for column, row in found
        if not any(
            facts[row][column] != facts[other][also] and facts[row][column] in facts[other][also]
            for also, other in found
        )
    ]
    kinds = {
        "mayor of|镇长是谁": 3,
        "which river|哪条河": 1,
        "which year|哪一年": 2,
        "Which town|哪个地方": 0,
    }
    (asked,) = [kind for pattern, kind in kinds.items() if re.search(pattern, question)]
    assert asked != column
    return {facts[row][asked]}


def prove_niah(text: str) -> list[str]:
    body = text.split("\n")[1]
    codes = re.findall(r"The secret code of the ([\w-]+) is ([\w-]+)\.", body) or re.findall(
        r"(?<![^。])([^。]+?)的密码是([^。]+)。", body
    )
    key = (re.findall(r"secret code of the ([\w-]+)\?", text) or re.findall(r"\n(.+)的密码是什么", text))[0]
    for _, value in codes:
        assert text.count(value) == 1
    return [value for name, value in codes if name == key]


def prove_most_frequent(text: str, number: int) -> set[str]:
    listed = re.split(r", |、| ", text.splitlines()[1])
    counts = Counter(listed).most_common()
    assert counts[number - 1][1] > counts[number][1], (
        "the last wanted word must be more frequent than any other"
    )
    return {word for word, _ in counts[:number]}


def check(task: str, exercise: Exercise) -> None:
    text, gold = exercise.text, exercise.gold
    if task == "mcq":
        assert gold == (prove_mcq(text),)
    elif task == "qa":
        (answer,) = prove_qa(text)
        assert gold[0] == answer
        # Further accepted answers are a part of the answer, or say the same with its unit.
        assert all(other in answer.split() or other == f"{answer}年" for other in gold[1:])
    elif task == "niah":
        assert sorted(gold) == sorted(prove_niah(text))
    else:
        number = {"cwe": 10, "fwe": 3}[task]
        assert len(gold) == number
        assert set(gold) == prove_most_frequent(text, number)
    answer = "ANSWER: " + gold[0] if task == "mcq" else ", ".join(gold)
    assert score(task, answer, gold) == 1
    assert score(task, "I do not know.", gold) == 0


@pytest.mark.parametrize("task", TASKS)
@given(seed=SEEDS, tokens=LENGTHS, language=LANGUAGES)
@settings(max_examples=80)
def test_gold_is_proved_by_the_prompt(task: str, seed: int, tokens: int, language: Language) -> None:
    exercise = make(task, seed, tokens, language)
    if exercise is not None:
        check(task, exercise)


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("task", TASKS)
def test_gold_is_proved_at_32k_tokens(task: str, language: Language) -> None:
    exercise = make(task, 7, 32_000, language)
    assert exercise is not None
    check(task, exercise)


@pytest.mark.slow
@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("task", TASKS)
def test_gold_is_proved_at_128k_tokens(task: str, language: Language) -> None:
    exercise = make(task, 8, 131_072, language)
    assert exercise is not None
    check(task, exercise)


# --- lengths and seeds ---


@pytest.mark.parametrize("counter", COUNTERS)
@pytest.mark.parametrize("tokens", [300, 1000, 6000])
@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("task", TASKS)
def test_lengths_are_met(task: str, language: Language, tokens: int, counter: str) -> None:
    """Never longer than asked; shorter by less than one of the task's own units (a town is the longest)."""
    count = COUNTERS[counter]
    exercise = TASKS[task](random.Random(3), tokens, language, count)
    assert tokens - 110 <= count(exercise.text) <= tokens
    check(task, exercise)


@pytest.mark.parametrize("task", TASKS)
def test_what_cannot_be_so_short_says_how_short_it_can_be(task: str) -> None:
    with pytest.raises(TooShortError, match=r"needs at least \d+ tokens, 9 were asked for") as caught:
        TASKS[task](random.Random(5), 9, "en", estimate_tokens)
    exercise = TASKS[task](random.Random(5), caught.value.least, "en", estimate_tokens)
    assert estimate_tokens(exercise.text) <= caught.value.least


@pytest.mark.parametrize("task", TASKS)
def test_seeds_decide(task: str) -> None:
    one, again, other = (make(task, seed, 300, "en") for seed in (1, 1, 2))
    assert one == again
    assert one != other


@given(st.integers(12, 5000))
def test_three_words_lead(size: int) -> None:
    counts = word_counts(size)
    assert sum(counts) == size
    assert min(counts) >= 1
    assert counts[0] > counts[1] > counts[2] > max(counts[3:])


@pytest.mark.parametrize("kind", ["uuid", "number", "word"])
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("hay", ["sentences", "codes"])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_needle_lies_at_the_chosen_depth(language: Language, hay: str, depth: float, kind: str) -> None:
    exercise = make_niah(
        random.Random(1),
        3000,
        language,
        estimate_tokens,
        keys=3,
        values=2,
        kind=kind,  # type: ignore[arg-type]
        depth=depth,
        hay=hay,  # type: ignore[arg-type]
    )
    assert sorted(exercise.gold) == sorted(prove_niah(exercise.text))
    assert len(exercise.gold) == 2
    body = exercise.text.split("\n")[1]
    assert body.find(exercise.gold[0]) / len(body) == pytest.approx(depth, abs=0.06)


def test_a_needle_outside_the_text_is_refused() -> None:
    with pytest.raises(ValueError, match="0 <= depth <= 1"):
        make_niah(random.Random(1), 300, "en", estimate_tokens, depth=1.5)


def test_languages_take_turns() -> None:
    prompts = task_prompts("qa", 4, 300, languages=("en", "zh"))
    assert [prompt.language for prompt in prompts] == ["en", "zh", "en", "zh"]
    assert [bool(re.search("[\u4e00-\u9fff]", prompt.text or "")) for prompt in prompts] == [
        False,
        True,
        False,
        True,
    ]
    assert len({prompt.id for prompt in prompts}) == 4


def test_word_lists_hold_no_word_twice_and_no_part_of_one() -> None:
    for words in WORDS.values():
        assert len(set(words)) == len(words)
    assert len(WORDS["en"]) > 500
    assert len(WORDS["zh"]) > 200
