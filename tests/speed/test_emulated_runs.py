"""A speed record of several runs, of real emulator processes with a tiny model. The verdict is one that no
load of this machine can turn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_quantguard.baseline.speed_record import read_speed_record
from pytest_quantguard.cli import main
from pytest_quantguard.results import read_result
from tests.speed.test_emulated_speed import SERVER

SPEED = {
    "scenarios": [{"kind": "decode_heavy", "input_tokens": 8, "output_tokens": 12, "requests": 8}],
    "levels": [8],
    "rounds": 5,
    "warmup_rounds": 1,
    "max_slowdown": "100%",
    "max_scatter": 100,
}

pytestmark = pytest.mark.slow


def write(folder: Path, **candidate: Any) -> None:
    config = {
        "version": 1,
        "name": "tiny",
        "reference": SERVER,
        "candidate": {**SERVER, "quantization": "nvfp4", **candidate},
        "baseline": "baseline",
        "suite": {"size": 4, "max_prompt_tokens": 48, "score_tokens": 4, "batch_sizes": [1]},
        "accuracy": {"kl_mean": {"max": 9}},
        "speed": SPEED,
    }
    (folder / "gate.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def test_every_added_run_is_of_a_server_of_its_own(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_quantguard.serving.machine_state.MachineState.crowding", [])
    write(pytester.path)
    assert main(["capture", "gate.yaml"]) == 0
    assert main(["accept", "gate.yaml"]) == 0
    assert main(["accept", "gate.yaml", "--add-times", "2"]) == 0
    (folder,) = (pytester.path / "baseline" / "accepted").iterdir()
    (cell,) = read_speed_record(folder, command="accept").cells.values()
    rounds = [tuple(run.figures["duration"]) for run in cell.runs]
    assert [len(times) for times in rounds] == [5, 5, 5]
    assert len(set(rounds)) == 3
    logs = list((pytester.path / ".quantguard" / "tiny").glob("server.log*"))
    assert len(logs) == 3, "one for each start"

    write(pytester.path, faults=["slow_step:share=30"])
    main(["run", "gate.yaml", "--", "-k", "speed"])
    (check,) = read_result(pytester.path / ".quantguard" / "tiny").checks
    assert check.speed is not None
    (verdict,) = check.speed.verdicts
    assert verdict.runs == 3
    assert verdict.spread is not None
    assert verdict.value is not None
    assert verdict.value > 2
    assert verdict.status in ("regressed", "inconclusive"), "never unchanged"
