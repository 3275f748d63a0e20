"""Foreign text becomes harmless and stays readable."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_quantguard.report.visible import visible, visible_lines
from tests.report.samples import HOSTILE


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("Größe 漢字 🎉", "Größe 漢字 🎉"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("tag\U000e0041", "tag\\U000e0041"),
        ("\ud800", "\\ud800"),
        ("\x9b31m", "\\x9b31m"),
    ],
)
def test_what_hides_or_commands_becomes_an_escape(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(st.text())
def test_nothing_invisible_is_left(text: str) -> None:
    shown = visible(text)
    assert all(unicodedata.category(one) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for one in shown)
    shown.encode()


def test_long_text_is_cut_in_the_middle() -> None:
    assert visible("a" * 60 + "b" * 60, longest=20) == f"{'a' * 10} [... 100 characters ...] {'b' * 10}"
    assert len(visible("\x00" * 10**6, longest=100)) < 600


def test_no_line_can_command_a_ci_runner() -> None:
    lines = visible_lines(f"first\n::set-env name=A::b\n  ##[add-path]x\n{HOSTILE}").split("\n")
    assert lines[0] == "first"
    assert lines[1] == "\\::set-env name=A::b"
    assert lines[2] == "  \\##[add-path]x"
    assert not any(line.lstrip().startswith(("::", "##[")) for line in lines)
