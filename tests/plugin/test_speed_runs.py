"""Speed records of several runs: adding to them, what is refused, and what verdicts make of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from pytest_quantguard.baseline.speed_record import (
    RecordedRun,
    SpeedRecord,
    read_speed_record,
    write_speed_record,
)
from pytest_quantguard.baseline.store import write_attachment
from pytest_quantguard.cli import main
from tests.plugin.conftest import Project
from tests.plugin.pacing import SCENARIO, SPEED, Paced, cells

RULES: dict[str, Any] = {**SPEED, "levels": ["max"], "max_slowdown": "5%"}
CELL = "decode_heavy-max"
ADD = "--quantguard-add-times"


def accepted_folder(project: Project) -> Path:
    (folder,) = (project.folder / "baseline" / "accepted").iterdir()
    return folder


def record(project: Project) -> SpeedRecord:
    return read_speed_record(accepted_folder(project), command="accept")


def said(result: pytest.RunResult) -> str:
    return " ".join((result.stdout.str() + result.stderr.str()).split())


@pytest.fixture(scope="session")
def held_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the accepted run is kept, once there is one."""
    return tmp_path_factory.mktemp("accepted-run") / "held"


@pytest.fixture
def accepted(paced: Paced, held_runs: Path) -> Paced:
    """Accepted at a pace of 1 s a round; done once, then copied."""
    paced.project.write(speed=RULES)
    folder = paced.project.folder / "baseline" / "accepted"
    if held_runs.exists():
        shutil.copytree(held_runs, folder)
        return paced
    result = paced.project.run("--quantguard-accept")
    assert result.ret == 0, result.outlines
    assert "were accepted, of this run alone. Add others" in said(result)
    shutil.copytree(folder, held_runs)
    paced.rounds = 0
    return paced


def test_runs_are_added_and_widen_the_verdict(accepted: Paced) -> None:
    project = accepted.project
    accepted.candidate = 1.1
    result = project.run("-k", "speed")
    assert "record of 1 run; its noise" in said(result)
    assert "runs differ shows in 3 or more: quantguard accept gate.yaml --add-times" in said(result)
    assert cells(project)[f"speed[{CELL}]"]["speed"]["verdicts"][0]["status"] == "regressed"

    for pace, runs in ((1.06, 2), (0.94, 3)):
        accepted.candidate, accepted.rounds = pace, 0
        result = project.run(ADD)
        result.assert_outcomes(passed=2)
        assert f"which now holds {runs} runs of them; they differ by" in said(result)
        assert accepted.rounds == 1 + 5, "one warm-up round and five that count"
    assert "From 3 runs on" not in said(result)
    assert project.result()["cells"] == [], "nothing but times was measured"
    assert [sorted(run.figures["duration"])[2] for run in record(project).cells[CELL].runs] == pytest.approx(
        [1.0, 1.06, 0.94]
    )

    accepted.candidate = 1.1
    result = project.run("-k", "speed")
    (verdict,) = cells(project)[f"speed[{CELL}]"]["speed"]["verdicts"]
    assert (verdict["status"], verdict["runs"]) == ("inconclusive", 3)
    assert verdict["spread"] == pytest.approx(0.062, abs=0.002)
    assert "record of 3 runs, which differ by 6." in said(result)
    assert "--add-times" not in verdict["sentence"]
    result.stdout.fnmatch_lines(["*3 accepted runs*duration*inconclusive"])
    result.stdout.fnmatch_lines(["*decode_heavy*inconclusive*3 runs, 6.?%*"])


def other_requests(paced: Paced) -> None:
    paced.project.write(speed={**RULES, "scenarios": [{**SCENARIO, "output_tokens": 5}]})


def other_scenario(paced: Paced) -> None:
    paced.project.write(speed={**RULES, "scenarios": [{**SCENARIO, "name": "other"}]})


def few_rounds(paced: Paced) -> None:
    paced.project.write(speed={**SPEED, "levels": ["max"], "rounds": 4})


