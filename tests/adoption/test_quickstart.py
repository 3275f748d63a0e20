"""The commands of the quick start, as a newcomer types them, on a model small enough for a test."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "data" / "models" / "bf16-tiny"
SECTION = re.compile(r"^## On this machine's CPU\n(.*?)^## ", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXPECTED = {
    "quantguard init": 0,
    "quantguard doctor": 0,
    "quantguard capture": 0,
    "quantguard run smollm2-135m-nvfp4.yaml": 0,
    "quantguard suggest": 0,
    "quantguard accept": 0,
    "quantguard run broken.yaml": 1,
}


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command in the folder, by this Python's package."""
    words = shlex.split(command)
    assert words[0] == "quantguard"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    program = [sys.executable, "-m", "pytest_quantguard.cli", *words[1:]]
    return subprocess.run(
        program, cwd=folder, env=env, capture_output=True, encoding="utf-8", timeout=300, check=False
    )


def write(block: str, folder: Path) -> None:
    """A YAML block of the page: a file of its own, or the drift section of the config."""
    name = re.search(r"^name: (\w+)$", block, re.MULTILINE)
    if name is not None:
        (folder / f"{name[1]}.yaml").write_text(block, encoding="utf-8")
        return
    drift = block.splitlines()[-1]
    config = folder / "smollm2-135m-nvfp4.yaml"
    before = config.read_text(encoding="utf-8")
    after = re.sub(r"^  # drift: .*$", drift, before, flags=re.MULTILINE)
    assert after != before
    config.write_text(after, encoding="utf-8")


def shrink(config: Path) -> None:
    """Fewer prompts and positions, so that the test ends soon."""
    text = config.read_text(encoding="utf-8")
    smaller = text.replace("size: 16", "size: 8").replace("score_tokens: 32", "score_tokens: 16")
    assert smaller != text
    config.write_text(smaller, encoding="utf-8")


@pytest.mark.slow
def test_the_quick_start_works_as_written(tmp_path: Path) -> None:
    """In order: every command and every file of the CPU section, with the small model in place of SmolLM2."""
    section = SECTION.search((ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8"))
    assert section is not None
    used = set()
    for language, body in FENCE.findall(section[1]):
        if language == "yaml":
            write(body, tmp_path)
            continue
        for line in body.splitlines():
            command = line.removeprefix("$ ")
            if command.startswith("pip "):
                continue
            expected = next(code for start, code in EXPECTED.items() if command.startswith(start))
            used.add(next(start for start in EXPECTED if command.startswith(start)))
            done = run(
                command.replace(
                    "--candidate smollm2-135m", f"--candidate {TINY} --name smollm2-135m-nvfp4"
                ).replace(
                    "--apply", "--apply --allow-looser"
                ),  # NVFP4 costs it more than the model of the page.
                tmp_path,
            )
            assert done.returncode == expected, f"{command}\n{done.stdout}\n{done.stderr}"
            assert "Traceback" not in done.stdout + done.stderr
            if command.startswith("quantguard init"):
                shrink(tmp_path / "smollm2-135m-nvfp4.yaml")
    assert used == set(EXPECTED)
    folder = tmp_path / ".quantguard" / "broken"
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert result["verdict"] == "failed"
    assert {check["kind"] for check in result["checks"] if check["outcome"] == "failed"} >= {
        "accuracy",
        "drift",
    }
    assert (folder / "report.html").stat().st_size > 10_000
    assert (folder / "server.log").is_file()
