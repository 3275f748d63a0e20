"""What is collected, under which names, and what a broken command line or config looks like."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.plugin.conftest import Project

OWN_TEST = "def test_own():\n    pass\n"
IDS = ["toy::server", "toy::validity[prefill-bs1]", "toy::accuracy[decode-bs4-kl_mean]"]


def collected(result: pytest.RunResult) -> list[str]:
    return [line for line in result.outlines if "::" in line]


def test_without_paths_only_the_gate_is_collected(project: Project) -> None:
    project.pytester.makepyfile(test_own=OWN_TEST)
    ids = collected(project.run("--collect-only", "-q"))
    assert set(IDS) <= set(ids)
    assert all(test_id.startswith("toy::") for test_id in ids)
    assert len(ids) == len(set(ids)) == 18


def test_testpaths_do_not_count_as_paths(project: Project) -> None:
    project.pytester.makeini("[pytest]\ntestpaths = tests\naddopts = --assert=plain -p no:hypothesispytest\n")
    (project.folder / "tests").mkdir()
    (project.folder / "tests" / "test_own.py").write_text(OWN_TEST, encoding="utf-8")
    assert "tests/test_own.py::test_own" not in collected(project.run("--collect-only", "-q"))


def test_with_paths_both_are_collected(project: Project) -> None:
    project.pytester.makepyfile(test_own=OWN_TEST)
    ids = collected(project.run("--collect-only", "-q", "test_own.py"))
    assert "test_own.py::test_own" in ids
    assert set(IDS) <= set(ids)


def test_an_id_from_a_report_selects_one_test(project: Project) -> None:
    ids = collected(project.run("--collect-only", "-q", "toy::accuracy[decode-bs4-kl_mean]"))
    assert ids == ["toy::accuracy[decode-bs4-kl_mean]"]
    assert len(collected(project.run("--collect-only", "-q", "toy"))) == 18


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (("-k", "kl_mean and decode and accuracy"), 2),
        (("-k", "prefill-bs4"), 4),
        (("-k", "self_consistency"), 4),
        (("-m", "not slow"), 18),
        (("-m", "quantguard"), 18),
        (("-m", "not quantguard"), 0),
    ],
)
def test_selection_by_keyword_and_marker(project: Project, options: tuple[str, ...], count: int) -> None:
    assert len(collected(project.run("--collect-only", "-q", "--strict-markers", *options))) == count


def test_tree_shows_gate_and_checks(project: Project) -> None:
    result = project.run("--collect-only")
    result.stdout.fnmatch_lines(
        ["<Gate toy>", "  <JudgedCheck server>", "  <JudgedCheck validity?prefill-bs1?>"]
    )
    assert not (project.folder / ".quantguard").exists(), "collecting leaves nothing behind"


def test_two_configs_have_two_gates(project: Project) -> None:
    project.write("other.yaml", name="other")
    ids = collected(project.run("--quantguard-config=other.yaml", "--collect-only", "-q"))
    assert {test_id.split("::")[0] for test_id in ids} == {"toy", "other"}


def test_broken_config_is_a_collection_error_without_traceback(project: Project) -> None:
    project.write(suite={"batch_size": [1]})
    result = project.run("--junitxml=junit.xml")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(
        ["*ERROR collecting quantguard-config*", "gate.yaml:*: suite.batch_size: unknown key*"]
    )
    result.stdout.no_fnmatch_line("*Traceback*")
    assert "suite.batch_size" in (project.folder / "junit.xml").read_text(encoding="utf-8")


def test_two_configs_of_one_name_are_refused(project: Project) -> None:
    project.write("other.yaml")
    result = project.run("--quantguard-config=other.yaml")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["Two configs are named 'toy': gate.yaml and other.yaml.*"])


@pytest.mark.parametrize(
    "options", [["--quantguard-accept"], ["--quantguard-update-baseline"], ["--quantguard-repeats=3"]]
)
def test_options_need_a_config(pytester: pytest.Pytester, options: list[str]) -> None:
    result = pytester.runpytest(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*needs --quantguard-config=FILE."])


def test_options_that_exclude_each_other(project: Project) -> None:
    result = project.run("--quantguard-accept", "--quantguard-update-baseline")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result = project.run("--quantguard-repeats=0")
    result.stderr.fnmatch_lines(["*--quantguard-repeats=0: at least 1 is needed.*"])


def test_unused_plugin_collects_nothing_and_loads_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_own=OWN_TEST)
    assert collected(pytester.runpytest("--collect-only", "-q")) == ["test_own.py::test_own"]
    heavy = "('numpy', 'pydantic', 'requests', 'yaml', 'orjson')"
    code = f"import sys, pytest_quantguard.plugin; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout == "[]\n"
