"""The `quantguard` command: success, bad input, JSON and exit codes."""

from __future__ import annotations

import functools
import http.server
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pytest_quantguard.cli import COMMANDS, main
from pytest_quantguard.config_file import load_config
from pytest_quantguard.config_schema import json_schema
from tests.plugin.conftest import Project

ACCURACY = ("-k", "accuracy and kl_mean")
MODELS = Path(__file__).parents[1] / "data" / "models"


@pytest.mark.parametrize("name", [module.NAME for module in COMMANDS])
def test_every_command_has_help_with_exit_codes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert "exit codes:" in capsys.readouterr().out


def test_unknown_command_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["captur"])
    assert caught.value.code == 2
    assert "invalid choice: 'captur'" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["schema"], ["schema", "--markdown"], ["history", "."]], ids=" ".join)
@pytest.mark.parametrize("sink", ["a full disk", "a reader that left"])
def test_output_that_cannot_be_written_is_no_traceback(command: list[str], sink: str, tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").touch()
    reader, writer = os.pipe()
    os.close(reader)
    with Path("/dev/full").open("wb") as full, os.fdopen(writer, "wb", buffering=0) as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "pytest_quantguard.cli", *command],
            stdout=full if sink == "a full disk" else pipe,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            timeout=60,
        )
    said = done.stderr.decode()
    assert done.returncode == 3, said
    assert "Traceback" not in said
    assert ("No space left on device" in said) == (sink == "a full disk")


