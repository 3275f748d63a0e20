"""`quantguard selftest` on a real emulator of a tiny model: what is caught, by what, and what is said."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from pytest_quantguard.cli import main
from pytest_quantguard.config_file import load_config
from pytest_quantguard.errors import BaselineError, ConfigError
from pytest_quantguard.gate.accept import accept_run
from pytest_quantguard.gate.capture import record_baseline
from pytest_quantguard.gate.trial import Trial, TrialOptions
from pytest_quantguard.selftest.bench import Bench, judge_stages
from pytest_quantguard.selftest.plan import plan_selftest
from pytest_quantguard.selftest.report import render_markdown, render_text
from pytest_quantguard.selftest.results import FaultResult, SelftestResult
from pytest_quantguard.selftest.run import SelftestOptions, run_selftest
from pytest_quantguard.serving.ports import listener_of
from tests.selftest.models import tiny_config, write_config

TRIED = (
    "global_scale_missing",
    "nan_at_batch",
    "decode_gain:gain=0.5",
    "cached_page_stale",
    "chunk_kv_unscaled",
    "global_scale_drift:percent=25",
    "kv_scale_one",
    "nibble_swap",
    "runaway",
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the baseline of the tiny model."""
    folder = tmp_path_factory.mktemp("selftest")
    path = write_config(folder, tiny_config())
    record_baseline(Trial(load_config(path), path, TrialOptions(folder / "out"), lambda _: None))
    return folder


