"""A project folder with a gate over two toy servers: the reference and the candidate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import pytest_quantguard.gate.hooks  # noqa: F401 - once here, not anew in every run inside this process
from tests.plugin.toy_server import Toy, serve

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "then",
    "it",
    "sleeps",
    "for",
    "a",
    "while",
    "under",
    "some",
    "old",
    "tree",
]


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

    def write(self, name: str = "gate.yaml", **changes: Any) -> Path:
        """Write the config with top-level sections replaced or (...) removed."""
        merged = {key: value for key, value in {**self.config, **changes}.items() if value is not ...}
        path = self.folder / name
        path.write_text(yaml.safe_dump(merged, sort_keys=False))
        return path

    def run(self, *arguments: str) -> pytest.RunResult:
        """pytest in this process, with the config."""
        return self.pytester.runpytest("--quantguard-config=gate.yaml", *arguments)

    def capture(self) -> None:
        result = self.run("--quantguard-update-baseline")
        assert result.ret == 0, result.outlines

    def result(self, name: str = "toy") -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / ".quantguard" / name / "result.json").read_text())
        return loaded


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    monkeypatch.delenv("CI", raising=False)
    reference, candidate = Toy(), Toy(noise=0.1, quantization="fp8")
    lines = [json.dumps({"id": f"p{i}", "task": "toy", "text": " ".join(WORDS[i : i + 5])}) for i in range(8)]
    (pytester.path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider\n")
    with ExitStack() as stack:
        urls = [stack.enter_context(serve(toy)) for toy in (reference, candidate)]
        config = {
            "version": 1,
            "name": "toy",
            "reference": {"backend": "attach", "url": urls[0]},
            "candidate": {"backend": "attach", "url": urls[1], "expect": {"quantization": "fp8"}},
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
        project = Project(pytester, reference, candidate, config)
        project.write()
        yield project
