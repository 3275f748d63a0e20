from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_quantguard.prompts.scoring import check_gold, contains, normalize, score, strip_reasoning

ANSWERS = Path(__file__).parent.parent / "data" / "answers"
TASKS = ("mcq", "qa", "niah", "cwe", "fwe")


def written(task: str) -> list[tuple[float, list[str], str]]:
    rows = [orjson.loads(line) for line in (ANSWERS / f"{task}.jsonl").read_bytes().splitlines()]
    return [(value, [gold] if isinstance(gold, str) else gold, answer) for value, gold, answer in rows]


@pytest.mark.parametrize("task", TASKS)
def test_written_answers(task: str) -> None:
    rows = written(task)
    assert len(rows) >= 60
    assert sum(value == 0 for value, _, _ in rows) >= 10
    wrong = [
        f"{answer!r}: {score(task, answer, gold)} instead of {value}"
        for value, gold, answer in rows
        if score(task, answer, gold) != pytest.approx(value)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("task", ["lcx", "anything"])
def test_unknown_tasks_accept_any_answer(task: str) -> None:
    assert score(task, "It was Orlin, in 1462.", ["Tessa", "1462"]) == 1
    assert score(task, "It was Orlin.", ["Tessa", "1462"]) == 0


@pytest.mark.parametrize(
    ("task", "gold", "message"),
    [
        ("qa", [], "there is no gold answer"),
        ("qa", ["!?"], "holds nothing that could be compared"),
        ("cwe", ["beam", " "], "holds nothing that could be compared"),
        ("mcq", ["AB"], "must be one letter from A to J, not 'AB'"),
        ("mcq", ["Z"], "must be one letter"),
        ("mcq", ["541"], "must be one letter"),
    ],
)
def test_gold_that_cannot_occur(task: str, gold: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score(task, "whatever", gold)
    with pytest.raises(ValueError, match=message):
        check_gold(task, gold)


@pytest.mark.parametrize(
    ("answer", "rest"),
    [
        ("<think>a</think>b", "b"),
        ("<think>a", ""),
        ("b<think>a", "b"),
        ("<think>a</think>b<think>c</think>d", "d"),
        ("a</think>b", "b"),
        ("<THINK>a</THINK> b", " b"),
        ("plain", "plain"),
    ],
)
def test_reasoning_is_cut_off(answer: str, rest: str) -> None:
    assert strip_reasoning(answer) == rest


@given(st.text(), st.sampled_from(TASKS))
def test_any_text_can_be_scored(answer: str, task: str) -> None:
    gold = {"mcq": ["B"], "cwe": ["beam", "夜晚"]}.get(task, ["Orlin"])
    assert 0 <= score(task, answer, gold) <= 1


@given(st.text(min_size=1), st.sampled_from(["qa", "niah", "cwe", "fwe"]))
def test_the_gold_itself_is_right(gold: str, task: str) -> None:
    if normalize(gold):
        assert score(task, f"It is: {gold}, I think.", [gold]) in (0, 1)
        assert contains(normalize(gold), normalize(gold))
        assert normalize(normalize(gold)) == normalize(gold)
