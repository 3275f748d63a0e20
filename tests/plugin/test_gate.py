"""The gate as a user meets it: verdicts, messages, and what happens when something is missing or broken."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from tests.plugin.conftest import PROMPTS, Project

DRIFT: dict[str, Any] = {"kl_mean": {"max": 0.2}, "drift": {"kl_mean": {"max_increase": "5%"}}}


def test_capture_then_pass(project: Project) -> None:
    result = project.run("--quantguard-update-baseline", "-v")
    result.stdout.fnmatch_lines(
        ["toy::capture_baseline PASSED*", "*baseline written to *: 8 prompts, 8 scored*"]
    )
    assert project.candidate.requests == 0, "capturing asks the reference only"
    result = project.run("--junitxml=junit.xml")
    result.assert_outcomes(passed=18)
    result.stdout.fnmatch_lines(
        [
            "toy: PASSED (18 of 18 checks held; * s)",
            "*candidate  attach, toy, fp8",
            "*prefill*decode",
            "*kl_mean*<= 0.1",
            "*agreement*>= 0.5",
        ]
    )
    suite = ElementTree.parse(project.folder / "junit.xml").getroot()
    cases = {(case.get("classname"), case.get("name")): case for case in suite.iter("testcase")}
    case = cases["toy", "accuracy[prefill-bs4-kl_mean]"]
    properties = {item.get("name"): item.get("value") for item in case.iter("property")}
    assert properties["metric"] == "kl_mean"
    assert 0 < float(properties["value"] or 0) < 0.1


def test_result_file(captured: Project) -> None:
    captured.run()
    result = captured.result()
    assert (result["schema_version"], result["verdict"], result["partial"]) == (1, "passed", False)
    check = next(item for item in result["checks"] if item["id"] == "accuracy[decode-bs4-kl_mean]")
    assert check["kind"] == "accuracy"
    assert (check["phase"], check["batch_size"], check["metric"]) == ("decode", 4, "kl_mean")
    assert (check["bound"], check["bound_side"], check["outcome"]) == (0.1, "max", "passed")
    assert check["interval"][0] < check["value"] < check["interval"][1]
    assert check["noise_floor"] == 0
    assert check["detectable_change"] > 0
    cell = next(item for item in result["cells"] if (item["phase"], item["batch_size"]) == ("decode", 4))
    assert cell["mode"] == "forced"
    assert cell["requests"] == 2
    assert cell["metrics"]["kl_mean"] == check["value"]
    assert result["candidate"]["capabilities"]["version"] == "1.0"
    assert result["baseline"]["suite"]["prompt_count"] == 8
    assert result["environment"]["pytest_quantguard"]


def test_each_cell_is_measured_once(captured: Project) -> None:
    captured.candidate.paths.clear()
    captured.run()
    attached = 6
    assert captured.candidate.paths.count("/generate") == attached + 2 * (8 + 2)


def test_missing_baseline_fails_with_the_command(project: Project) -> None:
    result = project.run()
    result.assert_outcomes(errors=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["There is no recording at baseline. Record one with:", "    quantguard capture gate.yaml"]
    )
    result.stdout.fnmatch_lines(["  error      18 checks: could not run (There is no recording at *"])
    result.stdout.fnmatch_lines(["*1 error, 17 not run in *"])
    assert result.stdout.str().count("ERROR") == 3, "told once: the heading, the error, the summary"
    result.stdout.no_fnmatch_line("*Traceback*")
    assert project.result()["verdict"] == "failed"
    assert project.candidate.requests == 0, "no server is started for nothing"


def test_baseline_that_is_a_file(project: Project) -> None:
    (project.folder / "baseline").write_text("x", encoding="utf-8")
    result = project.run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*baseline is a file, but a recording is a folder.*"])


def test_damaged_baseline(captured: Project) -> None:
    data = next((captured.folder / "baseline").glob("data-*"))
    data.write_bytes(data.read_bytes()[:-1] + b"\x00")
    result = captured.run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*is damaged*"])


@pytest.mark.parametrize(
    ("change", "named"), [({"top_logprobs": 8}, "top_logprobs"), ({"score_tokens": 4}, "score_tokens")]
)
def test_baseline_of_another_suite(captured: Project, change: dict[str, int], named: str) -> None:
    captured.write(suite={**captured.config["suite"], **change})
    result = captured.run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*stored*expected*", f"*{named}*", "*quantguard capture gate.yaml*"])


def test_baseline_of_other_prompts(captured: Project) -> None:
    (captured.folder / "prompts.jsonl").write_text(
        '{"text": "something else altogether"}\n', encoding="utf-8"
    )
    result = captured.run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*suite_digest*", "*quantguard capture gate.yaml*"])


def test_broken_bound_says_what_where_and_which_key(captured: Project) -> None:
    captured.candidate.noise = 0.8
    result = captured.run("-k", "server or (accuracy and kl_mean and prefill-bs4)")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["toy: FAILED (1 of 2 checks held, 1 failed, 16 not selected; * s)"])
    assert captured.result()["unselected"] == 16
    result.stdout.fnmatch_lines(
        [
            "prefill at batch size 4: kl_mean is 0.*; at most 0.1 is allowed.",
            "  95 % interval      0.* to *, by prompt",
            "  noise floor        0 (the reference against itself)",
            "  detectable change  0.* with this suite",
            "  worst positions    by kl",
            "    prompt p?, position ? of 8: kl *",
            "      after      '*'",
            "      reference  '?'",
            "      bf16       '?' 0.*, '?' 0.*, '?' 0.*",
            "      candidate  '?' 0.*, '?' 0.*, '?' 0.*",
            "  server             http://127.0.0.1:*",
            "  result             .quantguard/toy/result.json",
            "  bound              accuracy.kl_mean, or an entry of accuracy.overrides in",
            "*FAILED toy::accuracy?prefill-bs4-kl_mean? - 0.*, at most 0.1",
        ]
    )
    message = captured.result()["checks"][1]["message"]
    assert max(map(len, message.split("\n"))) <= 80


def test_checks_of_one_metric_tell_the_whole_story_once(captured: Project) -> None:
    captured.candidate.noise = 0.8
    brief = captured.run("-k", "accuracy and kl_mean").stdout
    assert brief.str().count("worst positions") == 1
    assert brief.str().count("  95 % interval") == 4, "the figures of each"
    brief.fnmatch_lines(["  in full            accuracy?prefill-bs1-kl_mean? above; this one in*"])
    messages = [one["message"] for one in captured.result()["checks"]]
    assert all("worst positions" in message for message in messages)
    assert captured.run("-k", "accuracy and kl_mean", "-v").stdout.str().count("worst positions") == 4


def test_short_summary_has_one_line_per_failure_in_ci(
    captured: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "1")
    captured.candidate.noise = 0.8
    lines = captured.run("-k", "accuracy and kl_mean and prefill-bs4").outlines
    start = next(index for index, line in enumerate(lines) if "short test summary" in line)
    assert len(lines) - start == 3


def test_decode_fault_is_told_from_prefill(captured: Project) -> None:
    captured.candidate.decode_noise = 1.5
    result = captured.run()
    failed = {check["id"] for check in captured.result()["checks"] if check["outcome"] == "failed"}
    assert all("decode" in check for check in failed)
    assert "self_consistency[decode-bs4-decode_against_prefill]" in failed
    result.stdout.fnmatch_lines(
        [
            "prefill-bs1 against decode-bs1: kl_mean against BF16 grew by *%*",
            "*diagnosis  Decode is worse than prefill*",
        ]
    )
    assert captured.result()["diagnosis"][0].startswith("Decode is worse than prefill")


def test_not_finite_answers_fail_validity_and_nothing_passes(captured: Project) -> None:
    captured.candidate.nan = True
    result = captured.run()
    outcomes = {check["id"]: check["outcome"] for check in captured.result()["checks"]}
    assert outcomes["validity[prefill-bs1]"] == "failed"
    assert outcomes["accuracy[prefill-bs1-kl_mean]"] == "error"
    assert [check for check, outcome in outcomes.items() if outcome == "passed"] == ["server"]
    result.stdout.fnmatch_lines(["The answers cannot be used. *non-finite log-"])
    result.stdout.no_fnmatch_line("*During handling*")


def test_rows_of_another_prompt_fail_validity(captured: Project) -> None:
    captured.candidate.swap_rows_from = 4
    captured.run()
    outcomes = {check["id"]: check for check in captured.result()["checks"]}
    assert outcomes["validity[prefill-bs1]"]["outcome"] == "passed"
    assert outcomes["validity[prefill-bs4]"]["outcome"] == "failed"
    assert "row_identity" in outcomes["validity[prefill-bs4]"]["extra"]["guards"]
    assert outcomes["accuracy[prefill-bs4-kl_mean]"]["outcome"] == "error"
    assert any("other prompts" in sentence for sentence in captured.result()["diagnosis"])


def test_candidate_that_is_the_reference_is_not_quantized(captured: Project) -> None:
    captured.candidate.noise = 0.0
    result = captured.run()
    failed = [check["id"] for check in captured.result()["checks"] if check["outcome"] != "passed"]
    assert failed == ["validity[quantized]"]
    result.stdout.fnmatch_lines(["Not quantized. *", "*the server says*quantization fp8*"])


def test_server_without_any_sign_of_quantization(captured: Project) -> None:
    """Its answers differ from the reference's, but of another reason than quantization."""
    model = captured.folder / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 64}', encoding="utf-8")
    captured.candidate.quantization, captured.candidate.model_path = None, str(model)
    captured.write(
        candidate={"backend": "attach", "url": captured.config["candidate"]["url"]},
        validity={"require_quantized": True},
    )
    result = captured.run("-k", "quantized")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["Not quantized. /server_info reports quantization None*"])