def test_schema_prints_and_checks(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()
    assert main(["schema", "gate.yaml"]) == 0
    assert capsys.readouterr().out == "gate.yaml: toy is valid\n"
    project.write(accuracy={"kl_maen": {"max": 1}})
    assert main(["schema", "gate.yaml"]) == 2
    assert "did you mean 'kl_mean'?" in capsys.readouterr().err


def test_capture(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capture", "gate.yaml", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["baseline"] == str(project.folder / "baseline")
    assert written["manifest"]["suite"]["prompt_count"] == 8
    assert written["manifest"]["suite"]["prompts"] == "prompts.jsonl", "no path of this machine is stored"
    assert (project.folder / "baseline" / "manifest.json").is_file()


def test_capture_that_cannot_be_done(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.write(reference=...)
    assert main(["capture", "gate.yaml"]) == 2
    assert "there is no `reference`" in capsys.readouterr().err
    project.write(reference={"backend": "attach", "url": "http://127.0.0.1:9", "startup_timeout": 0.1})
    assert main(["capture", "gate.yaml"]) == 3
    error = capsys.readouterr().err
    assert "127.0.0.1:9" in error
    assert "Traceback" not in error
    assert not (project.folder / "baseline").exists()
    assert main(["capture", "none.yaml"]) == 2


def test_run_returns_the_verdict_and_prints_results(
    captured: Project, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "gate.yaml", "--json", "--", "-k", "accuracy or server"]) == 0
    shown = capfd.readouterr()
    [result] = json.loads(shown.out)
    assert (result["name"], result["verdict"], len(result["checks"])) == ("toy", "passed", 9)
    assert "toy: PASSED" in shown.err
    captured.candidate.noise = 1.0
    assert main(["run", "gate.yaml"]) == 1
    assert main(["run", "none.yaml"]) == 2


def test_tests_that_cannot_be_collected_are_no_interrupt(
    captured: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured.pytester.makepyfile(test_broken="import nowhere_to_be_found\n")
    assert main(["run", "gate.yaml", "--", "test_broken.py", "-k", "server"]) == 2

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pytest_quantguard.gate.trial.Trial.server", stop)
    assert main(["run", "gate.yaml", "--", "-k", "server"]) == 130


def test_accept_stores_and_run_sees_drift(captured: Project) -> None:
    captured.write(accuracy={"kl_mean": {"max": 1}, "drift": {"kl_mean": {"max_increase": "5%"}}})
    assert main(["accept", "gate.yaml"]) == 0
    assert list((captured.folder / "baseline" / "accepted").iterdir())
    assert main(["run", "gate.yaml", "--", "-k", "drift"]) == 0
    captured.candidate.noise = 0.15
    assert main(["run", "gate.yaml", "--", "-k", "drift"]) == 1


def test_dashes_have_no_place_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["schema", "--", "-k", "x"])
    assert "'schema' passes nothing to pytest" in capsys.readouterr().err


def test_check_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = str(MODELS / "modelopt-nvfp4-tiny")
    assert main(["check-checkpoint", good]) in (0, 1)
    assert "errors" in capsys.readouterr().out
    main(["check-checkpoint", good, "--json"])
    assert json.loads(capsys.readouterr().out)["schema_version"] == 1
    assert main(["check-checkpoint", str(tmp_path)]) == 3
    assert "has no config.json" in capsys.readouterr().err


def test_emulate_refuses_other_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["emulate", "--model", "x", "--host", "0.0.0.0"])
    assert caught.value.code == 2
    assert "127.0.0.1" in capsys.readouterr().err


def test_baseline_at_a_url(
    project: Project, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Push, gate from the copy, accept with and without --push, gate with the store gone."""
    monkeypatch.setenv("QUANTGUARD_CACHE", str(tmp_path / "cache"))
    store = tmp_path / "store"
    bounds = {"kl_mean": {"max": 1}, "drift": {"kl_mean": {"max_increase": "5%"}}}
    project.write(baseline=(store / "base").as_uri(), accuracy=bounds)
    assert main(["capture", "gate.yaml"]) == 2
    assert "quantguard capture gate.yaml --push" in capfd.readouterr().err
    assert project.reference.requests == 0, "nothing is measured that could not be stored"
    assert main(["capture", "gate.yaml", "--push", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["baseline"] == (store / "base").as_uri()
    assert (store / "base" / "manifest.json").is_file()
    assert main(["accept", "gate.yaml"]) == 1
    said = " ".join(capfd.readouterr().out.replace("\\\n", "").split())
    assert "--quantguard-accept --quantguard-push" in said, "a command that goes on over lines is one command"
    assert not (store / "base" / "accepted").exists()
    assert main(["accept", "gate.yaml", "--push"]) == 0
    assert len(list((store / "base" / "accepted").iterdir())) == 1
    capfd.readouterr()
    assert main(["run", "gate.yaml", "--", "-k", "drift and bs1"]) == 0
    assert "drift kl_mean" in capfd.readouterr().out


def test_push_needs_a_url(captured: Project, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--generation"]):
        assert main(["capture", "gate.yaml", "--push", *words]) == 2
        assert "there is nowhere to push to" in capsys.readouterr().err
    result = captured.run("--quantguard-push")
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_suggest_runs_the_candidate(captured: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["suggest", "gate.yaml", "--write", "tight.yaml"]) == 0
    assert "written to tight.yaml" in capsys.readouterr().err
    tight = load_config(captured.folder / "tight.yaml")
    assert set(tight.accuracy.bounds) == {"kl_mean", "agreement"}
    assert main(["run", "tight.yaml", "--", *ACCURACY]) == 0, "what was measured keeps the proposed bounds"
    captured.candidate.noise = 0.2
    assert main(["run", "tight.yaml", "--", *ACCURACY]) == 1


def test_suggest_takes_results(captured: Project, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "gate.yaml", "--", *ACCURACY]) == 0
    captured.candidate.requests = 0
    capfd.readouterr()
    result = ".quantguard/toy"
    assert main(["suggest", "gate.yaml", "--from", result, result, "--metrics", "kl_mean", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert captured.candidate.requests == 0
    assert (found["measurements"], found["cells"]) == (2, 4)
    [suggestion] = found["suggestions"]
    worst = max(cell["metrics"]["kl_mean"] for cell in captured.result()["cells"])
    assert suggestion["worst"] == worst
    assert 1.25 * worst <= suggestion["bound"] <= 1.25 * worst * 1.1
    assert (suggestion["spread"], suggestion["noise_floor"]) == (0, 0)


class Terminal(io.StringIO):
    """A stream at which somebody sits."""

    def isatty(self) -> bool:
        return True


def test_suggest_loosens_nothing_unless_told(
    captured: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["run", "gate.yaml", "--", *ACCURACY]) == 0
    tight = captured.write(accuracy={"kl_mean": {"max": 0.0001}, "agreement": {"min": 0.5}})
    before = tight.read_text(encoding="utf-8")
    capsys.readouterr()
    words = ["suggest", "gate.yaml", "--from", ".quantguard/toy"]
    assert main([*words, "--apply"]) == 2
    said = capsys.readouterr().err
    assert "accuracy.kl_mean    max  0.0001 -> 0.0" in said
    assert "LOOSER" in said
    assert "nothing was written, since accuracy.kl_mean would become looser" in said
    assert tight.read_text(encoding="utf-8") == before
    for answer, code in (("\n", 2), ("", 2), ("y\n", 0)):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdin", Terminal(answer))
            patch.setattr("sys.stderr", Terminal())
            assert main([*words, "--apply"]) == code, answer
        assert (tight.read_text(encoding="utf-8") == before) == (code == 2)
    tight.write_text(before, encoding="utf-8")
    assert main([*words, "--apply", "--allow-looser"]) == 0
    assert load_config(tight).accuracy.bounds["kl_mean"].max > 0.0001  # type: ignore[operator]
    assert main([*words, "--apply"]) == 0, "nothing becomes looser any more"
    assert main([*words, "--allow-looser"]) == 2
    assert "--allow-looser goes with --apply" in capsys.readouterr().err


def test_suggest_refuses(captured: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["suggest", "gate.yaml", "--metrics", "kl_maen"]) == 2
    assert "kl_maen unknown. Known are: kl_mean," in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["suggest", "gate.yaml", "--margin", "0%"])
    assert "expected a share such as 25%" in capsys.readouterr().err
    assert main(["suggest", "gate.yaml", "--from", "nowhere"]) == 3
    assert "There is no result at nowhere" in capsys.readouterr().err
    assert main(["run", "gate.yaml", "--", "-k", "accuracy and prefill-bs1"]) == 0
    assert main(["suggest", "gate.yaml", "--from", ".quantguard/toy"]) == 3
    assert (
        "no measurement of prefill-bs4, decode-bs1, decode-bs4: run the whole gate" in capsys.readouterr().err
    )
    captured.write("other.yaml", name="other")
    assert main(["suggest", "other.yaml", "--from", ".quantguard/toy"]) == 3
    assert "is of the config 'toy', not of 'other'" in capsys.readouterr().err


def test_suggest_needs_answers_that_can_be_used(
    captured: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    captured.candidate.nan = True
    assert main(["suggest", "gate.yaml"]) == 3
    assert "non-finite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code"), [(["-k", "no_such_check"], 3), (["--collect-only"], 0), (["--no-such-option"], 2)]
)
def test_run_prints_no_result_of_an_earlier_run(
    words: list[str], code: int, captured: Project, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing ran, so nothing passed."""
    assert (captured.folder / "baseline").is_dir()
    assert main(["run", "gate.yaml", "--", *ACCURACY]) == 0
    capfd.readouterr()
    assert main(["run", "gate.yaml", "--json", "--", *words]) == code
    shown = capfd.readouterr()
    assert json.loads(shown.out) == []
    assert "toy: this run wrote no result" in shown.err


def test_compare_results(captured: Project, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "gate.yaml", "--", *ACCURACY]) == 0
    captured.candidate.noise = 0.8
    assert main(["run", "gate.yaml", "--output", "after", "--", *ACCURACY]) == 1
    capfd.readouterr()
    assert main(["compare", ".quantguard/toy", "after/toy/result.json", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    figure = next(f for f in found["figures"] if (f["name"], f["cell"]) == ("kl_mean", "prefill-bs1"))
    assert figure["worse"] is True
    assert figure["change"] == pytest.approx(figure["second"] / figure["first"] - 1)
    assert ["accuracy[prefill-bs1-kl_mean]", "passed", "failed"] in found["verdicts"]
    assert found["differences"] == []
    assert main(["compare", ".quantguard/toy", "after/toy", "--metrics", "kl_p99"]) == 0
    shown = capfd.readouterr().out
    assert "kl_p99 decode-bs4" in shown
    assert "kl_mean decode-bs4 " not in shown
    assert "  accuracy[prefill-bs1-kl_mean]: passed -> failed" in shown


def test_compare_folds_equal_figures_and_keeps_zeros_at_the_end(
    captured: Project, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "gate.yaml", "--", *ACCURACY]) == 0
    text = (captured.folder / ".quantguard/toy/result.json").read_text(encoding="utf-8")
    sides = []
    for name, values in (("a", (0.5, 12.3, 0.25)), ("b", (0.75, 12.3, 0.25))):
        result = json.loads(text)
        result["cells"] = result["cells"][:1]
        result["cells"][0]["metrics"] = dict(zip(("kl_mean", "kl_max", "agreement"), values, strict=True))
        (captured.folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
        sides.append(f"{name}.json")
    capfd.readouterr()
    words = ["compare", *sides, "--metrics", "kl_mean,kl_max,agreement"]
    assert main(words) == 0
    shown = capfd.readouterr().out
    assert "kl_mean prefill-bs1      0.5000     0.7500    +50.0% worse" in shown
    assert "2 figures are the same in both; --all shows them" in shown
    assert "kl_max" not in shown
    assert main([*words, "--all"]) == 0
    shown = capfd.readouterr().out
    assert [line for line in shown.splitlines() if "bs1" in line and "0.2500     0.2500" in line]
    assert [line for line in shown.splitlines() if "kl_max" in line and "12.30      12.30" in line]
    assert "the same in both" not in shown
    assert main(["compare", sides[0], sides[0], "--metrics", "kl_mean"]) == 0
    assert "1 figure is the same in both; --all shows it" in capfd.readouterr().out


def test_compare_shows_hostile_text_escaped(captured: Project, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "gate.yaml", "--", *ACCURACY]) == 0
    text = (captured.folder / ".quantguard/toy/result.json").read_text(encoding="utf-8")
    result = json.loads(text)
    hostile = "<b>\x1b[31m\u202e\n::error::x"
    result["name"] = hostile
    result["config"]["suite"] = hostile
    result["environment"][hostile] = hostile
    result["checks"][0]["id"] = hostile
    (captured.folder / "hostile.json").write_text(json.dumps(result), encoding="utf-8")
    capfd.readouterr()
    assert main(["compare", ".quantguard/toy", "hostile.json"]) == 0
    shown = capfd.readouterr().out
    assert not set("\x1b\u202e") & set(shown)
    assert not [line for line in shown.splitlines() if line.strip().startswith("::")]
    assert "\\x1b[31m\\u202e" in shown


def test_compare_recordings(captured: Project, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["accept", "gate.yaml"]) == 0
    [accepted] = (captured.folder / "baseline" / "accepted").iterdir()
    capfd.readouterr()
    assert main(["compare", "baseline", str(accepted), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [cell["cell"] for cell in found["cells"]] == [
        "prefill-bs1",
        "prefill-bs4",
        "decode-bs1",
        "decode-bs4",
    ]
    expected = {
        f"{cell['phase']}-bs{cell['batch_size']}": cell["metrics"]["kl_mean"]
        for cell in captured.result()["cells"]
    }
    assert {cell["cell"]: cell["metrics"]["kl_mean"] for cell in found["cells"]} == expected
    assert ["quantization", "not stated", "fp8"] in found["differences"]
    assert main(["compare", "baseline", "baseline"]) == 0
    assert "100.0%" in capfd.readouterr().out


def test_compare_refuses(captured: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "nowhere", "baseline"]) == 3
    assert "There is nothing to compare at nowhere" in capsys.readouterr().err
    (captured.folder / "newer.json").write_text('{"schema_version": 99}', encoding="utf-8")
    assert main(["compare", "newer.json", "newer.json"]) == 3
    assert "schema version 99" in capsys.readouterr().err
    assert main(["compare", "newer.json", "baseline"]) == 3
    assert "two of one kind can be compared" in capsys.readouterr().err
    captured.write(baseline="other", suite={**captured.config["suite"], "score_tokens": 4})
    assert main(["capture", "gate.yaml"]) == 0
    assert main(["compare", "baseline", "other"]) == 3
    error = capsys.readouterr().err
    assert "cannot be compared position by position: these prompts have other tokens or spans" in error
    assert main(["compare", "baseline", "baseline", "--metrics", "x"]) == 2


@pytest.mark.parametrize("name", [module.NAME for module in COMMANDS])
def test_help_fits_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.usefixtures("project")
def test_schema_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "gate.yaml", "--json"]) == 0
    [shown] = json.loads(capsys.readouterr().out)
    assert (shown["name"], shown["suite"]["seed"]) == ("toy", 0), "defaults are filled in"


@pytest.mark.usefixtures("captured")
def test_accept_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["accept", "gate.yaml", "--json"]) == 0
    [result] = json.loads(capfd.readouterr().out)
    assert result["name"] == "toy"
    assert main(["accept", "none.yaml", "--json"]) == 2
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("name", ["capture", "run", "accept", "doctor", "suggest", "selftest", "sensitivity"])
def test_wrong_config_is_told_with_its_line(
    name: str, project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    path = project.write(suite={"batch_size": [1]})
    assert main([name, "gate.yaml"]) == 2
    line = 1 + path.read_text(encoding="utf-8").splitlines().index("  batch_size:")
    error = capsys.readouterr().err
    assert f"gate.yaml:{line}: suite.batch_size: unknown key; did you mean 'batch_sizes'?" in error


def test_offline_copy_is_said_aloud(
    project: Project, recorded: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The terminal and the result say that the baseline may not be the one that is at the URL now."""
    monkeypatch.setenv("QUANTGUARD_CACHE", str(tmp_path / "cache"))
    files = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(recorded.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), files) as store:
        thread = threading.Thread(target=store.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        project.write(baseline=f"http://127.0.0.1:{store.server_port}/{recorded.name}")
        assert project.run(*ACCURACY).ret == 0
        assert project.result()["notes"] == []
        store.shutdown()
        thread.join()
    result = project.run(*ACCURACY)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "quantguard: OFFLINE: http://127.0.0.1:*cannot be reached*",
            "  note       OFFLINE: http://127.0.0.1:*",
        ]
    )
    assert project.result()["notes"][0].startswith("OFFLINE: ")
