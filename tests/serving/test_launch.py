"""The launcher with a stand-in server: ready, identified, failed, died, stopped to the last child."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_quantguard.config import SglangServer
from pytest_quantguard.errors import ConfigError, ServerDiedError, ServerStartError
from pytest_quantguard.serving import gpu_memory
from pytest_quantguard.serving.answers import GenerateRequest
from pytest_quantguard.serving.launch import start
from tests.serving.test_gpu_memory import GIB, FakeNvml

FAKE = Path(__file__).with_name("fake_server.py")


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """File where the stand-in writes its pids; whatever lives at the end is killed and fails the test."""
    path = tmp_path / "pids"
    path.touch()
    monkeypatch.setenv("FAKE_PIDS", str(path))
    yield path
    left = living(path)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def living(path: Path) -> list[int]:
    def lives(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [pid for pid in map(int, path.read_text(encoding="utf-8").split()) if lives(pid)]


def config(mode: str, **options: Any) -> SglangServer:
    options = {"model_path": "some/model", "command": [sys.executable, str(FAKE), mode]} | options
    return SglangServer(backend="sglang", **options)


def test_a_server_is_ready_identified_and_stopped(tmp_path: Path, pids: Path) -> None:
    said: list[str] = []
    with start(config("slow"), log_path=tmp_path / "server.log", progress=said.append) as server:
        assert server.capabilities.model_path == "some/model"
        assert server.capabilities.kind == "sglang"
        server.check_alive()
        assert server.command is not None
        assert server.command[:3] == (sys.executable, str(FAKE), "slow")
        assert len(living(pids)) == 1
    assert living(pids) == []
    log = (tmp_path / "server.log").read_text(encoding="utf-8")
    assert log.startswith(f"$ {sys.executable} {FAKE} slow --model-path some/model --host 127.0.0.1 --port ")
    assert "fake server starts" in log


@pytest.mark.usefixtures("pids")
def test_an_early_exit_shows_code_command_log_and_its_reading(tmp_path: Path) -> None:
    with pytest.raises(ServerStartError) as caught:
        start(config("exit"), log_path=tmp_path / "server.log")
    message = str(caught.value)
    assert "the server ended with exit code 3" in message
    assert "the last error in the log is RuntimeError: the fake server was told to fail" in message
    assert f"command: {sys.executable} {FAKE} exit --model-path some/model" in message
    assert f"log: {tmp_path / 'server.log'}; its end:" in message


@pytest.mark.usefixtures("pids")
def test_a_server_that_hangs_on_a_busy_port_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_quantguard.serving.readiness.FATAL_GRACE", 0.2)
    with pytest.raises(ServerStartError, match=r"runs on but will never serve: port \d+ is already in use"):
        start(config("port-busy"), log_path=tmp_path / "server.log")


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path, pids: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerStartError, match=f"port {port} .*by process {os.getpid()} "):
            start(config("serve", port=port), log_path=tmp_path / "server.log")
    assert pids.read_text(encoding="utf-8") == ""


@pytest.mark.usefixtures("pids")
def test_a_given_port_is_used(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with start(config("serve", port=port), log_path=tmp_path / "server.log") as server:
        assert server.url == f"http://127.0.0.1:{port}"


@pytest.mark.usefixtures("pids")
@pytest.mark.parametrize(
    ("mode", "message"), [("other-model", r"it serves 'another-model', started was 'some/model'")]
)
def test_another_server_is_refused(tmp_path: Path, mode: str, message: str) -> None:
    with pytest.raises(ServerStartError, match=message):
        start(config(mode), log_path=tmp_path / "server.log")


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match="cannot run 'no-such-program': No such file"):
        start(config("serve", command=["no-such-program"]), log_path=tmp_path / "server.log")


@pytest.mark.usefixtures("pids")
def test_a_server_that_dies_in_use_is_reported_with_its_log(tmp_path: Path) -> None:
    with start(config("dies"), log_path=tmp_path / "server.log") as server:
        server.client.vocab_size = 100
        with pytest.raises(ServerDiedError) as caught:
            server.client.generate([GenerateRequest((1, 2, 3))] * 3)
        message = str(caught.value)
        assert "/generate with 3 prompts of 3 tokens" in message
        assert "the server ended with exit code 7 while it was in use" in message
        assert "out of memory" in message
        with pytest.raises(ServerDiedError, match="exit code 7"):
            server.check_alive()


def test_the_whole_tree_is_stopped(tmp_path: Path, pids: Path) -> None:
    """A child of another session, one that ignores SIGTERM, and an orphan that came to the supervisor."""
    with start(config("children"), log_path=tmp_path / "server.log") as server:
        assert len(living(pids)) == 5  # the main process is written twice
        server.stop()
        assert living(pids) == []


def test_children_are_stopped_when_the_server_ends_by_itself(tmp_path: Path, pids: Path) -> None:
    with start(config("children"), log_path=tmp_path / "server.log") as server:
        os.kill(int(pids.read_text(encoding="utf-8").split()[0]), signal.SIGKILL)
        with pytest.raises(ServerDiedError, match="exit code -9"):
            eventually(server.check_alive)
    assert living(pids) == []


def eventually(check: Any) -> None:
    """Call until it raises; the test's own time limit is far beyond what is needed."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        check()
        time.sleep(0.02)
    raise AssertionError("it never raised")


