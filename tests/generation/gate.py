"""A gate over two scripted servers, with a baseline that can take answers."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pytest_quantguard.config_file import load_config
from pytest_quantguard.gate.capture import record_generation
from pytest_quantguard.gate.judge import judge
from pytest_quantguard.gate.plan import plan_checks
from pytest_quantguard.gate.trial import Trial, TrialOptions
from pytest_quantguard.results import CheckResult
from tests.generation.scripted import Script
from tests.generation.test_asking import COLOURS

BASELINE = Path(__file__).parents[2] / "baselines" / "smollm2-135m-bf16"
LINES = [
    {
        "id": f"q{number}",
        "task": "qa" if number < 6 else "lcx",
        "question": f"q{number}: gold={colour} ?",
        "gold": colour,
    }
    for number, colour in enumerate(COLOURS)
]


@dataclass
class Project:
    """A folder with `gate.yaml`, questions, a baseline without answers, and the servers behind it."""

    folder: Path
    reference: Script
    candidate: Script
    config: dict[str, Any]

    def write(self, **generation: Any) -> Path:
        """Write the config with keys of its section replaced."""
        config = {**self.config, "generation": {**self.config["generation"], **generation}}
        path = self.folder / "gate.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        return path

    def trial(self, progress: list[str] | None = None) -> Trial:
        """A trial of what is written."""
        path = self.folder / "gate.yaml"
        tell = (lambda _: None) if progress is None else progress.append
        return Trial(load_config(path), path, TrialOptions(self.folder / "out"), tell)

    def capture(self, **generation: Any) -> str:
        """Record the reference's answers."""
        self.write(**generation)
        trial = self.trial()
        try:
            return record_generation(trial)
        finally:
            trial.close()

    def judge(self, **generation: Any) -> dict[str, CheckResult]:
        """Every generation check of the config."""
        self.write(**generation)
        trial = self.trial()
        try:
            return {
                check.name: judge(trial, check)
                for check in plan_checks(trial.config)
                if check.kind == "generation"
            }
        finally:
            trial.close()


def without_answers(folder: Path) -> None:
    """A copy of the stored baseline, without the answers that it may hold."""
    shutil.copytree(BASELINE, folder, ignore=shutil.ignore_patterns("accepted", "generation-*"))
    manifest = folder / "manifest.json"
    stored = json.loads(manifest.read_text(encoding="utf-8"))
    stored["files"] = {
        name: file for name, file in stored["files"].items() if not name.startswith("generation-")
    }
    manifest.write_text(json.dumps(stored), encoding="utf-8")


def make_project(folder: Path, reference: tuple[Script, str], candidate: tuple[Script, str]) -> Project:
    """reference, candidate: script and url."""
    (folder / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES), encoding="utf-8")
    without_answers(folder / "baseline")
    config = {
        "version": 1,
        "name": "scripted",
        "reference": {"backend": "attach", "url": reference[1]},
        "candidate": {"backend": "attach", "url": candidate[1]},
        "baseline": "baseline",
        "accuracy": {"kl_mean": {"max": 1}},
        "speed": None,
        "generation": {"prompts": "q.jsonl", "chat_template": False, "max_new_tokens": 200, "concurrency": 2},
    }
    project = Project(folder, reference[0], candidate[0], config)
    project.write()
    return project
