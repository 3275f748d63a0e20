"""The speed checks of a gate, over toy servers that stream."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.plugin.conftest import Project
from tests.plugin.pacing import SCENARIO, SPEED, Paced, cells, verdicts
from tests.plugin.toy_server import stream_answer


def test_figures_go_to_pytest_benchmark_the_result_and_one_table(captured: Project) -> None:
    captured.write(speed={**SPEED, "rounds": 2})
    result = captured.run("-k", "speed", "--benchmark-json=bench.json")
    result.assert_outcomes(passed=2)
    loaded = json.loads((captured.folder / "bench.json").read_text(encoding="utf-8"))["benchmarks"]
    benchmarks = {item["fullname"]: item for item in loaded}
    assert set(benchmarks) == {"toy::speed[decode_heavy-1]", "toy::speed[decode_heavy-max]"}
    one = benchmarks["toy::speed[decode_heavy-1]"]
    assert one["group"] == "toy: decode_heavy"
    assert one["stats"]["rounds"] == 2
    checks = cells(captured)
    speed = checks["speed[decode_heavy-1]"]["speed"]
    assert (speed["requests"], speed["concurrency"], speed["output_tokens"]) == (4, 1, 16)
    for name in ("duration", "output_throughput", "p99_ttft_ms", "median_tpot_ms", "p95_itl_ms"):
        assert one["extra_info"][name] == pytest.approx(speed["figures"][name])
        assert len(speed["by_round"][name]) == 2
    assert checks["speed[decode_heavy-max]"]["speed"]["concurrency"] == 4
    assert captured.result()["environment"]["fingerprint"]["server"] == "emulator"
    table = [line for line in result.outlines if line.strip().startswith("decode_heavy")]
    assert [line.split()[1] for line in table] == ["1", "max"]
    assert captured.candidate.paths.count("/flush_cache") == 2 * (1 + 2)


def test_a_broken_bound_fails_with_a_table_and_is_a_failure_in_junit(paced: Paced) -> None:
    captured = paced.project
    captured.write(speed={**SPEED, "output_tokens_per_s": {"min": 1e9}, "ttft_p99_ms": {"max": 1e5}})
    result = captured.run("-k", "speed and max", "--junitxml=junit.xml")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "decode_heavy at level max (4): an absolute bound is broken.",
            "*against*figure*value*allowed*95 % interval*verdict",
            "*bound*output_throughput*>= 1e+09*failed",
            "*bound*p99_ttft_ms*<= 1e+05*held",
            "*speed, or an entry of speed.overrides in gate.yaml",
        ]
    )
    case = ElementTree.parse(captured.folder / "junit.xml").getroot().find(".//testcase")
    assert case is not None
    failure = case.find("failure")
    assert failure is not None
    assert "an absolute bound is broken" in str(failure.get("message"))


@pytest.mark.parametrize(
    ("disturbance", "kept", "status"),
    [
        ("", True, "held"),
        ("", False, "failed"),
        ("hot", True, "held"),
        ("hot", False, "inconclusive"),
        ("crowded", False, "inconclusive"),
        ("scatter", True, "held"),
        ("scatter", False, "inconclusive"),
        ("cached", True, "inconclusive"),
        ("cached", False, "inconclusive"),
    ],
)
def test_what_was_disturbed_breaks_no_bound(
    paced: Paced, monkeypatch: pytest.MonkeyPatch, disturbance: str, kept: bool, status: str
) -> None:
    """What slows a server down can only make it break a bound, and a cache only keep it. Rounds take 1 s."""
    state = "pytest_quantguard.serving.machine_state.MachineState"
    for name, property_ in (("hot", "throttling"), ("crowded", "crowding")):
        monkeypatch.setattr(f"{state}.{property_}", [f"it was {name}"] if disturbance == name else [])
    paced.cached_tokens = 2 if disturbance == "cached" else 0
    rules = {"max_scatter": 1e-9} if disturbance == "scatter" else {}
    limits = {"duration": {"max": 1.5 if kept else 0.5}, "request_throughput": {"min": 3 if kept else 5}}
    paced.project.write(speed={**SPEED, "levels": ["max"], **rules, **limits})
    result = paced.project.run("-k", "speed")
    (check,) = cells(paced.project).values()
    assert [verdict["status"] for verdict in check["speed"]["verdicts"]] == [status, status]
    expected = {"held": "passed", "failed": "failed", "inconclusive": "warned"}
    assert check["outcome"] == expected[status]
    if status == "inconclusive":
        result.stdout.fnmatch_lines(["*inconclusive against an absolute bound.", "*Likely reasons:*"])
        said = {
            "hot": "it was hot",
            "crowded": "it was crowded",
            "scatter": "scatter by",
            "cached": "prefix cache",
        }
        assert said[disturbance] in check["message"]


def test_without_a_record_the_check_fails_and_names_the_command(captured: Project) -> None:
    captured.write(speed={**SPEED, "max_slowdown": "5%"})
    result = captured.run("-k", "speed")
    result.assert_outcomes(failed=2)
    text = " ".join(result.stdout.str().split())
    assert "There is no accepted speed record in" in text
    assert "record it: pytest --quantguard-config=gate.yaml --quantguard-accept" in text


@pytest.fixture(scope="session")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the accepted run is kept, once there is one."""
    return tmp_path_factory.mktemp("accepted") / "held"