def test_server_that_dies_half_way(captured: Project) -> None:
    captured.candidate.dies_after = 6 + 8
    captured.run()
    outcomes = {check["id"]: check["outcome"] for check in captured.result()["checks"]}
    assert outcomes["validity[prefill-bs1]"] == "passed"
    assert outcomes["validity[prefill-bs4]"] == "error"
    assert outcomes["accuracy[decode-bs4-kl_mean]"] == "error"
    assert captured.result()["verdict"] == "failed"


def test_wrong_server_is_an_error(captured: Project) -> None:
    captured.candidate.quantization = None
    result = captured.run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*is not the one that `expect` describes*", "*quantization*'fp8'*None*"])


def test_bound_below_the_noise_floor_is_refused(project: Project) -> None:
    project.reference.jitter = 0.3
    project.write(accuracy={"kl_mean": {"max": 0.001}})
    project.capture()
    result = project.run("-k", "accuracy")
    result.assert_outcomes(errors=4)
    said = " ".join(result.stdout.str().split())
    assert "tighter than the reference's own noise floor" in said
    assert "accuracy.kl_mean in gate.yaml." in said


def test_repeats_measure_the_candidates_own_jitter(captured: Project) -> None:
    captured.candidate.jitter = 0.2
    captured.write(self_consistency={"repeat": {"max_increase": "50%", "max_kl": 0.0001}})
    captured.run("--quantguard-repeats=3")
    result = captured.result()
    assert sorted({cell["repeat"] for cell in result["cells"]}) == [0, 1, 2]
    check = next(item for item in result["checks"] if item["id"] == "self_consistency[prefill-bs4-repeat]")
    assert check["outcome"] == "failed"
    assert check["extra"]["kl_between"] > 0.0001
    assert "self_consistency.repeat.max_kl" in check["message"]