PYTEST_STAND_IN = """
import sys
from pathlib import Path
from pytest_quantguard.config import SglangServer
from pytest_quantguard.serving.launch import start

config = SglangServer(backend="sglang", model_path="m", command=[sys.executable, sys.argv[1], "children"])
server = start(config, log_path=Path(sys.argv[2]))
print(server._process._supervisor.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "ending",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGSEGV, marks=pytest.mark.slow),
        pytest.param(None, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_when_pytest_ends(tmp_path: Path, pids: Path, ending: signal.Signals | None) -> None:
    """However the process that started a server ends: killed, crashed, or by itself without stopping it."""
    owner = subprocess.Popen(
        [sys.executable, "-c", PYTEST_STAND_IN, str(FAKE), str(tmp_path / "server.log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    assert owner.stdout is not None
    supervisor = psutil.Process(int(owner.stdout.readline()))
    assert len(living(pids)) == 5
    if ending is None:
        assert owner.stdin is not None
        owner.stdin.close()
    else:
        owner.send_signal(ending)
    owner.wait(30)
    supervisor.wait(40)
    assert living(pids) == []


def test_nothing_is_left_when_the_supervisor_is_killed(tmp_path: Path, pids: Path) -> None:
    with start(config("children"), log_path=tmp_path / "server.log") as server:
        server.check_alive()
        assert server._process is not None
        server._process._supervisor.kill()
        with pytest.raises(ServerDiedError):
            eventually(server.check_alive)
    assert living(pids) == []


@pytest.mark.usefixtures("pids")
def test_stopping_waits_for_the_gpu_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([GIB, 40 * GIB, 20 * GIB, GIB])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    said: list[str] = []
    server = start(config("serve"), log_path=tmp_path / "server.log", progress=said.append)
    server.stop()
    assert nvml.later == [GIB]
    nvml.later = [40 * GIB]
    server.stop()  # the second time there is nothing to wait for
    monkeypatch.setattr(gpu_memory.wait_until_freed, "__kwdefaults__", {"seconds": 0.1})
    nvml.later = [GIB, 40 * GIB]
    start(config("serve"), log_path=tmp_path / "server.log", progress=said.append).stop()
    assert said[-1] == "0.1 s after the server ended, GPU 1 still uses 39936 MiB more than before its start"


@pytest.mark.usefixtures("pids")
def test_a_log_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", Path("/proc/no")):
        with pytest.raises(ServerStartError, match=r"log cannot be written to .*--quantguard-output=DIR"):
            start(config("slow"), log_path=folder / "server.log")


def test_logs_are_rotated(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    for _ in range(5):
        with pytest.raises(ServerStartError):
            start(config("exit"), log_path=path)
    assert sorted(file.name for file in tmp_path.glob("server.log*")) == [
        "server.log",
        "server.log.1",
        "server.log.2",
        "server.log.3",
    ]


@pytest.mark.usefixtures("pids")
def test_secrets_are_masked_everywhere(tmp_path: Path) -> None:
    secret = "sk-very-secret"
    with pytest.raises(ServerStartError) as caught:
        start(
            config(
                "exit",
                api_key=secret,
                env={"HF_TOKEN": "hf_hidden"},
                server_args={"kv_cache_dtype": "hf_hidden"},
            ),
            log_path=tmp_path / "server.log",
        )
    log = (tmp_path / "server.log").read_text(encoding="utf-8")
    for text in (str(caught.value), log):
        assert secret not in text
        assert "hf_hidden" not in text
        assert "--api-key '***'" in text
    assert "'api_key': '***'" in log  # servers write their arguments into their log


def test_a_worker_without_devices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="devices names 1 sets of GPUs, but this is xdist worker 2"):
        start(config("serve", devices=["0"]), log_path=tmp_path / "server.log", worker=1)
