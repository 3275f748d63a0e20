"""A project folder with a gate over two toy servers: the reference and the candidate."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import pytest_quantguard.gate.hooks  # noqa: F401 - once here, not anew in every run inside this process
from pytest_quantguard.config_file import load_config
from pytest_quantguard.gate.capture import record_baseline
from pytest_quantguard.gate.trial import Trial, TrialOptions
from tests.plugin.pacing import Paced
from tests.plugin.toy_server import Toy, serve

WORDS = "the quick brown fox jumps over a lazy dog and then it sleeps a while".split()  # noqa: SIM905
PROMPTS = "".join(
    json.dumps({"id": f"p{i}", "task": "toy", "text": " ".join(WORDS[i : i + 5])}) + "\n" for i in range(8)
)


def toy_config(reference_url: str, candidate_url: str) -> dict[str, Any]:
    """A gate over two toys."""
    return {
        "version": 1,
        "name": "toy",
        "reference": {"backend": "attach", "url": reference_url},
        "candidate": {"backend": "attach", "url": candidate_url, "expect": {"quantization": "fp8"}},
        "baseline": "baseline",
        "suite": {
            "prompts": "prompts.jsonl",
            "score_tokens": 8,
            "top_logprobs": 16,
            "batch_sizes": [1, 4],
            "repeats": 2,
        },
        "accuracy": {"kl_mean": {"max": 0.1}, "agreement": {"min": 0.5}},
        "speed": None,
    }


@dataclass
class Project:
    """A folder with `gate.yaml`, the toys behind it, and a pytest to run in it."""

    pytester: pytest.Pytester
    reference: Toy
    candidate: Toy
    config: dict[str, Any]

    @property
    def folder(self) -> Path:
        return self.pytester.path

    def write(self, file: str = "gate.yaml", /, **changes: Any) -> Path:
        """Write the config with top-level sections replaced or (...) removed."""
        merged = {key: value for key, value in {**self.config, **changes}.items() if value is not ...}
        path = self.folder / file
        path.write_text(yaml.safe_dump(merged, sort_keys=False), encoding="utf-8")
        return path

    def run(self, *arguments: str) -> pytest.RunResult:
        """pytest in this process, with the config."""
        return self.pytester.runpytest("--quantguard-config=gate.yaml", *arguments)

    def capture(self) -> None:
        result = self.run("--quantguard-update-baseline")
        assert result.ret == 0, result.outlines

    def result(self, name: str = "toy") -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(
            (self.folder / ".quantguard" / name / "result.json").read_text(encoding="utf-8")
        )
        return loaded


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The baseline of a toy without noise."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "prompts.jsonl").write_text(PROMPTS, encoding="utf-8")
    with serve(Toy()) as url:
        (folder / "gate.yaml").write_text(yaml.safe_dump(toy_config(url, url)), encoding="utf-8")
        config = load_config(folder / "gate.yaml")
        record_baseline(Trial(config, folder / "gate.yaml", TrialOptions(folder / "out"), lambda _: None))
    return folder / "baseline"


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A project without a baseline."""
    for name in ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    reference, candidate = Toy(), Toy(noise=0.1, quantization="fp8")
    (pytester.path / "prompts.jsonl").write_text(PROMPTS, encoding="utf-8")
    spared = "-p no:cacheprovider -p no:hypothesispytest -p no:anyio --assert=plain"
    pytester.makeini(f"[pytest]\naddopts = {spared}\n")
    with ExitStack() as stack:
        urls = [stack.enter_context(serve(toy)) for toy in (reference, candidate)]
        project = Project(pytester, reference, candidate, toy_config(*urls))
        project.write()
        yield project


@pytest.fixture
def captured(project: Project, recorded: Path) -> Project:
    """A project with its baseline."""
    shutil.copytree(recorded, project.folder / "baseline")
    return project


@pytest.fixture
def paced(captured: Project, monkeypatch: pytest.MonkeyPatch) -> Paced:
    """A project with its baseline, in whose speed checks the machine plays no part."""
    paced = Paced(captured)
    monkeypatch.setattr("pytest_quantguard.measure.load.rounds.run_round", paced.run_round)
    monkeypatch.setattr("pytest_quantguard.serving.machine_state.MachineState.crowding", [])
    return paced
