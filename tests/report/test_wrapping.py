"""Long lines: words stay whole, commands can be pasted, paths are short."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_quantguard.paths import shown_path, with_short_paths
from pytest_quantguard.report.wrapping import command_lines, fitted, text_width

WORDS = st.lists(
    st.text("ab-=$'\"\\\\ *{}:/.", min_size=1, max_size=12) | st.sampled_from(["--flag", "-m", "--a=b c"]),
    min_size=1,
    max_size=20,
)
LONG = "python -m server --model-path a/b --env '{\"a\": 1}' --port 30000 --disable-cache --tp 2"


def as_a_shell_reads(text: str) -> list[str]:
    """The words of a command, each on a line, by a real shell."""
    script = f"for word in {text}\ndo printf '%s\\n' \"$word\"; done"
    done = subprocess.run(["sh", "-f", "-c", script], capture_output=True, encoding="utf-8", check=True)
    return done.stdout.split("\n")[:-1]


@settings(max_examples=40, deadline=None)
@given(words=WORDS, width=st.integers(20, 90))
def test_a_shell_reads_the_same_command(words: list[str], width: int) -> None:
    assert as_a_shell_reads("\n".join(command_lines(shlex.join(words), width))) == words


def test_lines_of_a_command_fit_and_keep_options_with_their_values() -> None:
    lines = command_lines(LONG, 44, before="  server  ", indent=4)
    assert lines == [
        "  server  python -m server \\",
        "    --model-path a/b --env '{\"a\": 1}' \\",
        "    --port 30000 --disable-cache --tp 2",
    ]


def test_a_word_wider_than_the_line_stays_whole() -> None:
    lines = command_lines(f"run {'x' * 50} y", 30)
    assert lines == ["run \\", f"  {'x' * 50} \\", "  y"]


def test_an_unbalanced_quote_is_left_alone() -> None:
    assert command_lines("run 'it" + " x" * 40, 30) == ["run 'it" + " x" * 40]


def test_sentences_break_between_words_and_hang() -> None:
    text = "short\n  a key that is too long for its line\ncommand: " + LONG
    assert fitted(text, 30).split("\n") == [
        "short",
        "  a key that is too long for",
        "    its line",
        "command: python -m server \\",
        "    --model-path a/b \\",
        "    --env '{\"a\": 1}' \\",
        "    --port 30000 \\",
        "    --disable-cache --tp 2",
    ]
    assert fitted(text, 200) == text


def test_the_command_that_helps_stands_on_a_line_of_its_own() -> None:
    text = "There is no recording at a/b. Record one with: quantguard capture gate.yaml --push"
    assert fitted(text, 60).split("\n") == [
        "There is no recording at a/b. Record one with:",
        "    quantguard capture gate.yaml --push",
    ]
    assert fitted("Or: pytest --quantguard-config=x.yaml --quantguard-accept", 40).split("\n") == [
        "Or:",
        "    pytest --quantguard-config=x.yaml \\",
        "      --quantguard-accept",
    ]
    assert fitted(text, 100) == text


@pytest.mark.parametrize(("columns", "width"), [("40", 58), ("60", 58), ("72", 70), ("80", 78), ("200", 78)])
def test_width_follows_the_terminal(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert text_width() == width


def test_paths_in_the_working_folder_are_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown_path(tmp_path / "a" / "b.yaml") == "a/b.yaml"
    assert shown_path("/elsewhere/b.yaml") == "/elsewhere/b.yaml"
    said = f"no file {tmp_path}/a.yaml ('{tmp_path}/b'), --path={tmp_path}/.c/d"
    assert with_short_paths(said) == "no file a.yaml ('b'), --path=.c/d"
    for other in (f"{tmp_path}", f"{tmp_path}-other/x", f"/root{tmp_path}/x", f"x{tmp_path}/y"):
        assert with_short_paths(f"in {other} it is") == f"in {other} it is"
    monkeypatch.chdir("/")
    assert with_short_paths("at /etc/x") == "at /etc/x"
