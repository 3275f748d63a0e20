"""The stored answers of a reference when something happened to them: a line that says what, or all of it."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_quantguard.baseline.answers import (
    AnswersHeader,
    ReferenceAnswer,
    ReferenceAnswers,
    read_answers,
    write_answers,
)
from pytest_quantguard.baseline.store import MANIFEST, read_manifest, write_recording
from pytest_quantguard.errors import BaselineError
from pytest_quantguard.generation.answer import GeneratedAnswer
from tests.baseline.samples import make_recording

COUNT = 4


def make_answers() -> ReferenceAnswers:
    header = AnswersHeader(
        created="2025-01-02T03:04:05+00:00",
        model_path="org/model",
        server={"kind": "sglang"},
        route="native",
        questions_digest="b" * 64,
        settings={"max_new_tokens": 9, "system": None},
        skipped=("long",),
        noise={"all": {"relative_score": 0.25}},
    )
    answers = tuple(
        ReferenceAnswer(
            input_ids=(5, 6, 7),
            answer=GeneratedAnswer(
                id=f"q{number}",
                text="Über \U0001f600 \n",
                output_ids=(1, 2),
                ending="stop",
                prompt_tokens=3,
                completion_tokens=2,
                seconds=0.5,
            ),
        )
        for number in range(COUNT)
    )
    return ReferenceAnswers(header=header, answers=answers)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored") / "base"
    write_recording(folder, make_recording())
    write_answers(folder, make_answers())
    return folder


@pytest.fixture
def base(stored: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(stored, tmp_path / "base"))


def file_of(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if path.name.startswith("generation-"))


def replaced(folder: Path, content: bytes) -> None:
    """Other content under a manifest that fits it, as a hand that edits both would leave it."""
    file_of(folder).write_bytes(content)
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    record = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    manifest["files"][file_of(folder).name] = record
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def refusal(folder: Path) -> str | None:
    """The line that reading ends with, if it does."""
    try:
        read_answers(folder, command="capture it")
    except BaselineError as error:
        return str(error)
    return None


def damage(content: bytes, draw: random.Random) -> bytes:
    raw = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        kind = draw.choice(["cut", "flip", "insert", "drop", "double"])
        at = draw.randrange(len(raw)) if raw else 0
        if kind == "cut":
            del raw[at:]
        elif kind == "flip" and raw:
            raw[at] ^= 1 << draw.randrange(8)
        elif kind == "insert":
            raw[at:at] = draw.choice([b"\n", b'"', b"null", b"9" * 5000, b"NaN", b"\xff", b"[" * 5000, b"{}"])
        elif kind == "drop":
            del raw[at : at + draw.randint(1, 40)]
        else:
            raw[at:at] = raw[at : at + 400]
    return bytes(raw)


@pytest.mark.parametrize("seed", range(20))
def test_any_damage_is_seen(base: Path, seed: int) -> None:
    whole = file_of(base).read_bytes()
    broken = damage(whole, random.Random(seed))
    file_of(base).write_bytes(broken)
    said = refusal(base)
    assert (said is None) == (broken == whole)
    assert said is None or "is damaged" in said


@pytest.mark.parametrize("seed", range(50))
def test_any_content_is_refused_in_a_line_or_read(base: Path, seed: int) -> None:
    replaced(base, damage(file_of(base).read_bytes(), random.Random(seed)))
    said = refusal(base)
    if said is not None:
        assert "Record them anew with: capture it" in said
        assert len(said) < 700
        assert "\n" not in said


def edited(line: int, *path: str | int, to: Any) -> Callable[[list[Any]], None]:
    def edit(lines: list[Any]) -> None:
        place = lines[line]
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = to

    return edit


WRONG = {
    "an id beyond any": edited(1, "input_ids", to=[5, 6, 10**30]),
    "a negative id": edited(1, "input_ids", to=[5, 6, -1]),
    "no ids": edited(1, "input_ids", to=[]),
    "ids as text": edited(1, "input_ids", to=["5", "6", "x"]),
    "another number of ids": edited(1, "input_ids", to=[5, 6]),
    "no ids on the native route": edited(2, "input_ids", to=None),
    "ids on the chat route": edited(0, "route", to="chat"),
    "an unknown route": edited(0, "route", to="smoke"),
    "an answer twice": edited(2, "answer", "id", to="q0"),
    "no text": edited(1, "answer", "text", to=None),
    "an unknown ending": edited(1, "answer", "ending", to="boredom"),
    "a negative count": edited(1, "answer", "completion_tokens", to=-1),
    "a count beyond any": edited(1, "answer", "completion_tokens", to=10**40),
    "a count that is none": edited(1, "answer", "completion_tokens", to="many"),
    "seconds that are none": edited(1, "answer", "seconds", to=float("nan")),
    "endless seconds": edited(1, "answer", "seconds", to=float("inf")),
    "noise that is none": edited(0, "noise", "all", "relative_score", to=float("nan")),
    "endless noise": edited(0, "noise", "all", "relative_score", to=float("inf")),
    "another format": edited(0, "format_version", to=2),
    "an unknown key": edited(0, "more", to=1),
    "no digest": edited(0, "questions_digest", to="x"),
    "a list for a header": lambda lines: lines.__setitem__(0, []),
    "no header": lambda lines: lines.pop(0),
    "nothing": lambda lines: lines.clear(),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_values_that_cannot_be_are_refused(base: Path, wrong: str) -> None:
    lines = [json.loads(line) for line in file_of(base).read_bytes().splitlines()]
    WRONG[wrong](lines)
    replaced(base, "".join(json.dumps(line) + "\n" for line in lines).encode())
    said = refusal(base)
    assert said is not None
    assert "not in this package's format" in said
    assert len(said) < 700


def test_what_was_written_is_read(base: Path) -> None:
    assert read_answers(base, command="x") == make_answers()


@pytest.mark.parametrize("size", [10**13, 2**63, -1, 1.5, None])
def test_an_announced_size_costs_no_memory(base: Path, size: Any) -> None:
    """A manifest may say anything; only what is there is read."""
    manifest = json.loads((base / MANIFEST).read_text(encoding="utf-8"))
    manifest["files"][file_of(base).name]["size"] = size
    (base / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(BaselineError, match=r"is not a manifest: files\.generation-"):
        read_answers(base, command="x")
    manifest["files"][file_of(base).name]["size"] = 10**10
    (base / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(BaselineError, match=r"is damaged: 10000000000 bytes expected"):
        read_answers(base, command="x")


@pytest.mark.parametrize(
    "name", ["../generation-1", "/etc/passwd", ".generation", "generation-a/b", "", "..", "a\0b"]
)
def test_a_name_cannot_lead_elsewhere(base: Path, name: str) -> None:
    manifest = json.loads((base / MANIFEST).read_text(encoding="utf-8"))
    record = manifest["files"].pop(file_of(base).name)
    manifest["files"][name] = record
    (base / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(BaselineError, match="is not a manifest: files"):
        read_manifest(base)


def test_a_link_to_something_else_is_damage(base: Path) -> None:
    """Whatever a file of this name is, its digest decides; one that never ends is not read."""
    file = file_of(base)
    for target in ("/etc/hostname", "/dev/zero", "/", str(base / MANIFEST), str(base / "nothing")):
        file.unlink()
        file.symlink_to(target)
        said = refusal(base)
        assert said is not None
        assert file.name in said