@pytest.fixture
def project(recorded: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    return tmp_path


def attempt(folder: Path, config: dict[str, Any], **options: Any) -> SelftestResult:
    path = write_config(folder, config)
    asked = SelftestOptions(output=folder / "selftest", **options)
    return run_selftest(load_config(path), path, asked, lambda _: None)


@pytest.fixture(scope="module")
def result(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> SelftestResult:
    """One self-test of a good gate with a few faults of each kind."""
    folder = tmp_path_factory.mktemp("tested")
    shutil.copytree(recorded, folder, dirs_exist_ok=True)
    config = tiny_config()
    config["self_consistency"] = {"warm_cache": {"max_increase": "5%", "decision": "point"}, "batch": None}
    return attempt(folder, config, faults=TRIED, prompts=4, clean_runs=3)


def fault(result: SelftestResult, name: str) -> FaultResult:
    return next(found for found in result.faults if found.name == name)


def test_no_false_alarm(result: SelftestResult) -> None:
    assert [run.alarms for run in result.clean] == [[], [], []]
    assert [run.order for run in result.clean] == ["as in the suite", "as in the suite", "shuffled by seed 1"]
    # Without an accepted run, with one, and in another order, which a divergence from it cannot stand.
    counts = [run.checks for run in result.clean]
    assert counts[1] - counts[0] == 4
    assert counts[2] == counts[0]
    assert result.plan.accepted_run == "made from the clean candidate"


def test_catastrophic_faults_are_dropped_once_they_are_certain(result: SelftestResult) -> None:
    missing = fault(result, "global_scale_missing")
    assert (missing.status, missing.first_check) == ("caught", "accuracy[prefill-bs1-kl_mean]")
    assert missing.kinds == {
        "server": "missed",
        "validity": "missed",
        "accuracy": "caught",
        "self_consistency": "not_measured",
        "drift": "caught",
    }
    assert not missing.complete
    assert missing.effect is not None
    assert missing.effect.kl_faulty > missing.effect.kl_clean
    assert missing.first_message is not None
    assert missing.first_message.startswith("prefill at batch size 1: kl_mean is")


def test_a_fault_shows_first_where_it_sets_in(result: SelftestResult) -> None:
    nan = fault(result, "nan_at_batch")
    assert (nan.status, nan.first_check) == ("caught", "validity[decode-bs3]")
    assert nan.kinds["drift"] == "unusable"
    gain = fault(result, "decode_gain")
    assert gain.first_check == "drift[decode-bs1-divergence-kl_mean]"
    assert gain.complete
    stale = fault(result, "cached_page_stale")
    assert stale.kinds["self_consistency"] == "caught"
    assert stale.kinds["drift"] == "missed"
    assert stale.first_check == "self_consistency[prefill-bs1-warm_cache]"


def test_the_chunks_are_small_enough_for_faults_of_chunked_prefill(result: SelftestResult) -> None:
    assert result.plan.chunked_prefill_size == 32
    assert any("prefills 32 tokens at a time" in note for note in result.plan.notes)
    assert fault(result, "chunk_kv_unscaled").status == "caught"


def test_a_subtle_fault_is_seen_by_drift_alone(result: SelftestResult) -> None:
    drift = fault(result, "global_scale_drift")
    assert drift.kinds["drift"] == "caught"
    assert {drift.kinds[kind] for kind in ("validity", "accuracy", "self_consistency")} == {"missed"}
    assert drift.effect is not None
    assert drift.effect.identical_share < 0.5


def test_what_is_missed_or_not_tried_has_a_reason(result: SelftestResult) -> None:
    harmless = fault(result, "kv_scale_one")
    assert (harmless.status, harmless.severity) == ("missed", "none")
    assert harmless.effect is not None
    assert harmless.effect.identical_share == 1
    assert harmless.advice == "it changes no answer: harmless with these parameters"
    runaway = fault(result, "runaway")
    assert runaway.status == "not_tried"
    assert "generated text" in (runaway.advice or "")
    assert result.passed


def test_the_table(result: SelftestResult) -> None:
    text = "\n".join(render_text(result, 160))
    lines = text.splitlines()
    narrow = render_text(result, 80)
    assert max(map(len, narrow)) <= 80
    at = next(number for number, line in enumerate(narrow) if line.startswith("nan_at_batch"))
    assert narrow[at].split()[1:] == ["CAUGHT", "refused", "refused", "refused"]
    assert narrow[at + 1].startswith("    catastrophic: validity[")
    header = next(line for line in lines if line.startswith("fault "))
    row = next(line for line in lines if line.startswith("nan_at_batch"))
    assert [name for name in header.split() if name in ("validity", "budget", "self", "drift")] == [
        "validity", "budget", "self", "drift"]  # fmt: skip
    assert row.split()[1:6] == ["catastrophic", "CAUGHT", "refused", "refused", "refused"]
    assert "false alarms: 0 in 3 clean runs" in text
    said = fault(result, "nan_at_batch").diagnosis[0]
    assert "decode from batch size 3 on" in said
    (diagnosis,) = [line for line in lines if line.startswith("  nan_at_batch: ")]
    assert said.startswith(diagnosis.removeprefix("  nan_at_batch: ").removesuffix(" ..."))
    assert lines[-1] == "tiny: selftest PASSED"
    assert (
        "4 of 6 prompts, 32 positions in each cell: prefill-bs1, prefill-bs3, decode-bs1, decode-bs3." in text
    )
    markdown = render_markdown(result)
    table = [line for line in markdown if line.startswith("| ") and "nan_at_batch" in line]
    assert len(table) == 1
    assert table[0].count("|") == markdown[[line[:7] for line in markdown].index("| fault")].count("|")


def test_a_marked_fault_that_is_missed_fails(project: Path) -> None:
    config = tiny_config()
    config["accuracy"] = {"kl_mean": {"max": 30}}
    config["selftest"] = {
        "must_catch": ["scale_round_up"],
        "faults": ["scale_round_up", "double_bos"],
        "clean_runs": 1,
        "prompts": 3,
    }
    result = attempt(project, config)
    found = fault(result, "scale_round_up")
    assert [one.name for one in result.must_catch_missed] == ["scale_round_up"]
    assert not result.passed
    assert "accuracy.drift with an accepted run would see it" in (found.advice or "")
    assert "must be caught and was not: scale_round_up" in "\n".join(render_text(result))
    assert result.plan.accepted_run == "not asked for"
    assert fault(result, "double_bos").status == "caught"


def test_a_clean_alarm_fails_and_catches_nothing(project: Path) -> None:
    config = tiny_config()
    config["accuracy"] = {"kl_mean": {"max": 0.001}}
    result = attempt(project, config, faults=("scale_round_up",), prompts=3, clean_runs=1)
    assert len(result.alarms) == 4
    assert result.alarms[0].id == "accuracy[prefill-bs1-kl_mean]"
    assert fault(result, "scale_round_up").status == "missed", "these checks fail without the fault too"
    assert not result.passed
    assert "4 FALSE ALARMS" in "\n".join(render_text(result))


@pytest.mark.slow
def test_a_stored_accepted_run_is_used_where_nothing_is_reduced(project: Path) -> None:
    config = tiny_config()
    config["candidate"]["server_args"] = {"chunked_prefill_size": 64}
    config["accuracy"]["drift"]["kl_mean"] = {"max_increase": "10%"}
    path = write_config(project, config)
    trial = Trial(load_config(path), path, TrialOptions(project / "out"), lambda _: None)
    with contextlib.closing(trial):
        accept_run(trial)
    result = attempt(
        project, config, faults=("global_scale_drift:percent=25",), prompts=0, score_tokens=0, clean_runs=2
    )
    assert result.plan.accepted_run == "stored"
    assert result.plan.chunked_prefill_size is None
    assert result.clean[0].checks == result.clean[1].checks
    assert result.alarms == []
    assert fault(result, "global_scale_drift").status == "caught"


def test_the_command_prints_json_and_its_verdict(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config()
    config["suite"]["batch_sizes"] = [1]
    path = str(write_config(project, config))
    words = ["selftest", path, "--output", str(project / "out"), "--prompts", "2", "--clean-runs", "1"]
    assert main([*words, "--faults", "nibble_swap:module=*.down_proj,logprob_sentinel", "--json"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert [one["specification"] for one in found["faults"]] == [
        "nibble_swap:module=*.down_proj",
        "logprob_sentinel",
    ]
    assert found["passed"] is True
    assert found["schema_version"] == 1
    assert (project / "out" / "tiny" / "selftest" / "server.log").is_file()
    assert "clean run 1 of 1: no alarm" in shown.err
    assert "fault 2 of 2: logprob_sentinel: caught" in shown.err


def test_a_fault_that_kills_the_server_is_caught_and_the_next_gets_another(project: Path) -> None:
    path = write_config(project, tiny_config())
    config = load_config(path)
    trial = Trial(config, path, TrialOptions(project), lambda _: None)
    plan = plan_selftest(config, trial.baseline(), prompts=2, score_tokens=2)
    said: list[str] = []
    with Bench(plan, path, project / "selftest", said.append) as bench:
        trial = bench.trial(["nibble_swap"])
        first = trial.server()
        listener = listener_of(int(first.url.rpartition(":")[2]))
        assert listener is not None
        os.kill(listener.pid, signal.SIGKILL)
        results = [result for stage in judge_stages(trial, plan.stages()) for result in stage]
        assert {result.extra["error"] for result in results if result.outcome == "error"} == {
            "ServerDiedError"
        }
        assert sum(result.outcome == "error" for result in results) == len(results) - 1
        again = bench.trial()
        assert again.server().url != first.url
        assert next(judge_stages(again, plan.stages()))[0].outcome == "passed"
    assert any("died of the last fault" in line for line in said)


class TestBadInput:
    def test_a_server_without_faults(self, project: Path) -> None:
        config = tiny_config(candidate={"backend": "attach", "url": "http://127.0.0.1:9"})
        with pytest.raises(ConfigError, match=r"candidate.backend is 'attach'.*in the emulator only"):
            attempt(project, config)

    def test_a_candidate_that_is_faulty_itself(self, project: Path) -> None:
        config = tiny_config()
        config["candidate"]["faults"] = ["nibble_swap"]
        with pytest.raises(ConfigError, match="the candidate is not clean"):
            attempt(project, config)

    def test_unknown_fault(self, project: Path) -> None:
        with pytest.raises(ConfigError, match=r"unknown fault 'nible_swap' \(did you mean 'nibble_swap'\?\)"):
            attempt(project, tiny_config(), faults=("nible_swap",))

    def test_unknown_mark(self, project: Path) -> None:
        config = tiny_config(selftest={"must_catch": ["catastrofic"]})
        with pytest.raises(
            ConfigError, match=r"selftest.must_catch: unknown fault 'catastrofic'.*catastrophic"
        ):
            attempt(project, config)

    def test_no_baseline(self, tmp_path: Path) -> None:
        with pytest.raises(BaselineError, match="baseline"):
            attempt(tmp_path, tiny_config())

    @pytest.mark.parametrize(
        ("words", "message"),
        [(["--clean-runs", "0"], "expected a whole number above 0"), (["--prompts", "few"], "found 'few'")],
    )
    def test_numbers(self, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["selftest", "gate.yaml", *words])
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
