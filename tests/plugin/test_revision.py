"""The commit and branch that a result belongs to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_quantguard.gate.revision import COMMIT_VARIABLES, revision_of


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit on a branch whose name is not ASCII."""
    if shutil.which("git") is None:
        pytest.skip("no git on this machine")
    who = ["-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "commit.gpgsign=false"]
    for words in (
        ["init", "-q"],
        ["checkout", "-q", "-b", "größe"],
        ["commit", "-q", "--allow-empty", "-mx"],
    ):
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True)
    return tmp_path


def test_commit_and_branch(repository: Path) -> None:
    found = revision_of(repository)
    head = (repository / ".git" / "refs" / "heads" / "größe").read_text(encoding="utf-8").strip()
    assert (found["commit"], found["branch"]) == (head, "größe")


SHOW_BRANCH = """
import sys
from pathlib import Path
from pytest_quantguard.gate.revision import revision_of
print(ascii(revision_of(Path(sys.argv[1]))["branch"]))
"""


def test_without_an_utf8_locale(repository: Path) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SHOW_BRANCH, str(repository)],
        env={**os.environ, **plain},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert (done.stdout, done.stderr) == (r"'gr\xf6\xdfe'" + "\n", "")


def test_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for name in COMMIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert "commit" not in revision_of(tmp_path)
    monkeypatch.setenv(COMMIT_VARIABLES[-1], "abc")
    assert revision_of(tmp_path)["commit"] == "abc"