class TestAccepted:
    @pytest.fixture
    def accepted(self, paced: Paced, held: Path) -> Project:
        """A project whose candidate was accepted at its pace; done once, then copied."""
        project, folder = paced.project, paced.project.folder / "baseline" / "accepted"
        project.write(speed={**SPEED, "max_slowdown": "5%"})
        if held.exists():
            shutil.copytree(held, folder)
            return project
        result = project.run("--quantguard-accept")
        assert result.ret == 0, result.outlines
        assert "Times of 2 scenarios and levels were accepted," in " ".join(result.outlines)
        shutil.copytree(folder, held)
        return project

    @pytest.mark.parametrize(
        ("pace", "status", "outcome"),
        [
            (1.0, "unchanged", "passed"),
            (1.02, "unchanged", "passed"),
            (0.9, "improved", "passed"),
            (1.1, "regressed", "failed"),
            (1.05, "inconclusive", "warned"),
        ],
    )
    def test_verdicts(self, paced: Paced, accepted: Project, pace: float, status: str, outcome: str) -> None:
        paced.candidate = pace
        result = accepted.run("-k", "speed")
        for check in cells(accepted).values():
            assert (verdicts(check)["accepted"], check["outcome"]) == (status, outcome)
            (verdict,) = check["speed"]["verdicts"]
            assert verdict["value"] == pytest.approx(pace, rel=0.02)
            assert verdict["interval"][0] <= verdict["value"] <= verdict["interval"][1]
        if status == "regressed":
            result.stdout.fnmatch_lines(
                ["*slower than the accepted run.", "*accepted run*duration*x*<= 1.050x*regressed"]
            )

    def test_rounds_that_scatter_are_inconclusive(self, accepted: Project) -> None:
        speed = {**SPEED, "max_slowdown": "5%", "max_scatter": 1e-9}
        accepted.write(speed=speed)
        result = accepted.run("-k", "speed")
        result.assert_outcomes(passed=2, warnings=2)
        result.stdout.fnmatch_lines(["*the rounds of this run scatter by*", "*Likely reasons:*"])
        accepted.write(speed={**speed, "on_inconclusive": "fail"})
        accepted.run("-k", "speed").assert_outcomes(failed=2)
        assert {verdicts(check)["accepted"] for check in cells(accepted).values()} == {"inconclusive"}

    def test_a_cache_that_was_not_empty_is_inconclusive(self, paced: Paced, accepted: Project) -> None:
        paced.cached_tokens = 2
        accepted.run("-k", "speed and max").assert_outcomes(passed=1, warnings=1)
        (verdict,) = cells(accepted)["speed[decode_heavy-max]"]["speed"]["verdicts"]
        assert verdict["reasons"] == ["40 prompt tokens came from the prefix cache, which was flushed"]

    def test_a_scenario_missing_from_the_record_fails(self, accepted: Project) -> None:
        other = {**SCENARIO, "name": "other"}
        accepted.write(speed={**SPEED, "max_slowdown": "5%", "scenarios": [SCENARIO, other]})
        result = accepted.run("-k", "speed and other")
        result.assert_outcomes(failed=2)
        text = " ".join(result.stdout.str().split())
        assert (
            "the record has no other-1 (it has decode_heavy-1, decode_heavy-max). Record it: pytest" in text
        )

    def test_another_workload_is_not_compared(self, accepted: Project) -> None:
        longer = {**SCENARIO, "output_tokens": 5}
        accepted.write(speed={**SPEED, "max_slowdown": "5%", "scenarios": [longer]})
        result = accepted.run("-k", "speed and max")
        result.assert_outcomes(failed=1)
        assert "was recorded with other requests" in " ".join(result.stdout.str().split())

    def test_another_fingerprint_is_refused_with_two_columns(
        self, accepted: Project, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pytest_quantguard.serving.fingerprint.cpu_model", lambda: "Another CPU")
        accepted.write(speed={**SPEED, "max_slowdown": "5%", "min_speedup_vs_reference": 0.01})
        result = accepted.run("-k", "speed and max")
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["*stored*now", "*cpu *Another CPU"])
        check = cells(accepted)["speed[decode_heavy-max]"]
        assert verdicts(check) == {"accepted": "refused", "reference": "reached"}

    def test_accepting_without_times_keeps_the_record(self, accepted: Project) -> None:
        result = accepted.run("--quantguard-accept", "-m", "not timed")
        assert "The accepted times were kept." in " ".join(result.stdout.str().split())
        accepted.run("-k", "speed").assert_outcomes(passed=2)

    def test_a_record_of_another_schema_fails(
        self, accepted: Project, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pytest_quantguard.baseline.speed_record.SCHEMA_VERSION", 0)
        result = accepted.run("-k", "speed and max")
        result.assert_outcomes(failed=1)
        text = " ".join(result.stdout.str().split())
        assert "has schema version 2; this pytest-quantguard reads 0. A newer version wrote it" in text

    def test_a_damaged_record_fails(self, accepted: Project) -> None:
        (file,) = (accepted.folder / "baseline" / "accepted").glob("*/speed-*.json")
        file.write_bytes(file.read_bytes() + b" ")
        result = accepted.run("-k", "speed and max")
        result.assert_outcomes(failed=1)
        assert "is damaged" in " ".join(result.stdout.str().split())

    def test_an_unreachable_record_fails(self, accepted: Project) -> None:
        (file,) = (accepted.folder / "baseline" / "accepted").glob("*/speed-*.json")
        file.unlink()
        result = accepted.run("-k", "speed and max")
        result.assert_outcomes(failed=1)
        assert "is missing" in " ".join(result.stdout.str().split())


@pytest.mark.parametrize("way", ["interleaved", "in_turn"])
def test_speedup_against_the_reference(paced: Paced, way: str) -> None:
    paced.reference, project = 3.0, paced.project
    rules = {**SPEED, "reference_rounds": way, "levels": ["max"]}
    project.write(speed={**rules, "min_speedup_vs_reference": 2.5})
    project.run("-k", "speed").assert_outcomes(passed=1)
    speed = cells(project)["speed[decode_heavy-max]"]["speed"]
    assert speed["interleaved"] == (way == "interleaved")
    assert len(speed["reference_rounds"]) == 5
    project.write(speed={**rules, "min_speedup_vs_reference": 3.5})
    result = project.run("-k", "speed")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*not fast enough against the reference.", "*reference*duration*>= 3.500x*missed"]
    )


