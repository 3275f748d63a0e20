"""A session that a signal ends: what it leaves, when the signal came, and whose it is afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.plugin.conftest import Project

# A runner in the background has SIGINT ignored, and its children inherit that.
RUN = "import signal, sys, pytest; signal.signal(2, signal.default_int_handler); sys.exit(pytest.main())"
WAITING = """
import os, pathlib, signal, time

class Waiting:
    after = int(os.environ["WAIT_AFTER"])
    begun = told = 0

    def pytest_runtest_setup(self, item):
        self.begun += 1
        if self.begun > self.after:
            self.pytest_runtest_logreport(None)
            time.sleep(600)

    def pytest_runtest_logreport(self, report):
        self.told += report is not None and report.when == "call"
        if self.told == self.after and "PYTEST_XDIST_WORKER" not in os.environ:
            pathlib.Path("waits").touch()

    def pytest_sessionfinish(self):
        if "AGAIN" in os.environ:
            os.kill(os.getpid(), signal.SIGTERM)

def pytest_configure(config):
    config.pluginmanager.register(Waiting())
"""


def interrupted(project: Project, number: int, *arguments: str, after: int = 4, group: bool = False) -> str:
    """What a session says that waits after so many checks and is then sent a signal."""
    (project.folder / "waiting.py").write_text(WAITING, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, "--quantguard-config=gate.yaml", "-p", "waiting", *arguments],
        cwd=project.folder,
        env={**os.environ, "PYTHONPATH": str(project.folder), "WAIT_AFTER": str(after)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (project.folder / "waits").exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "waited in vain for the session to wait"
            time.sleep(0.02)
        (os.killpg if group else os.kill)(process.pid, number)
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == pytest.ExitCode.INTERRUPTED, said
    return said


def history(project: Project) -> list[dict[str, Any]]:
    path = project.folder / ".quantguard" / "toy" / "history.jsonl"
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM],
    ids=lambda number: number.name,
)
def test_what_was_checked_is_told_and_kept(captured: Project, number: signal.Signals) -> None:
    said = interrupted(captured, number)
    assert "toy: INCOMPLETE" in said
    assert ("SIGTERM received" in said) == (number == signal.SIGTERM)
    assert "Traceback" not in said
    result = captured.result()
    assert (result["partial"], result["verdict"], len(result["checks"])) == (True, "incomplete", 4)
    assert [entry["verdict"] for entry in history(captured)] == ["incomplete"]
    assert "partial" in (captured.folder / ".quantguard" / "toy" / "summary.md").read_text(encoding="utf-8")


def test_a_run_that_checked_nothing_is_not_in_the_history(captured: Project) -> None:
    said = interrupted(captured, signal.SIGTERM, after=0)
    assert "toy: INCOMPLETE" in said
    assert captured.result()["checks"] == []
    assert captured.result()["partial"]
    assert history(captured) == []


@pytest.mark.slow
def test_a_further_signal_does_not_disturb_the_end(
    captured: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GitHub Actions sends SIGINT, and SIGTERM some seconds later."""
    monkeypatch.setenv("AGAIN", "1")
    said = interrupted(captured, signal.SIGINT)
    assert "toy: INCOMPLETE" in said
    assert len(history(captured)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("group", [False, True], ids=["controller", "all processes"])
def test_with_workers(captured: Project, group: bool) -> None:
    said = interrupted(captured, signal.SIGTERM, "-n1", group=group)
    assert "toy: INCOMPLETE" in said
    assert len(captured.result()["checks"]) == 4
    assert captured.result()["partial"]
    assert [entry["verdict"] for entry in history(captured)] == ["incomplete"]


CRASHING = """
import os, pathlib

def pytest_runtest_setup(item):
    if "bs4-kl_mean" in item.name and "PYTEST_XDIST_WORKER" in os.environ and not os.path.exists("crashed"):
        pathlib.Path("crashed").touch()
        os._exit(9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--max-worker-restart=0",)], ids=["again", "never"])
def test_a_worker_that_dies_is_in_the_result(captured: Project, options: tuple[str, ...]) -> None:
    """xdist starts another one, which may pass what killed the first; the build is red all the same."""
    (captured.folder / "crashing.py").write_text(CRASHING, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "--quantguard-config=gate.yaml", "-p", "crashing", "-n1", *options],
        cwd=captured.folder,
        env={**os.environ, "PYTHONPATH": str(captured.folder)},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    written = captured.result()
    (died,) = [check for check in written["checks"] if check["outcome"] == "error"]
    assert "bs4-kl_mean" in died["id"]
    assert "crashed while running" in died["message"]
    assert written["verdict"] == "failed"
    assert written["partial"] == bool(options)
    assert [entry["verdict"] for entry in history(captured)] == ["failed"]


def test_the_signal_is_given_back(project: Project) -> None:
    (project.folder / "test_signal.py").write_text(
        "import signal\n\n\ndef test_taken():\n    assert signal.getsignal(15) is not signal.SIG_DFL\n",
        encoding="utf-8",
    )
    before = signal.getsignal(signal.SIGTERM)
    result = project.run("test_signal.py", "-k", "taken")
    assert result.ret == 0, result.outlines
    assert signal.getsignal(signal.SIGTERM) is before is signal.SIG_DFL


@pytest.mark.parametrize("theirs", [signal.SIG_IGN, lambda *_: None], ids=["ignored", "handled"])
def test_what_others_do_with_the_signal_stays(project: Project, theirs: Any) -> None:
    before = signal.signal(signal.SIGTERM, theirs)
    try:
        (project.folder / "test_signal.py").write_text(
            "import os, signal\n\n\ndef test_theirs():\n    os.kill(os.getpid(), 15)\n", encoding="utf-8"
        )
        result = project.run("test_signal.py", "-k", "theirs")
        assert result.ret == 0, result.outlines
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_fork_dies_of_it_as_ever(project: Project) -> None:
    (project.folder / "test_fork.py").write_text(
        "import os, signal, time\n\n\n"
        "def test_fork():\n"
        "    said, say = os.pipe()\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os.write(say, b'.')\n"
        "        time.sleep(60)\n"
        "        os._exit(0)\n"
        "    os.read(said, 1)\n"
        "    os.kill(child, 15)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -15\n",
        encoding="utf-8",
    )
    result = project.run("test_fork.py", "-k", "fork", "-W", "ignore::DeprecationWarning")
    assert result.ret == 0, result.outlines
