"""`quantguard report`: a report made anew, from any run, on any terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_quantguard import cli
from pytest_quantguard.report.history import append_entry, entry_of
from pytest_quantguard.results import write_result
from tests.report.samples import HOSTILE, full


def test_both_files_are_written_beside_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_result(tmp_path, full())
    assert cli.main(["report", str(tmp_path / "result.json")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("gate: FAILED")
    assert said[1:] == [str(tmp_path / "report.html"), str(tmp_path / "summary.md")]
    assert "This report is partial" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_elsewhere_as_json_with_the_experiment_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = full()
    write_result(tmp_path, run)
    line = entry_of(run, None).model_copy(update={"changed": "changed: this", "effect": "did: that"})
    append_entry(tmp_path, line)
    assert cli.main(["report", str(tmp_path), "--output", str(tmp_path / "new"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {
        "report": str(tmp_path / "new" / "report.html"),
        "summary": str(tmp_path / "new" / "summary.md"),
        "verdict": "failed",
        "partial": True,
    }
    assert "changed: this" in Path(said["report"]).read_text(encoding="utf-8")


def test_markdown_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_result(tmp_path, full())
    assert cli.main(["report", str(tmp_path), "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("## ❌ gate: FAILED")
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "There is no result at"),
        (
            '{"schema_version": 99}',
            "has schema version 99; this pytest-quantguard reads up to 1. Upgrade with",
        ),
        ("{", "is not JSON"),
    ],
)
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "result.json").write_text(content, encoding="utf-8")
    assert cli.main(["report", str(tmp_path)]) == 3
    assert message in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_result(tmp_path, full())
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert cli.main(["report", str(tmp_path), "--output", str(tmp_path / "file" / "below")]) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "The report could not be written to" in said
    assert "choose another folder with --output=DIR." in said, "the option of this command"


def test_without_an_utf8_locale(tmp_path: Path) -> None:
    write_result(tmp_path, full(HOSTILE + " Größe"))
    append_entry(tmp_path, entry_of(full("Größe"), None))
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    for words in (["report", str(tmp_path), "--markdown"], ["history", str(tmp_path)]):
        done = subprocess.run(
            [sys.executable, "-m", "pytest_quantguard.cli", *words],
            env={**os.environ, **plain},
            capture_output=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.isascii()
    assert b"_" in done.stdout, "a sparkline of ASCII characters"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("baseline", "model"), 1.0),
        (("details", "cells", 0, "along_span", 0, "kl_mean"), "Infinity"),
        (("details", "prompts", 0, "kl_mean", "decode-bs8"), 1e308),
        (("details", "cells", 0, "histogram", "candidate"), []),
    ],
    ids=str,
)
def test_a_result_that_somebody_changed_is_no_traceback(
    path: tuple[str | int, ...], value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Either a report, or a sentence that names the file."""
    write_result(tmp_path, full())
    changed = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (tmp_path / "result.json").write_text(json.dumps(changed), encoding="utf-8")
    code = cli.main(["report", str(tmp_path)])
    assert code in (0, 3)
    if code == 3:
        assert f"No report can be made of {tmp_path}" in capsys.readouterr().err
