"""Runs whole gates in processes of their own, as a user does, and reads their results."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pytest_quantguard.config import SglangServer
from pytest_quantguard.results import CellResult, RunResult, read_result

QUESTIONS = (
    "What is the capital of France, and what is it famous for?",
    "Explain in simple words why the sky is blue.",
    "Write a short story about a dragon who is afraid of fire.",
    "How do I boil an egg so that the yolk stays soft?",
    "Give me three tips for learning to play the guitar.",
    "What is the difference between a list and a tuple in Python?",
    "Who wrote Romeo and Juliet, and what is it about?",
    "Describe the water cycle to a child of ten years.",
)
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
SUITE: dict[str, Any] = {"prompts": "chat.jsonl", "score_tokens": 48, "batch_sizes": [1, 8], "repeats": 2}
"""Chat prompts and what the reference answers; few, since a real server here decodes 20 tokens a second."""
STORED_BASELINE = Path(__file__).parents[2] / "baselines" / "smollm2-135m-bf16"
STORED_SUITE: dict[str, Any] = {
    "prompts": "builtin",
    "size": 32,
    "max_prompt_tokens": 96,
    "score_tokens": 32,
    "top_logprobs": 256,
    "batch_sizes": [1],
    "phases": ["prefill"],
}
"""The emulator's baseline in the repository; of its cells, one that a real server answers in seconds."""
SECONDS = 1800

Cells = Mapping[tuple[str, int], CellResult]


@dataclass(frozen=True)
class Gate:
    """What one run of pytest left behind."""

    exit_code: int
    output: str
    result: RunResult | None

    @property
    def cells(self) -> Cells:
        """The cold, first measurement of each (phase, batch size)."""
        assert self.result is not None
        return {
            (cell.phase, cell.batch_size): cell
            for cell in self.result.cells
            if not cell.warm and cell.repeat == 0
        }

    def failures(self) -> list[str]:
        assert self.result is not None
        return [check.id for check in self.result.failures]


def as_yaml(config: SglangServer) -> dict[str, Any]:
    """A server's part of the YAML."""
    return config.model_dump(mode="json", exclude_unset=True)


def emulated(**options: Any) -> dict[str, Any]:
    """A server's part of the YAML for the emulator of SmolLM2."""
    return {
        "backend": "emulator",
        "model_path": "smollm2-135m",
        "server_args": {"disable_radix_cache": True},
    } | options


def write_prompts(folder: Path) -> None:
    """`chat.jsonl`: the questions in the model's own chat format."""
    lines = [
        json.dumps(
            {
                "id": f"chat-{index}",
                "task": "chat",
                "text": f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
                "<|im_start|>assistant\n",
            }
        )
        for index, question in enumerate(QUESTIONS)
    ]
    (folder / "chat.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def run_gate(folder: Path, name: str, config: dict[str, Any], *options: str) -> Gate:
    """Run `pytest --quantguard-config` in `folder`; the config is written to `<name>.yaml` there."""
    path = folder / f"{name}.yaml"
    accuracy = {"kl_mean": {"max": 1.0}}
    whole = {"version": 1, "name": name, "suite": SUITE, "accuracy": accuracy, "speed": None} | config
    path.write_text(yaml.safe_dump(whole, sort_keys=False), encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", f"--quantguard-config={path}", "-q", *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=SECONDS,
    )
    print(run.stdout)
    result_file = folder / ".quantguard" / name / "result.json"
    return Gate(run.returncode, run.stdout, read_result(result_file) if result_file.exists() else None)