class TestDrift:
    def test_without_an_accepted_run_it_fails_with_the_command(self, captured: Project) -> None:
        captured.write(accuracy=DRIFT)
        result = captured.run("-k", "drift")
        result.assert_outcomes(errors=1)
        result.stdout.fnmatch_lines(["*drift is judged against an accepted run*", "*--quantguard-accept*"])

    def test_accept_then_equal_then_changed(self, captured: Project) -> None:
        captured.write(accuracy=DRIFT)
        result = captured.run("--quantguard-accept", "-v")
        result.stdout.fnmatch_lines(["toy::accept PASSED*", "*accepted run written to *"])
        result.stdout.no_fnmatch_line("*drift?prefill*")
        assert len(list((captured.folder / "baseline" / "accepted").glob("toy-fp8*/manifest.json"))) == 1
        captured.run("-k", "drift").assert_outcomes(passed=4)
        check = captured.result()["checks"][0]
        assert check["value"] == 0
        assert check["extra"]["identical_share"] == 1
        captured.candidate.noise = 0.12
        result = captured.run("-k", "drift or accuracy")
        result.assert_outcomes(passed=4, failed=4)
        result.stdout.fnmatch_lines(
            [
                "*since the accepted run kl_mean against BF16 grew by",
                "43.9% (0.00* to 0.00*); at most 5 % is allowed.",
                "*rows               0.0% are bit-identical*",
                "*accepted   '?' 0.*",
                "*bound              accuracy.drift.kl_mean in gate.yaml",
            ]
        )

    def test_drift_may_only_warn(self, captured: Project) -> None:
        captured.write(accuracy={**DRIFT, "drift": {**DRIFT["drift"], "on_failure": "warn"}})
        captured.run("--quantguard-accept")
        captured.candidate.noise = 0.12
        result = captured.run("-k", "drift")
        result.assert_outcomes(passed=4, warnings=4)
        assert {check["outcome"] for check in captured.result()["checks"]} == {"warned"}
        result.stdout.fnmatch_lines(["toy: PASSED (0 of 4 checks held, 4 with a warning*"])

    def test_bounds_on_the_accepted_run_itself(self, captured: Project) -> None:
        captured.write(accuracy={"kl_mean": {"max": 1}, "drift": {"divergence": {"kl_mean": {"max": 1e-9}}}})
        captured.run("--quantguard-accept")
        captured.run("-k", "drift").assert_outcomes(passed=4)
        captured.candidate.noise = 0.11
        captured.run("-k", "drift").assert_outcomes(failed=4)

    def test_a_failing_run_is_not_accepted(self, captured: Project) -> None:
        captured.write(accuracy=DRIFT)
        captured.candidate.noise = 1.5
        result = captured.run("--quantguard-accept")
        result.stdout.fnmatch_lines(["Not accepted: * checks failed (accuracy?prefill-bs1-kl_mean?*"])
        assert not (captured.folder / "baseline" / "accepted").exists()


