"""Under pytest-xdist: one worker per gate, results merged by the controller, timing refused."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import Project

pytest.importorskip("xdist")

WHO_RAN = """
    import os

    def pytest_runtest_logreport(report):
        if report.when == "call" and hasattr(report, "node"):
            with open("who.txt", "a") as file:
                file.write(f"{report.node.gateway.id} {report.nodeid}\\n")
"""


@pytest.fixture
def spread(captured: Project) -> Project:
    captured.pytester.makeconftest(WHO_RAN)
    return captured


def run(project: Project, *arguments: str) -> pytest.RunResult:
    return project.pytester.runpytest_subprocess("--quantguard-config=gate.yaml", "-n", "2", *arguments)


def test_a_gate_and_its_users_stay_on_one_worker(spread: Project) -> None:
    spread.write("other.yaml", name="other")
    spread.pytester.makepyfile(
        test_user="def test_user(quantguard_server):\n    pass\n\n\ndef test_plain():\n    pass\n"
    )
    spread.candidate.paths.clear()
    result = run(spread, "--quantguard-config=other.yaml", "test_user.py")
    result.assert_outcomes(passed=2 * 18 + 3)
    workers: dict[str, set[str]] = {}
    for line in (spread.folder / "who.txt").read_text(encoding="utf-8").splitlines():
        worker, test_id = line.split(" ", 1)
        for name in ("toy", "other"):
            if test_id.startswith(f"{name}::") or test_id.endswith(f"@{name}"):
                workers.setdefault(name, set()).add(worker)
    assert {name: len(found) for name, found in workers.items()} == {"toy": 1, "other": 1}
    ids = (spread.folder / "who.txt").read_text(encoding="utf-8")
    assert "test_user.py::test_user[toy]@toy" in ids
    assert "test_user.py::test_user[other]@other" in ids
    assert spread.candidate.paths.count("/generate") == 2 * (6 + 2 * (8 + 2)), "each gate measured once"
    result.stdout.fnmatch_lines(["toy: PASSED (18 of 18*", "other: PASSED (18 of 18*"])
    for name in ("toy", "other"):
        merged = spread.result(name)
        assert (merged["verdict"], merged["partial"], len(merged["checks"])) == ("passed", False, 18)
        assert len(merged["cells"]) == 4
        assert merged["candidate"]["capabilities"]["version"] == "1.0"
        report = (spread.folder / ".quantguard" / name / "report.html").read_text(encoding="utf-8")
        assert "Worst positions" in report, "what only the worker has measured"


@pytest.mark.slow
def test_timing_is_refused(spread: Project) -> None:
    spread.write(speed={"rounds": 1, "warmup_rounds": 0, "levels": [1]})
    result = run(spread, "-k", "speed")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["Nothing can be timed under pytest-xdist:*"])
    assert spread.result()["verdict"] == "failed"


@pytest.mark.slow
def test_dist_each_is_refused(spread: Project) -> None:
    result = run(spread, "--dist=each")
    assert result.ret != 0
    result.stderr.fnmatch_lines(["*--dist=each would start every gate's server once per worker*"])