@pytest.mark.parametrize(("way", "status"), [("interleaved", "reached"), ("in_turn", "inconclusive")])
def test_what_slows_both_alike_matters_to_neither(
    paced: Paced, monkeypatch: pytest.MonkeyPatch, way: str, status: str
) -> None:
    crowded = ["other processes took 70% of the processors' time, 0% was idle"]
    monkeypatch.setattr("pytest_quantguard.serving.machine_state.MachineState.crowding", crowded)
    paced.reference, project = 3.0, paced.project
    project.write(
        speed={**SPEED, "levels": ["max"], "reference_rounds": way, "min_speedup_vs_reference": 2.5}
    )
    project.run("-k", "speed")
    assert verdicts(cells(project)["speed[decode_heavy-max]"]) == {"reference": status}


def test_score(paced: Paced) -> None:
    paced.reference, project = 3.0, paced.project
    score = {"weights": {1: 0.5, "max": 0.5}, "min": 1.2}
    project.write(speed={**SPEED, "score": score})
    project.run("-k", "speed").assert_outcomes(passed=3)
    check = cells(project)["speed[score]"]
    speedups = check["extra"]["speedups"]
    assert check["value"] == pytest.approx(0.5 * speedups["1"] + 0.5 * speedups["max"])
    assert check["value"] == pytest.approx(3, rel=0.02)
    project.write(speed={**SPEED, "score": {**score, "min": 100}})
    result = project.run("-k", "speed")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["The composite score is below its bound: *; at least 100 is asked for."])
    result = project.run("-k", "speed and score")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["The score needs the times of speed?decode_heavy-1?, which was not timed*"])


