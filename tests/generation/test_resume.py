"""The file of finished answers: taken over, dropped, damaged, written by two."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from pytest_quantguard.errors import QuantguardError
from pytest_quantguard.generation.answer import GeneratedAnswer
from pytest_quantguard.measure import resume
from pytest_quantguard.measure.resume import open_resume_file

RUN, OTHER = "a" * 64, "b" * 64


def answer(name: str, text: str = "blue") -> GeneratedAnswer:
    return GeneratedAnswer(
        id=name,
        text=text,
        output_ids=(1, 2),
        ending="stop",
        prompt_tokens=3,
        completion_tokens=2,
        seconds=0.5,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with two answers of an interrupted run."""
    path = tmp_path / "out" / "generation.jsonl"
    with open_resume_file(path, RUN, take_over=True) as file:
        assert file.known == {}
        file.keep(answer("q0"))
        file.keep(answer("q1", "a\n\u2028\x00\u202e"))
    return path


def test_an_interrupted_run_goes_on(path: Path) -> None:
    with open_resume_file(path, RUN, take_over=True) as file:
        assert file.known == {"q0": answer("q0"), "q1": answer("q1", "a\n\u2028\x00\u202e")}
        (note,) = file.notes
        assert note.startswith("2 generated answers were taken over from the interrupted run of ")
        file.keep(answer("q2"))
    with open_resume_file(path, RUN, take_over=True) as file:
        assert list(file.known) == ["q0", "q1", "q2"]


def test_another_run_starts_anew(path: Path) -> None:
    with open_resume_file(path, OTHER, take_over=True) as file:
        assert file.known == {}
        file.keep(answer("q9"))
    with open_resume_file(path, RUN, take_over=True) as file:
        assert file.known == {}, "what the other run wrote is not ours"


def test_resume_can_be_switched_off(path: Path) -> None:
    with open_resume_file(path, RUN, take_over=False) as file:
        assert file.known == {}
        assert file.notes == []


def test_old_answers_are_asked_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tomorrow(datetime):
        @classmethod
        def now(cls, _: object = None) -> datetime:  # type: ignore[override]
            return datetime.now(timezone.utc) + timedelta(hours=25)

    monkeypatch.setattr(resume, "datetime", Tomorrow)
    with open_resume_file(path, RUN, take_over=True) as file:
        assert file.known == {}


def test_a_half_written_line_is_dropped(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with open_resume_file(path, RUN, take_over=True) as file:
        assert list(file.known) == ["q0"]
        file.keep(answer("q1"))
    with open_resume_file(path, RUN, take_over=True) as file:
        assert list(file.known) == ["q0", "q1"]


def test_damaged_lines_are_counted_and_asked_again(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\xff{nonsense\n\n" + lines[2])
    with open_resume_file(path, RUN, take_over=True) as file:
        assert list(file.known) == ["q1"]
        assert "generation.jsonl: 2 lines could not be read and are asked again" in file.notes


def test_two_runs_cannot_write_one_file(path: Path) -> None:
    holder = (
        "import sys; from pathlib import Path\n"
        "from pytest_quantguard.measure.resume import open_resume_file\n"
        f"with open_resume_file(Path({str(path)!r}), {RUN!r}, take_over=True):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with (
            pytest.raises(
                QuantguardError, match=rf"Another run \(process {process.pid}\) is writing .*--quantgua"
            ),
            open_resume_file(path, RUN, take_over=True),
        ):
            pass
    finally:
        process.communicate("")
    with open_resume_file(path, RUN, take_over=True) as file:
        assert list(file.known) == ["q0", "q1"], "the other run has left them alone"


def test_a_killed_writer_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "generation.jsonl"
    writer = (
        "import os, signal; from pathlib import Path\n"
        "from pytest_quantguard.measure.resume import open_resume_file\n"
        "from tests.generation.test_resume import answer\n"
        f"with open_resume_file(Path({str(path)!r}), {RUN!r}, take_over=True) as file:\n"
        "    [file.keep(answer(f'q{n}')) for n in range(50)]\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", writer], cwd=root, check=False)
    with open_resume_file(path, RUN, take_over=True) as file:
        assert len(file.known) == 50


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with (
        pytest.raises(QuantguardError, match=r"could not be kept in .*--quantguard-output=DIR"),
        open_resume_file(tmp_path / "file" / "generation.jsonl", RUN, take_over=True),
    ):
        pass


@contextmanager
def limited(size: int) -> Iterator[None]:
    """No file of this process may become larger."""
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))


def test_a_disk_that_becomes_full(path: Path) -> None:
    """The sentence is the only error, although the file is then closed; what was kept before is there."""
    with (
        pytest.raises(QuantguardError, match=r"could not be kept in .*: File too large. Make room"),
        limited(path.stat().st_size + 20),
        open_resume_file(path, RUN, take_over=True) as file,
    ):
        file.keep(answer("q2"))
    with open_resume_file(path, RUN, take_over=True) as file:
        assert list(file.known) == ["q0", "q1"]
        file.keep(answer("q2"))
    with open_resume_file(path, RUN, take_over=True) as file:
        assert list(file.known) == ["q0", "q1", "q2"]


def test_a_time_without_a_zone_is_a_damaged_line(path: Path) -> None:
    path.write_text(path.read_text(encoding="utf-8").replace('Z"}', '"}'), encoding="utf-8")
    with open_resume_file(path, RUN, take_over=True) as file:
        assert file.known == {}
        assert "1 lines could not be read" in file.notes[0]
