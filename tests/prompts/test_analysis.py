from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_quantguard.errors import QuantguardError
from pytest_quantguard.prompts.analysis import analyze, distance
from pytest_quantguard.prompts.analysis_text import format_analysis, printable
from pytest_quantguard.prompts.builtin import builtin_prompts, task_prompts
from pytest_quantguard.prompts.measures import measure_text
from pytest_quantguard.prompts.prompt import Prompt
from pytest_quantguard.prompts.tasks import TASKS
from pytest_quantguard.prompts.words import WORDS

pytest.importorskip("datasketch")

PROSE = (
    "The committee met again in the spring, when the roads were open. Nobody had expected that the "
    "bridge would hold through the winter, but it did, and so the question of who should pay for its repair "
    "came up once more. Some said that the mill had always used it, others that it belonged to all of them. "
    "In the end they agreed to wait for another year, as they had done before."
)
GERMAN = (
    "Der Ausschuss traf sich im Frühjahr wieder, als die Straßen offen waren. Niemand hatte erwartet, dass "
    "die Brücke den Winter überstehen würde, aber sie hielt, und so kam die Frage auf, wer für die Reparatur "
    "zahlen sollte. Es war nicht das erste Mal, dass man sich darüber stritt, und auch nicht das letzte."
)
CHINESE = (
    "春天到了,路又通了,大家再次开会。没有人想到这座桥能撑过冬天,"
    "可是它撑住了,于是谁来出修理费的问题又被提了出来。"
)
JAPANESE = "春になって道が開いたので、委員会がまた集まりました。橋が冬を越せるとは思っていませんでした。"
RUSSIAN = (
    "Комитет снова собрался весной, когда дороги были открыты. Никто не ожидал, что мост выдержит зиму, "
    "но он выдержал, и вопрос о том, кто заплатит за ремонт, был поставлен снова."
)
ARABIC = "اجتمعت اللجنة مرة أخرى في الربيع عندما كانت الطرق مفتوحة ولم يتوقع أحد أن يصمد الجسر"
CODE = (
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n\n\nclass Store:\n    def __init__(self, path):\n"
    "        self.path = path\n"
)


def five_tasks() -> list[Prompt]:
    """150 prompts as the field's evaluation sets have them: 30 each of five tasks."""
    prompts = [
        prompt for task in TASKS for prompt in task_prompts(task, 30, 700, languages=("en", "en", "zh"))
    ]
    rng = random.Random(0)
    # Needles in a hay of UUIDs, as long-context tests have them.
    for index, prompt in enumerate(prompts):
        if prompt.task == "niah":
            pairs = [
                (uuid.UUID(int=rng.getrandbits(128)), uuid.UUID(int=rng.getrandbits(128))) for _ in range(12)
            ]
            text = " ".join(f"The number of {key} is {value}." for key, value in pairs)
            prompts[index] = Prompt(prompt.id, "niah", f"{text}\nWhat is the number of {pairs[3][0]}?")
    return prompts


def test_five_tasks_are_found_with_their_shares_and_low_meaning() -> None:
    analysis = analyze(five_tasks(), name="five")
    assert {task: group.prompts for task, group in analysis.tasks.items()} == dict.fromkeys(TASKS, 30)
    assert all(group.share == pytest.approx(0.2) for group in analysis.tasks.values())
    flagged = {task: group.flagged for task, group in analysis.tasks.items()}
    assert flagged == {"mcq": 0, "qa": 0, "niah": 1, "cwe": 1, "fwe": 1}
    assert analysis.tasks["niah"].opaque > 0.8
    assert analysis.tasks["cwe"].word_list > 0.7
    assert analysis.tasks["fwe"].opaque > 0.7
    assert set(analysis.low_meaning_ids) == {
        prompt.id for prompt in five_tasks() if prompt.task in ("niah", "cwe", "fwe")
    }
    assert analysis.total.prompts == 150
    assert analysis.total.flagged == pytest.approx(0.6)
    # Word lists and codes have no function words to tell a language by, unless the words are Chinese.
    assert analysis.languages["zh"] >= 0.2


# --- one text ---


@pytest.mark.parametrize("text", [PROSE, GERMAN, CHINESE, CODE, PROSE.upper(), RUSSIAN], ids=range(6))
def test_meaningful_texts(text: str) -> None:
    assert measure_text(text).low_meaning == 0


def words(language: str, number: int) -> str:
    return (", " if language == "en" else "、").join(random.Random(number).choices(WORDS[language], k=number))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (words("en", 60), "word_list"),
        (words("en", 60).replace(",", ""), "word_list"),
        (words("en", 60).replace(", ", "\n"), "word_list"),
        (words("zh", 60), "word_list"),
        (" ".join(str(uuid.UUID(int=random.Random(i).getrandbits(128))) for i in range(9)), "opaque"),
        (" ".join(str(random.Random(i).randint(10**6, 10**7)) for i in range(40)), "opaque"),
        ("a8f3 k9z2 x7d1 q4o8 m7i3 " * 3 + "b2c4 d5e6 f7g8", "opaque"),
        ((PROSE + " ") * 10, "repetition"),
        ("the grass is green and the sky is blue. " * 30, "repetition"),
    ],
)
def test_texts_of_low_meaning(text: str, kind: str) -> None:
    measures = measure_text(text)
    assert getattr(measures, kind) > 0.7
    assert measures.low_meaning > 0.7


def test_half_a_text_of_low_meaning() -> None:
    assert measure_text(f"{PROSE}\n{words('en', 70)}").low_meaning == pytest.approx(0.55, abs=0.1)


