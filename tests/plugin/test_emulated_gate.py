"""The whole job on the emulator with a tiny model: a server is started, measured, judged, and ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from pytest_quantguard.cli import main
from pytest_quantguard.results import read_result

MODEL = Path(__file__).parents[1] / "data" / "models" / "bf16-tiny"


def tiny_config(**candidate: Any) -> dict[str, Any]:
    server = {"backend": "emulator", "model_path": str(MODEL), "threads": 1}
    return {
        "version": 1,
        "name": "tiny",
        "reference": server,
        "candidate": {**server, "quantization": "nvfp4", "kv_cache_dtype": "fp8_e4m3", **candidate},
        "baseline": "baseline",
        "suite": {
            "size": 8,
            "max_prompt_tokens": 48,
            "score_tokens": 12,
            "top_logprobs": 64,
            "batch_sizes": [1, 3],
            "repeats": 2,
        },
        "accuracy": {"kl_mean": {"max": 0.6}, "agreement": {"min": 0.3}},
        "self_consistency": {"warm_cache": {"max_increase": "25%"}},
        "speed": None,
    }


@pytest.fixture(scope="session")
def tiny_baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "gate.yaml").write_text(yaml.safe_dump(tiny_config()), encoding="utf-8")
    assert main(["capture", str(folder / "gate.yaml"), "--output", str(folder / "out")]) == 0
    return folder / "baseline"


@pytest.fixture
def tiny(pytester: pytest.Pytester, tiny_baseline: Path) -> pytest.Pytester:
    shutil.copytree(tiny_baseline, pytester.path / "baseline")
    (pytester.path / "gate.yaml").write_text(yaml.safe_dump(tiny_config()), encoding="utf-8")
    return pytester


def outcomes(pytester: pytest.Pytester) -> dict[str, str]:
    return {check.id: check.outcome for check in read_result(pytester.path / ".quantguard" / "tiny").checks}


def test_good_candidate_passes(tiny: pytest.Pytester) -> None:
    result = tiny.runpytest("--quantguard-config=gate.yaml")
    assert result.ret == 0, result.outlines
    written = read_result(tiny.path / ".quantguard" / "tiny")
    assert written.candidate is not None
    assert "-m pytest_quantguard.emulator" in (written.candidate.command or "")
    assert {cell.mode for cell in written.cells} == {"prefill", "forced"}
    assert any(cell.warm and cell.cached_tokens > 0 for cell in written.cells)
    assert (tiny.path / ".quantguard" / "tiny" / "server.log").is_file()


def test_broken_scales_fail_everywhere(tiny: pytest.Pytester) -> None:
    config = tiny_config(faults=["block_scale_roll"])
    (tiny.path / "gate.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    result = tiny.runpytest("--quantguard-config=gate.yaml", "-k", "accuracy and kl_mean")
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(["  log                .quantguard/tiny/server.log"])
    lines = result.outlines
    first = next(index for index, line in enumerate(lines) if line.startswith("  server  "))
    last = next(index for index in range(first, len(lines)) if not lines[index].endswith(" \\"))
    command = "\n".join(lines[first : last + 1]).strip().removeprefix("server")
    printed = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {command}"], capture_output=True, encoding="utf-8", check=True
    )
    log = (tiny.path / ".quantguard/tiny/server.log").read_text(encoding="utf-8").split("\n")[0]
    assert " ".join(printed.stdout.split("\n")).strip() == log.removeprefix("$ "), "pasted, it is the command"
    assert last > first


def test_decode_fault_fails_decode_only_and_is_diagnosed(tiny: pytest.Pytester) -> None:
    config = tiny_config(faults=["decode_gain:gain=10"])
    (tiny.path / "gate.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    tiny.runpytest("--quantguard-config=gate.yaml")
    failed = [name for name, outcome in outcomes(tiny).items() if outcome != "passed"]
    assert "self_consistency[decode-bs1-decode_against_prefill]" in failed
    assert all("decode" in name for name in failed), failed
    assert "Decode is worse" in " ".join(read_result(tiny.path / ".quantguard" / "tiny").diagnosis)


def test_server_that_does_not_start_is_told_once_with_its_log(tiny: pytest.Pytester) -> None:
    (tiny.path / "gate.yaml").write_text(
        yaml.safe_dump(tiny_config(faults=["block_scale_rol"])), encoding="utf-8"
    )
    result = tiny.runpytest("--quantguard-config=gate.yaml")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert set(outcomes(tiny).values()) == {"error"}
    text = "\n".join(result.outlines)
    assert "block_scale_roll" in text, "the log's end names the nearest fault"
    assert f"1 error, {len(outcomes(tiny)) - 1} not run in " in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow, id="SIGINT"),
        pytest.param(signal.SIGTERM, id="SIGTERM"),
        pytest.param(signal.SIGKILL, id="SIGKILL"),
    ],
)
def test_no_server_survives_pytest(tiny: pytest.Pytester, number: signal.Signals) -> None:
    (tiny.path / "test_wait.py").write_text(
        "import time\n\n\ndef test_wait(quantguard_server):\n"
        "    open('port', 'w').write(quantguard_server.url)\n    time.sleep(600)\n",
        encoding="utf-8",
    )
    # A runner in the background has SIGINT ignored, and its children inherit that.
    heeded = "import signal, pytest; signal.signal(2, signal.default_int_handler); pytest.console_main()"
    command = [sys.executable, "-c", heeded, "--quantguard-config=gate.yaml", "test_wait.py", "-k", "wait"]
    process = subprocess.Popen(command, cwd=tiny.path, stdout=subprocess.DEVNULL, env={**os.environ})
    try:
        wait_for((tiny.path / "port").is_file, "the server to run")
        family = psutil.Process(process.pid).children(recursive=True)
        assert family
        process.send_signal(number)
        process.wait(60)
        wait_for(lambda: not any(map(is_running, family)), "every process to end")
    finally:
        process.kill()
        process.wait()


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)
