"""Tests of the user through the public fixtures."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import Project

USER_TEST = """
    def test_all_four(quantguard, quantguard_config, quantguard_server, quantguard_baseline):
        assert quantguard_config.name == quantguard.config.name
        assert quantguard_server is quantguard.server
        assert quantguard_baseline is quantguard.baseline
        assert quantguard_server.capabilities.quantization == "fp8"
        assert len(quantguard_baseline.prompts) == 8

    def test_measure(quantguard):
        divergence = quantguard.measure("prefill", 4)
        assert divergence.positions == 64
        result = quantguard.check("kl_mean", phase="prefill", batch_size=4, max=1)
        assert result.value == divergence.aggregate("kl_mean")
        assert quantguard.value("agreement", phase="prefill", batch_size=4) > 0.5

    def test_too_strict(quantguard):
        quantguard.check("kl_mean", phase="prefill", batch_size=4, max=0.0001)
"""


def test_fixtures_share_the_gates_server_and_measurements(captured: Project) -> None:
    captured.pytester.makepyfile(test_user=USER_TEST)
    result = captured.run("test_user.py")
    result.assert_outcomes(passed=18 + 2, failed=1)
    result.stdout.fnmatch_lines(
        ["prefill at batch size 4: kl_mean is 0.00*; at most 0.0001 is allowed.", "*worst positions*"]
    )
    assert captured.candidate.paths.count("/generate") == 6 + 2 * (8 + 2)


def test_several_configs_run_the_test_once_each(captured: Project) -> None:
    captured.write("other.yaml", name="other")
    captured.pytester.makepyfile(
        test_user="def test_name(quantguard_config):\n    assert quantguard_config.name\n"
    )
    result = captured.run("--quantguard-config=other.yaml", "test_user.py", "-v", "-k", "test_name")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        ["test_user.py::test_name?toy? PASSED*", "test_user.py::test_name?other? PASSED*"]
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "measure('prefill', 7)",
            "toy: the suite has no cell prefill-bs7; it measures prefill-bs1, prefill-bs4*",
        ),
        (
            "value('kl_meen', phase='prefill', batch_size=1)",
            "There is no metric 'kl_meen'; did you mean 'kl_mean'?",
        ),
        ("check('agreement', phase='prefill', batch_size=1, max=1)", "check('agreement', ...) needs min=*"),
        ("check('kl_mean', phase='prefill', batch_size=1)", "check('kl_mean', ...) needs max=*"),
    ],
)
def test_wrong_use_is_explained(captured: Project, call: str, message: str) -> None:
    captured.pytester.makepyfile(test_user=f"def test_it(quantguard):\n    quantguard.{call}\n")
    result = captured.run("test_user.py", "-k", "test_it")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([message])


def test_without_a_config_the_fixtures_say_so(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(quantguard_server):\n    pass\n")
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["This test needs a config: run pytest with --quantguard-config=FILE."])


def test_without_a_baseline_the_test_fails_with_the_command(project: Project) -> None:
    project.pytester.makepyfile(test_user="def test_it(quantguard_baseline):\n    pass\n")
    result = project.run("test_user.py", "-k", "test_it")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["There is no recording at *quantguard capture*"])
    result.stdout.no_fnmatch_line("*Traceback*")
