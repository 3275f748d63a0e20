"""The `quantguard` command: success, bad input, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_quantguard.cli import COMMANDS, main
from pytest_quantguard.config_file import json_schema
from tests.plugin.conftest import Project

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


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


def test_schema_prints_and_checks(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()
    assert main(["schema", "gate.yaml"]) == 0
    assert capsys.readouterr().out == "gate.yaml: toy is right\n"
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
    good = str(GOLDEN / "modelopt-nvfp4-tiny")
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
    assert "--quantguard-accept --quantguard-push" in " ".join(capfd.readouterr().out.split())
    assert not (store / "base" / "accepted").exists()
    assert main(["accept", "gate.yaml", "--push"]) == 0
    assert len(list((store / "base" / "accepted").iterdir())) == 1
    capfd.readouterr()
    assert main(["run", "gate.yaml"]) == 0
    assert "drift kl_mean" in capfd.readouterr().out


def test_push_needs_a_url(captured: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capture", "gate.yaml", "--push"]) == 2
    assert "there is nowhere to push to" in capsys.readouterr().err
    result = captured.run("--quantguard-push")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
