"""Every text file and every program's output is read as UTF-8, whatever the locale of the machine says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("pytest_quantguard/**/*.py"), *ROOT.glob("tests/**/*.py")])


def by_locale(tree: ast.Module) -> Iterator[ast.Call]:
    """Calls that read or write text in the locale's encoding."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or "encoding" in {word.arg for word in call.keywords}:
            continue
        match call:
            case ast.Call(func=ast.Attribute(attr="read_text"), args=[]):
                yield call
            case ast.Call(func=ast.Attribute(attr="write_text"), args=[_]):
                yield call
            case ast.Call(func=ast.Attribute(attr="open"), args=[] | [ast.Constant()]):
                if not any("b" in str(word) for word in mode_of(call)):
                    yield call
            case ast.Call(func=ast.Attribute(attr="run" | "Popen" | "check_output")):
                if {"text", "universal_newlines"} & {word.arg for word in call.keywords}:
                    yield call


def mode_of(call: ast.Call) -> list[object]:
    """The mode of a call of open, where it is written there."""
    words = [word.value for word in call.keywords if word.arg == "mode"]
    return [word.value for word in [*call.args, *words] if isinstance(word, ast.Constant)]


def test_text_has_an_encoding() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)[:90]}"
        for path in SOURCES
        for call in by_locale(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert len(SOURCES) > 300
    assert not found, "\n".join(found)


def test_the_search_finds_them() -> None:
    text = "p.read_text()\np.write_text(x)\np.open()\np.open('w')\nsubprocess.run(x, text=True)\n"
    fine = "p.read_text(encoding='utf-8')\np.open('rb')\nsubprocess.run(x)\np.write_text(x, 'utf-8')\n"
    assert len(list(by_locale(ast.parse(text)))) == 5
    assert list(by_locale(ast.parse(fine))) == []