def no_speed(paced: Paced) -> None:
    paced.project.write(speed=None)


def of_another_schema(paced: Paced) -> None:
    cell = {"workload": "w", "requests": 4, "figures": {"duration": [1.0] * 5}}
    old = {"schema_version": 1, "recorded": "then", "fingerprint": {}, "cells": {CELL: cell}}
    write_attachment(accepted_folder(paced.project), "speed", orjson.dumps(old))


ACCEPT = "pytest --quantguard-config=gate.yaml --quantguard-accept"


@pytest.mark.parametrize(
    ("prepare", "phrases"),
    [
        (other_requests, ["Nothing can be added: decode_heavy-max was recorded with other requests", ACCEPT]),
        (other_scenario, ["Nothing can be added: the record has no other-max", ACCEPT]),
        (few_rounds, ["gate.yaml: speed.rounds is 4; times can be added from 5 rounds on"]),
        (no_speed, ["gate.yaml has no `speed` section"]),
        (
            of_another_schema,
            ["has schema version 1; this pytest-quantguard reads 2. Record it again", ACCEPT],
        ),
    ],
    ids=["requests", "scenario", "rounds", "nothing timed", "schema"],
)
def test_what_cannot_be_added_is_refused_before_it_is_timed(
    accepted: Paced, prepare: Callable[[Paced], None], phrases: list[str]
) -> None:
    prepare(accepted)
    (file,) = accepted_folder(accepted.project).glob("speed-*.json")
    result = accepted.project.run(ADD)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert accepted.rounds == 0
    for phrase in phrases:
        assert phrase in said(result)
    assert list(accepted_folder(accepted.project).glob("speed-*.json")) == [file]


def test_times_of_another_machine_are_not_added(accepted: Paced, monkeypatch: pytest.MonkeyPatch) -> None:
    before = record(accepted.project)
    monkeypatch.setattr("pytest_quantguard.serving.fingerprint.cpu_model", lambda: "Another CPU")
    result = accepted.project.run(ADD)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*stored*now", "*cpu *Another CPU"])
    assert f"or record it here: {ACCEPT}" in said(result)
    assert accepted.rounds == 0
    assert record(accepted.project) == before


def test_without_a_record_nothing_is_added(paced: Paced) -> None:
    paced.project.write(speed=RULES)
    result = paced.project.run(ADD)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "Nothing can be added: There is no accepted speed record in" in said(result)
    assert ACCEPT in said(result)
    assert paced.rounds == 0


@pytest.mark.parametrize(
    ("rules", "crowding", "phrase"),
    [
        ({"p99_ttft_ms": {"max": 1}}, [], "Not added: speed[decode_heavy-max] failed: p99_ttft_ms"),
        ({"max_scatter": 1e-9}, [], "Not added: the rounds of speed[decode_heavy-max] scatter by"),
        ({}, ["others were busy"], "Not added: speed[decode_heavy-max] was disturbed: others were busy."),
    ],
    ids=["failed", "scattered", "disturbed"],
)
def test_a_bad_run_is_not_added(
    accepted: Paced,
    monkeypatch: pytest.MonkeyPatch,
    rules: dict[str, Any],
    crowding: list[str],
    phrase: str,
) -> None:
    before = record(accepted.project)
    monkeypatch.setattr("pytest_quantguard.serving.machine_state.MachineState.crowding", crowding)
    accepted.project.write(speed={**RULES, **rules})
    result = accepted.project.run(ADD)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert phrase in said(result)
    assert record(accepted.project) == before