def test_interrupted_run_writes_a_partial_result(captured: Project) -> None:
    captured.pytester.makeconftest(
        "def pytest_runtest_call(item):\n"
        "    if item.name == 'validity[decode-bs1]':\n"
        "        raise KeyboardInterrupt\n"
    )
    captured.pytester.runpytest_subprocess("--quantguard-config=gate.yaml")
    result = captured.result()
    assert (result["verdict"], result["partial"]) == ("incomplete", True)
    assert [check["id"] for check in result["checks"]] == [
        "server",
        "validity[prefill-bs1]",
        "validity[prefill-bs4]",
    ]
    assert len(result["cells"]) == 3


def test_unwritable_output_is_said(captured: Project) -> None:
    (captured.folder / ".quantguard").write_text("in the way", encoding="utf-8")
    result = captured.run()
    said = " ".join(result.stdout.str().split())
    assert "quantguard: The result could not be written to .quantguard/toy/result.json: " in said
    assert "choose another folder with --quantguard-output=DIR." in said


def test_the_prompts_are_analyzed_for_the_report(captured: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    captured.run("-k", "prefill-bs1-kl_mean")
    found = captured.result()["prompts"]
    assert found["total"]["prompts"] == 8
    assert found["tasks"]["toy"]["lengths"] == found["total"]["lengths"]
    letters = sum(len(json.loads(line)["text"]) for line in PROMPTS.splitlines())
    assert (found["tokens_are"], found["total"]["lengths"]["total"]) == ("counted", letters), "a token each"
    page = (captured.folder / ".quantguard/toy/report.html").read_text(encoding="utf-8")
    assert "<figcaption>Tokens of a prompt</figcaption>" in page

    monkeypatch.setattr("pytest_quantguard.gate.prompt_set.find_spec", lambda _: None)
    captured.run("-k", "prefill-bs1-kl_mean")
    assert captured.result()["prompts"]["near_duplicates"] is None

    monkeypatch.setattr("pytest_quantguard.gate.prompt_set.MOST_CHARACTERS", 10)
    captured.run("-k", "prefill-bs1-kl_mean")
    result = captured.result()
    assert result["prompts"] is None
    assert [note for note in result["notes"] if "too many to be analyzed with every run" in note]
