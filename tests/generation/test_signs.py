"""Signs of an answer gone wrong, against brute force and answers that models really write."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_quantguard.generation.signs import (
    ECHO_WORDS,
    LONGEST_PERIOD,
    LOOP_REPEATS,
    LOOP_TOKENS,
    echoes,
    first_difference,
    is_empty,
    longest_loop,
    loops,
)


def longest_loop_by_brute_force(units: list[int]) -> int:
    """Length of the longest periodic stretch that counts, 0 for none: every start and period is tried."""
    best = 0
    for period in range(1, LONGEST_PERIOD + 1):
        for start in range(len(units)):
            end = start + period
            while end < len(units) and units[end] == units[end - period]:
                end += 1
            length = end - start
            if length >= max(LOOP_TOKENS, LOOP_REPEATS * period) and length > period:
                best = max(best, length)
    return best


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 3), max_size=20),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.integers(1, 20),
    st.lists(st.integers(0, 3), max_size=10),
)
def test_loops_as_brute_force(head: list[int], cycle: list[int], repeats: int, tail: list[int]) -> None:
    units = head + cycle * repeats + tail
    found = longest_loop(units)
    assert (found[2] if found else 0) == longest_loop_by_brute_force(units)
    if found is not None:
        start, period, length = found
        assert all(units[i] == units[i + period] for i in range(start, start + length - period))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("The answer is A. " * 12, True),
        ("I think so. " + "ha " * 40, True),
        ("密码是七。" * 10, True),
        ("ha ha ha, very funny", False),
        ("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22", False),
        ("| item | price |\n|---|---|\n| cup | 3 |\n| pen | 4 |\n| hat | 5 |\n| bag | 6 |", False),
        ("To be or not to be, that is the question. To be or not to be.", False),
        ("", False),
    ],
)
def test_loops_in_texts(text: str, wanted: bool) -> None:
    assert loops(text, None) is wanted


def test_loops_go_by_tokens_where_there_are_tokens() -> None:
    assert loops("reads well", [5, 6] * 20)
    assert not loops("ha " * 40, list(range(40)))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", True),
        (" \n\t ", True),
        ("\x00\x1b\x07", True),
        ("\u200b\u202e\ufeff", True),
        ("<think>so many thoughts</think>\n", True),
        ("<think>never ended", True),
        ("B", False),
        ("。", False),
        ("🙂", False),
        ("אבג", False),
        ("<think>hm</think>B", False),
    ],
)
def test_empty(text: str, wanted: bool) -> None:
    assert is_empty(text) is wanted


def test_echo_is_more_than_a_quotation() -> None:
    words = [f"word{number}" for number in range(60)]
    question = " ".join(words)
    assert echoes("Well: " + " ".join(words[10 : 10 + ECHO_WORDS]), question)
    assert not echoes("Well: " + " ".join(words[10 : 9 + ECHO_WORDS]), question)
    assert not echoes(" ".join(reversed(words)), question)
    assert not echoes("", question)


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_first_difference(left: list[int], right: list[int]) -> None:
    found = first_difference(left, right)
    if found is None:
        assert left == right
    else:
        assert left[:found] == right[:found]
        assert left[found : found + 1] != right[found : found + 1]