def test_failed_requests_fail_the_check(captured: Project) -> None:
    asked = []

    def short(body: dict[str, Any]) -> Iterator[bytes]:
        asked.append(body)
        body["sampling_params"]["max_new_tokens"] -= 1
        return stream_answer(body)

    captured.candidate.streams = short
    captured.write(speed={**SPEED, "ttft_p99_ms": {"max": 1e5}})
    result = captured.run("-k", "speed and max")
    result.assert_outcomes(failed=1)
    text = " ".join(result.stdout.str().split())
    assert "requests failed" in text
    assert "4 of 4 requests failed in a round; 0 may (speed.allowed_errors)" in text
    assert "3 of 4 tokens came" in text
    assert len(asked) == 4, "no further round is sent"


@pytest.mark.parametrize("way", ["interleaved", "in_turn"])
def test_a_reference_that_fails_is_not_timed_to_the_end(captured: Project, way: str) -> None:
    """Its first round with errors is the last, of warm-up or timed: each may take as long as a stall may."""
    asked = []

    def broken(body: dict[str, Any]) -> Iterator[bytes]:
        asked.append(body)
        yield b"data: "

    captured.reference.streams = broken
    speed = {**SPEED, "levels": ["max"], "reference_rounds": way, "min_speedup_vs_reference": 1.3}
    for warmup_rounds in (0, 3):
        asked.clear()
        captured.write(speed={**speed, "warmup_rounds": warmup_rounds})
        captured.run("-k", "speed").assert_outcomes(failed=1)
        assert len(asked) == SCENARIO["requests"], "one round"
        assert verdicts(cells(captured)["speed[decode_heavy-max]"]) == {"reference": "refused"}


def test_a_few_errors_may_be_allowed(captured: Project) -> None:
    """The first prompt always fails; the figures are those of the others."""
    first: list[int] = []

    def mostly(body: dict[str, Any]) -> Iterator[bytes]:
        first.append(body["input_ids"][0])
        return iter([b"data: [DONE]\n\n"]) if body["input_ids"][0] == first[0] else stream_answer(body)

    captured.candidate.streams = mostly
    captured.write(speed={**SPEED, "allowed_errors": 1, "levels": [1], "ttft_p99_ms": {"max": 1e5}})
    captured.run("-k", "speed").assert_outcomes(passed=1)
    speed = cells(captured)["speed[decode_heavy-1]"]["speed"]
    assert (speed["errors"], speed["rounds"]) == (1, 5)
    assert speed["error_examples"] == ["0 of 4 tokens came, finish_reason None"]
    for rate, seconds in zip(
        speed["by_round"]["output_throughput"], speed["by_round"]["duration"], strict=True
    ):
        assert rate * seconds == pytest.approx(12)


