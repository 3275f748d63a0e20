"""Bounds on accepted against candidate where the accepted run was computed on another device."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_quantguard.baseline.manifest import Manifest
from pytest_quantguard.cli import main
from pytest_quantguard.results import CheckResult, read_result

from .test_emulated_gate import tiny_baseline, tiny_config

__all__ = ["tiny_baseline"]

EXACT = {"kl_mean": {"max": 1e-9, "decision": "point"}, "other_device": "skip"}


def write_config(folder: Path, divergence: dict[str, Any], **candidate: Any) -> None:
    config = tiny_config(**candidate)
    config["accuracy"]["drift"] = {"kl_mean": {"max_increase": "10%"}, "divergence": divergence}
    config["self_consistency"] = {"batch": None, "decode_against_prefill": None}
    (folder / "gate.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


@pytest.fixture(scope="module")
def accepted_baseline(tiny_baseline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The baseline with an accepted run, made once."""
    folder = tmp_path_factory.mktemp("accepted")
    shutil.copytree(tiny_baseline, folder / "baseline")
    write_config(folder, EXACT)
    command = ["accept", str(folder / "gate.yaml"), "--output", str(folder / "out")]
    assert main(command) == 0
    return folder / "baseline"


@pytest.fixture
def accepted(pytester: pytest.Pytester, accepted_baseline: Path) -> pytest.Pytester:
    shutil.copytree(accepted_baseline, pytester.path / "baseline")
    write_config(pytester.path, EXACT)
    return pytester


def manifest_path(folder: Path) -> Path:
    (found,) = (folder / "baseline" / "accepted").glob("*/manifest.json")
    return found


def move_elsewhere(folder: Path, device: str | None) -> None:
    """As if the accepted run had been made on another machine, or before devices were recorded."""
    manifest = json.loads(manifest_path(folder).read_text(encoding="utf-8"))
    assert manifest["environment"].pop("device")
    if device is not None:
        manifest["environment"]["device"] = device
    manifest_path(folder).write_text(json.dumps(manifest), encoding="utf-8")


def divergence_checks(folder: Path) -> list[CheckResult]:
    checks = read_result(folder / ".quantguard" / "tiny").checks
    return [check for check in checks if "-divergence-" in check.id]


def test_the_accepted_run_knows_its_device(accepted: pytest.Pytester) -> None:
    device = Manifest.model_validate_json(
        manifest_path(accepted.path).read_text(encoding="utf-8")
    ).environment["device"]
    assert ", numpy " in device


def test_on_the_same_device_any_change_fails(accepted: pytest.Pytester) -> None:
    assert accepted.runpytest("--quantguard-config=gate.yaml").ret == 0
    assert {check.outcome for check in divergence_checks(accepted.path)} == {"passed"}
    write_config(accepted.path, EXACT, faults=["decode_tail_precision"])
    accepted.runpytest("--quantguard-config=gate.yaml")
    failed = [check.id for check in divergence_checks(accepted.path) if check.outcome == "failed"]
    assert failed == ["drift[decode-bs1-divergence-kl_mean]", "drift[decode-bs3-divergence-kl_mean]"]


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("Another CPU, 64 threads", "accepted on Another CPU, 64 threads, now on "),
        (None, "a device that is not known"),
    ],
)
def test_on_another_device_it_is_skipped_aloud(
    accepted: pytest.Pytester, device: str | None, said: str
) -> None:
    move_elsewhere(accepted.path, device)
    result = accepted.runpytest("--quantguard-config=gate.yaml")
    assert result.ret == 0
    checks = divergence_checks(accepted.path)
    assert [check.outcome for check in checks] == ["skipped"] * 4
    assert all(check.value is None and said in check.message for check in checks)
    assert "other_device" in checks[0].message
    assert "--quantguard-accept" in checks[0].message
    result.stdout.fnmatch_lines(["*PASSED*4 skipped*"])
    drift = [
        check for check in read_result(accepted.path / ".quantguard" / "tiny").checks if check.kind == "drift"
    ]
    assert [check.outcome for check in drift if check not in checks] == ["passed"] * 4


def test_elsewhere_it_is_judged_unless_the_config_says_otherwise(accepted: pytest.Pytester) -> None:
    move_elsewhere(accepted.path, "Another CPU, 64 threads")
    judged = {key: value for key, value in EXACT.items() if key != "other_device"}
    write_config(accepted.path, judged, faults=["decode_tail_precision"])
    accepted.runpytest("--quantguard-config=gate.yaml")
    failed = [check for check in divergence_checks(accepted.path) if check.outcome == "failed"]
    assert len(failed) == 2
    assert "environment.device: Another CPU, 64 threads -> " in failed[0].message