def test_compression_and_entropy() -> None:
    assert measure_text("ab" * 5000).compression < 0.01
    assert measure_text(PROSE).compression > 0.4
    assert measure_text("a" * 50).class_entropy == 0
    # Four classes, equally often: two bits.
    assert measure_text("aB1 " * 25).class_entropy == pytest.approx(2)


@pytest.mark.parametrize(
    ("text", "language"),
    [
        (PROSE, "en"),
        (GERMAN, "de"),
        (CHINESE, "zh"),
        (JAPANESE, "ja"),
        (RUSSIAN, "ru"),
        (ARABIC, "arabic"),
        ("이 다리는 겨울을 견디지 못할 것이라고 모두가 생각했습니다", "ko"),
        ("12 34 56 78", "none"),
        ("", "none"),
        ("xkq vrt plm", "none"),
        (f"Please translate: {CHINESE}", "zh"),
    ],
)
def test_languages(text: str, language: str) -> None:
    assert measure_text(text).language == language


@given(st.text(max_size=400))
@settings(max_examples=200)
def test_any_text_can_be_measured(text: str) -> None:
    measures = measure_text(text)
    assert 0 <= measures.low_meaning <= 1
    assert measures.characters == len(text)
    assert measures.class_entropy >= 0


# --- sets ---


def test_duplicates_prefixes_and_vocabulary() -> None:
    prompts = [
        Prompt("a", "t", PROSE),
        Prompt("b", "t", PROSE.upper().replace(" ", "  ")),
        Prompt("c", "t", PROSE.replace("winter", "summer")),
        Prompt("d", "t", GERMAN),
        Prompt("e", "t", f"{GERMAN} Und so weiter."),
        Prompt("f", "t", CODE),
    ]
    analysis = analyze(prompts)
    assert analysis.exact_duplicates == (("a", "b"),)
    assert analysis.near_duplicates == (("a", "b", "c"), ("d", "e"))
    # d is the beginning of e; a and c share what comes before "winter".
    shared = len(GERMAN) + PROSE.index("winter")
    assert analysis.shared_prefix == pytest.approx(
        shared / sum(len(p.text or "") for p in prompts), abs=0.002
    )


def test_lengths_are_counted_with_a_tokenizer() -> None:
    prompts = [
        Prompt("a", "x", "one two three"),
        Prompt("b", "y", "four"),
        Prompt("c", "y", token_ids=(1, 2, 3, 4, 5)),
    ]
    analysis = analyze(prompts, encode=lambda text: [len(word) for word in text.split()])
    assert analysis.tokens_are == "counted"
    assert (analysis.total.lengths.least, analysis.total.lengths.most, analysis.total.lengths.total) == (
        1,
        5,
        9,
    )
    assert analysis.total.lengths.median == 3
    # Ids 3, 3, 5; 4; 1 to 5.
    assert analysis.distinct_tokens == 5
    assert analysis.length_histogram == {1: 1 / 3, 2: 1 / 3, 4: 1 / 3}
    assert analyze(prompts).tokens_are == "estimated"


def test_distances() -> None:
    one = analyze([Prompt("a", "x", PROSE), Prompt("b", "y", CODE)])
    same = distance(one, one)
    assert (same.tasks, same.languages, same.lengths, same.low_meaning, same.vocabulary) == (0, 0, 0, 0, 0)
    other = analyze([Prompt("a", "z", "豆腐" * 200)])
    far = distance(one, other)
    assert far.tasks == far.languages == 1
    assert far.vocabulary > 0.95
    three_quarters = analyze([Prompt("a", "x", PROSE), *(Prompt(f"b{i}", "y", CODE) for i in range(3))])
    assert distance(one, three_quarters).tasks == pytest.approx(0.25)


MIX = """
from pytest_quantguard.prompts.analysis import _total_variation
one = {f"task {n}": 1 / (n + 3) for n in range(40)}
other = {f"task {n}": 1 / (n + 7) for n in range(20, 60)}
print(_total_variation(one, other).hex())
"""


def test_a_distance_is_the_same_to_the_last_digit_in_every_process() -> None:
    """Where texts are hashed with another seed, sets of them have another order."""
    found = {
        subprocess.run(
            [sys.executable, "-c", MIX],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            encoding="utf-8",
            check=True,
        ).stdout
        for seed in range(1, 5)
    }
    assert len(found) == 1, found


def test_as_json_and_as_text() -> None:
    prompts = builtin_prompts(size=32, max_prompt_tokens=160)
    analysis = analyze(
        [*prompts, Prompt("bad\u202eid\x1b[31m", "x\x07y", PROSE), Prompt("copy", "x", PROSE)], name="suite"
    )
    written = json.loads(json.dumps(analysis.to_json()))
    assert written["analysis_version"] == 1
    assert written["total"]["prompts"] == 34
    assert set(written["tasks"]) == {prompt.task for prompt in prompts} | {"x\x07y", "x"}
    assert sum(written["languages"].values()) == pytest.approx(1)
    text = format_analysis(analysis, ("itself", distance(analysis, analysis)))
    assert "suite: 34 prompts, tokens estimated" in text
    assert "exact duplicates    1 in 1 groups: bad\\u202eid\\u001b[31m, copy" in text
    assert "x\\u0007y" in text
    assert "distance from itself" in text
    assert all(character == "\n" or character.isprintable() for character in text)


def test_printable_leaves_other_scripts_alone() -> None:
    assert printable("שלום 你好 🎉 é") == "שלום 你好 🎉 é"
    assert printable("a\tb\x00\u2066") == "a\\u0009b\\u0000\\u2066"


def test_an_empty_set_is_no_set() -> None:
    with pytest.raises(ValueError, match="no prompts"):
        analyze([])


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(QuantguardError, match=r"pip install 'pytest-quantguard\[analysis\]'"):
        analyze([Prompt("a", "x", PROSE)])
