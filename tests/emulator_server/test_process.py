"""The process: command line, port, log, exit status."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import requests

from pytest_quantguard.emulator.launch import listen, run
from pytest_quantguard.emulator.options import EmulatorOptions
from pytest_quantguard.serving.ports import HeldPort

from .processes import TINY, Emulator, free_port, launch


def finished(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output of an emulator that is expected to end by itself."""
    process = launch(tmp_path / "log", *arguments)
    try:
        return process.wait(60), (tmp_path / "log").read_text(encoding="utf-8")
    finally:
        process.kill()
        process.wait()


def test_a_port_in_use_ends_the_process_at_once(tiny: Emulator, tmp_path: Path) -> None:
    status, log = finished(tmp_path, "--model-path", str(TINY), "--port", str(tiny.port))
    assert status == 1
    assert f"port {tiny.port} on 127.0.0.1 cannot be used: Address already in use" in log
    assert "--port" in log
    assert "Load weight" not in log


def test_a_model_that_does_not_exist_ends_the_process(tmp_path: Path) -> None:
    status, log = finished(tmp_path, "--model-path", "smollm2-135M", "--port", str(free_port()))
    assert status == 1
    assert "model not found: 'smollm2-135M'" in log
    assert "Did you mean 'smollm2-135m'?" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fault", "no_such_fault"], ["unknown fault", "no_such_fault"]),
        (["--quantization", "nvfp5"], ["nvfp5", "nvfp4"]),
        (["--kv-cache-dtype", "fp9"], ["fp9", "fp8_e4m3"]),
        (["--context-length", "100000"], ["100000", "512"]),
    ],
)
def test_an_impossible_setting_ends_the_process(
    tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    status, log = finished(tmp_path, "--model-path", str(TINY), "--port", str(free_port()), *arguments)
    assert status == 1
    for word in words:
        assert word in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--no-such-flag"], ["--no-such-flag"]),
        (["--port", "70000"], ["--port", "70000", "65535"]),
        (["--host", "0.0.0.0"], ["--host", "loopback", "0.0.0.0"]),
        (["--dtype", "float16"], ["--dtype", "float16", "bfloat16"]),
        (["--threads", "0"], ["--threads", "above 0"]),
        (["--quantization", "{bad"], ["--quantization", "JSON"]),
        (["--quantization", '{"a": 1}'], ["--quantization", "formats"]),
        (["--kv-cache"], ["--kv-cache"]),
    ],
)
def test_a_wrong_command_line_is_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["--model-path", str(TINY), *arguments])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    for word in words:
        assert word in message


def test_the_model_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run([])
    assert ended.value.code == 2
    assert "--model-path" in capsys.readouterr().err


def test_a_starting_server_says_503_and_logs_its_progress(tmp_path: Path) -> None:
    session = requests.Session()
    session.trust_env = False  # no proxy
    seen: list[int] = []
    with session, HeldPort(None) as held:
        port = str(held.port)
        process = launch(tmp_path / "log", "--model-path", str(TINY), "--port", port, "--threads", "1")
        try:
            while 200 not in seen:
                assert process.poll() is None, (tmp_path / "log").read_text(encoding="utf-8")
                with contextlib.suppress(requests.ConnectionError):
                    seen.append(session.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code)
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert set(seen) <= {200, 503}
    stages = [
        "Load weight begin",
        "Load weight end",
        "The server is fired up and ready to roll!",
        "SIGTERM received",
    ]
    assert sorted(stages, key=log.index) == stages


def test_without_the_extra_the_server_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['starlette'] = None\n"
        "sys.modules['starlette.applications'] = None\n"
        "import pytest_quantguard.emulator.server"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=False)
    assert result.returncode == 1
    assert "pip install 'pytest-quantguard[emulator]'" in result.stderr


@pytest.mark.parametrize("package", ["uvicorn", "tokenizers"])
def test_the_command_names_the_extra_that_is_missing(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find_spec(name)
    )
    assert run(["--model-path", str(TINY), "--port", str(free_port())]) == 1
    message = capsys.readouterr().err
    assert f"not installed: {package}. Run: pip install 'pytest-quantguard[emulator]'" in message


def test_options_are_frozen() -> None:
    with pytest.raises(AttributeError):
        EmulatorOptions(model="x").port = 1  # type: ignore[misc]


def test_answers_are_not_held_back_by_nagles_algorithm() -> None:
    """asyncio sets TCP_NODELAY on connections of a socket whose protocol is TCP, not where it is 0."""
    with listen("127.0.0.1", 0) as listening:
        assert listening.proto == socket.IPPROTO_TCP