def test_benchmark_disable_skips_and_says_so(captured: Project) -> None:
    captured.write(speed=SPEED)
    captured.run("-k", "speed", "--benchmark-disable", "-rs").assert_outcomes(skipped=2)
    assert captured.result()["verdict"] == "incomplete"


def test_without_pytest_benchmark_it_is_an_error(captured: Project) -> None:
    captured.write(speed=SPEED)
    result = captured.run("-k", "speed", "-p", "no:benchmark")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["Timing needs pytest-benchmark, which is switched off*"])


def test_pytest_benchmarks_own_storage_and_comparison_work(paced: Paced) -> None:
    project = paced.project
    project.write(speed={**SPEED, "levels": ["max"]})
    project.run("-k", "speed", "--benchmark-save=first").assert_outcomes(passed=1)
    assert list(project.folder.glob(".benchmarks/*/0001_first.json"))
    project.run("-k", "speed").stdout.no_fnmatch_line("*Outliers*")
    result = project.run("-k", "speed", "--benchmark-compare=0001", "--benchmark-group-by=group")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["*benchmark 'toy: decode_heavy': 2 tests*", "speed?decode_heavy-max? (0001_first)*"]
    )


def test_benchmark_only_runs_the_timed_checks(captured: Project) -> None:
    captured.write(speed=SPEED)
    result = captured.run("--benchmark-only")
    assert result.parseoutcomes()["passed"] == 2


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        ({**SCENARIO, "requests": 60}, "only 52 prompts can begin differently"),
        (
            {**SCENARIO, "output_tokens": 1000},
            "has a request of 1008 tokens, prompt and answer; the server's context is 512",
        ),
        ({"kind": "replay", "file": "nowhere.jsonl"}, "There is no file"),
    ],
)
def test_what_cannot_be_timed_is_an_error(captured: Project, scenario: dict[str, Any], said: str) -> None:
    captured.write(speed={**SPEED, "scenarios": [scenario]})
    result = captured.run("-k", "speed and max")
    result.assert_outcomes(errors=1)
    assert said in " ".join(result.stdout.str().split())


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (
            {"max_slowdown": "5%", "max_scatter": 1e-9},
            "Not accepted: the rounds of speed[decode_heavy-max] scatter by",
        ),
        ({"p99_ttft_ms": {"max": 1}}, "Not accepted: speed[decode_heavy-max] failed: p99_ttft_ms"),
        (
            {"p99_ttft_ms": {"max": 1}, "max_scatter": 1e-9},
            "Not accepted: speed[decode_heavy-max] proves nothing: p99_ttft_ms",
        ),
        ({"rounds": 4}, "No times were accepted: they need 5 rounds (speed.rounds)."),
    ],
)
def test_times_that_are_no_record(paced: Paced, rules: dict[str, Any], said: str) -> None:
    paced.project.write(speed={**SPEED, "levels": ["max"], **rules})
    text = " ".join(paced.project.run("--quantguard-accept").stdout.str().split())
    assert said in text
    assert not list((paced.project.folder / "baseline").glob("accepted/*/speed-*.json"))


def test_an_older_record_is_not_lost_unseen(paced: Paced, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of another schema is neither kept nor dropped without times, and replaced aloud with times."""
    project = paced.project
    project.write(speed={**SPEED, "levels": ["max"]})
    assert project.run("--quantguard-accept").ret == 0
    monkeypatch.setattr("pytest_quantguard.baseline.speed_record.SCHEMA_VERSION", 3)
    result = project.run("--quantguard-accept", "-m", "not timed")
    result.stdout.fnmatch_lines(["The speed record has schema version 2; this pytest-quantguard reads 3.*"])
    assert len(list((project.folder / "baseline").glob("accepted/*/speed-*.json"))) == 1
    result = project.run("--quantguard-accept")
    assert "the older times were replaced: The speed record has schema version 2" in " ".join(
        result.stdout.str().split()
    )