def test_a_record_that_changed_meanwhile_is_not_overwritten(
    accepted: Paced, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = record(accepted.project)
    other = old.model_copy(
        update={
            "cells": {CELL: old.cells[CELL].with_run(RecordedRun(recorded="", figures={"duration": [1.0]}))}
        }
    )

    def crowding(_: object) -> list[str]:
        """Asked for after the rounds and before anything is stored."""
        write_speed_record(accepted_folder(accepted.project), other)
        return []

    monkeypatch.setattr("pytest_quantguard.serving.machine_state.MachineState.crowding", property(crowding))
    result = accepted.project.run(ADD)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "Not added: the accepted record was changed by somebody else while this run was timed" in said(
        result
    )
    assert record(accepted.project) == other


def test_the_eleventh_run_replaces_the_oldest_and_accepting_starts_anew(accepted: Paced) -> None:
    project, old = accepted.project, record(accepted.project)
    runs = [RecordedRun(recorded=str(number), figures={"duration": [1.0] * 5}) for number in range(10)]
    cell = old.cells[CELL].model_copy(update={"runs": runs})
    write_speed_record(accepted_folder(project), old.model_copy(update={"cells": {CELL: cell}}))
    result = project.run(ADD, "-k", "speed")
    result.assert_outcomes(passed=2)
    assert "now holds 10 runs" in said(result)
    assert f"The oldest run of {CELL} was dropped: 10 are kept." in said(result)
    assert [run.recorded for run in record(project).cells[CELL].runs][:-1] == list("123456789")
    result = project.run("--quantguard-accept")
    assert "of this run alone, in place of 10 runs." in said(result)
    assert len(record(project).cells[CELL].runs) == 1


def test_only_what_is_selected_is_added(accepted: Paced) -> None:
    project = accepted.project
    project.write(speed={**RULES, "levels": [1, "max"]})
    assert project.run("--quantguard-accept").ret == 0
    result = project.run(ADD, "-k", "max or add_times")
    result.assert_outcomes(passed=2)
    assert "Times of 1 scenarios and levels were added" in said(result)
    assert {name: len(cell.runs) for name, cell in record(project).cells.items()} == {
        "decode_heavy-1": 1,
        CELL: 2,
    }
    result = project.run(ADD, "-k", "add_times")
    assert "No times were added: no speed check was timed." in said(result)


def test_the_command_adds_as_many_runs_as_asked(accepted: Paced, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["accept", "gate.yaml", "--add-times", "2"]) == 0
    assert "quantguard: run 2 of 2" in capfd.readouterr().err
    assert len(record(accepted.project).cells[CELL].runs) == 3
    accepted.project.write(speed={**RULES, "max_scatter": 1e-9})
    assert main(["accept", "gate.yaml", "--add-times", "3"]) == 1
    assert "run 2 of 3" not in capfd.readouterr().err, "it stops at the first that cannot be added"


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        (["--add-times", "gate.yaml"], "'gate.yaml' is no number of runs; write CONFIG before --add-times"),
        (["gate.yaml", "--add-times", "0"], "'0' is no number of runs"),
        (["gate.yaml", "--add-times", "--no-times"], "not allowed with argument"),
        (["gate.yaml", "--add-times", "2", "--json"], "--json prints the results of one run"),
    ],
)
def test_wrong_use(words: list[str], phrase: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["accept", *words])
    except SystemExit as stopped:
        code = stopped.code  # type: ignore[assignment]
    assert code == 2
    assert phrase in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_record_at_a_url_is_added_to_with_push(
    paced: Paced, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUANTGUARD_CACHE", str(tmp_path / "cache"))
    project, base = paced.project, tmp_path / "store" / "base"
    project.write(baseline=base.as_uri(), speed=RULES)
    assert main(["capture", "gate.yaml", "--push"]) == 0
    assert project.run("--quantguard-accept", "--quantguard-push").ret == 0
    paced.rounds = 0
    result = project.run(ADD)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "quantguard accept gate.yaml --add-times --push" in said(result)
    assert paced.rounds == 0
    assert project.run(ADD, "--quantguard-push").ret == 0
    (folder,) = (base / "accepted").iterdir()
    assert len(read_speed_record(folder, command="accept").cells[CELL].runs) == 2
