"""What `quantguard doctor` finds: each finding from a machine, program or config made for it."""

from __future__ import annotations

import json
import shutil
import socket
import stat
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_quantguard.cli import main
from pytest_quantguard.doctor import gate, machine
from pytest_quantguard.doctor.finding import Finding, render
from pytest_quantguard.doctor.machine import Gpu, parse_gpus

EXAMPLES = Path(__file__).parents[2] / "examples"
HELP = (
    "usage: launch [--model-path P] [--host H] [--port N] [--dtype D] [--quantization Q] "
    "[--kv-cache-dtype K]\n"
)
B200 = "0, NVIDIA B200, 183359, 0, 580.65.06, 10.0\n"
H200 = "0, NVIDIA H200, 143771, 90000, 550.54.15, 9.0\n"

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def sglang(tmp_path: Path) -> Path:
    """A program called `python3` that answers like SGLang 0.5.23."""
    return program(tmp_path, "python3", version="0.5.23")


def program(folder: Path, name: str, *, version: str | None, help_text: str = HELP, code: int = 0) -> Path:
    path = folder / name
    answer = f"print({version!r})" if version else "sys.exit('no module named sglang')"
    path.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"if '--help' in sys.argv:\n    print({help_text!r})\n    print('ImportError: libcuda', "
        "file=sys.stderr)\n"
        f"    sys.exit({code})\n{answer}\n",
        encoding="utf-8",
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def write_config(folder: Path, **candidate: Any) -> Path:
    path = folder / "gate.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "version": 1,
                "name": "gate",
                "candidate": {
                    "backend": "sglang",
                    "model_path": "org/model",
                    "quantization": "modelopt_fp4",
                    **candidate,
                },
                "baseline": "base",
                "suite": {"phases": ["prefill"]},
                "accuracy": {"kl_mean": {"max": 0.1}},
            }
        ),
        encoding="utf-8",
    )
    return path


def examine(
    config: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit code, and the findings by name."""
    code = main(["doctor", str(config), "--json", *options])
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is (code == 0)
    return code, {item["name"]: item for item in found["findings"]}


def have_gpus(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(gate, "read_gpus", lambda: parse_gpus(text))


def test_example_needs_nothing_more(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, found = examine(EXAMPLES / "smollm2-nvfp4.yaml", capsys, "--output", str(tmp_path))
    assert code == 0
    assert found["extra [emulator]"]["status"] == "ok"
    assert found["baseline"]["status"] == "ok"
    assert "32 prompts x 32 positions, 8 cells" in found["baseline"]["text"]


def test_without_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "Python" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_wrong_config_is_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "none.yaml"), "--json"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "there is no such config file" in shown.err


def test_gpu_config_without_gpu_or_sglang(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_gpus(monkeypatch, "")
    code, found = examine(
        write_config(tmp_path, command=[str(program(tmp_path, "python3", version=None))]), capsys
    )
    assert code == 1
    assert "nvidia-smi is missing" in found["GPU"]["text"]
    assert "--gpus all" in found["GPU"]["remedy"]
    assert "is not installed in" in found["candidate: SGLang"]["text"]
    assert "pip install 'sglang>=0.5'" in found["candidate: SGLang"]["remedy"]
    assert "candidate: flags" not in found


def test_device_cpu_needs_no_gpu(
    tmp_path: Path, sglang: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_gpus(monkeypatch, "")
    config = write_config(tmp_path, command=[str(sglang)], server_args={"device": "cpu"})
    _, found = examine(config, capsys)
    assert found["GPU"]["status"] == "skipped"
    assert "shared memory" not in found


def test_version_and_unknown_flag(
    tmp_path: Path, sglang: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_gpus(monkeypatch, B200)
    config = write_config(tmp_path, command=[str(sglang)], server_args={"quantisation_path": "x"})
    code, found = examine(config, capsys)
    assert code == 1
    assert found["candidate: SGLang"]["text"] == "0.5.23"
    assert (
        "does not know --quantisation-path (nearest known: --quantization)"
        in found["candidate: flags"]["text"]
    )
    assert found["GPU"]["text"].startswith(
        "0: NVIDIA B200, 179 of 179 GiB free, driver 580.65.06, compute cap"
    )
    assert "candidate: format" not in found


def test_old_version_and_broken_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_gpus(monkeypatch, B200)
    old = program(tmp_path, "python3", version="0.4.10", code=1)
    _, found = examine(write_config(tmp_path, command=[str(old)]), capsys)
    assert found["candidate: SGLang"]["status"] == "warning"
    assert found["candidate: flags"]["status"] == "problem"
    assert "--help fails: ImportError: libcuda" in found["candidate: flags"]["text"]


def test_devices_that_do_not_suit(
    tmp_path: Path, sglang: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_gpus(monkeypatch, H200)
    config = write_config(tmp_path, command=[str(sglang)], server_args={"tp_size": 4})
    code, found = examine(config, capsys, "--offline")
    assert code == 1
    assert found["GPU"]["status"] == "warning"
    assert "Another process holds memory" in found["GPU"]["remedy"]
    assert "4 are needed (tp_size x pp_size), this machine has 1" in found["candidate: GPUs"]["text"]
    assert (
        "modelopt_fp4 is in hardware from compute capability 10.0 on; NVIDIA H200 has 9.0"
        in (found["candidate: format"]["text"])
    )
    assert found["candidate: SGLang"]["status"] == "skipped"


def test_command_that_runs_elsewhere_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_gpus(monkeypatch, "")
    _, found = examine(write_config(tmp_path, command=["srun", "sglang", "serve"]), capsys)
    assert found["GPU"]["status"] == "skipped"
    assert (
        "not asked, as it is started through 'srun': srun sglang serve" in found["candidate: SGLang"]["text"]
    )


def test_port_in_use(tmp_path: Path, sglang: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        _, found = examine(write_config(tmp_path, command=[str(sglang)], port=port), capsys, "--offline")
    assert found["candidate: port"]["status"] == "problem"
    assert f"port {port}" in found["candidate: port"]["text"]


def test_small_shared_memory_and_full_disk(
    tmp_path: Path, sglang: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_gpus(monkeypatch, B200)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(64 << 20, 0, 64 << 20))
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    config = write_config(tmp_path, command=[str(sglang)], server_args={"tp_size": 1})
    _, found = examine(config, capsys, "--offline", "--output", str(tmp_path))
    assert found["shared memory"]["status"] == "warning"
    assert "--shm-size" in found["shared memory"]["remedy"]
    assert found["disk"]["status"] == "problem"
    assert found["candidate: model"]["status"] == "warning", "a download needs room"
    config = write_config(tmp_path, command=[str(sglang)], server_args={"tp_size": 2})
    assert examine(config, capsys, "--offline")[1]["shared memory"]["status"] == "problem"


def test_model_folders(tmp_path: Path, sglang: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = write_config(tmp_path, command=[str(sglang)], model_path="./model")
    assert "holds no config.json" in examine(config, capsys, "--offline")[1]["candidate: model"]["text"]
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid x\n")
    pointer = examine(config, capsys, "--offline")[1]["candidate: model"]
    assert "is a Git LFS pointer" in pointer["text"]
    assert pointer["remedy"] == "Run: git lfs pull"


def test_model_in_the_hub_cache(
    tmp_path: Path, sglang: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    config = write_config(tmp_path, command=[str(sglang)])
    assert "will be downloaded" in examine(config, capsys, "--offline")[1]["candidate: model"]["text"]
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}", encoding="utf-8")
    assert "in Hugging Face's cache" in examine(config, capsys, "--offline")[1]["candidate: model"]["text"]


def test_baselines(tmp_path: Path, sglang: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, command=[str(sglang)])
    missing = examine(config, capsys, "--offline")[1]["baseline"]
    assert missing["status"] == "problem", "without a reference it cannot be recorded either"
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "manifest.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    pointer = examine(config, capsys, "--offline")[1]["baseline"]
    assert "is a Git LFS pointer" in pointer["text"]
    assert pointer["remedy"].startswith("quantguard capture ")


def test_attached_server_that_does_not_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path)
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    loaded["candidate"] = {"backend": "attach", "url": "http://127.0.0.1:9", "startup_timeout": 0.1}
    path.write_text(yaml.safe_dump(loaded), encoding="utf-8")
    code, found = examine(path, capsys)
    assert code == 1
    assert "127.0.0.1:9" in found["candidate"]["text"]
    assert examine(path, capsys, "--offline")[1]["candidate"]["status"] == "skipped"


def test_missing_and_old_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["nosuchpackage>=1; extra == 'remote'", "numpy>=999", "pyyaml"]
    monkeypatch.setattr(machine.importlib.metadata, "requires", lambda _: wanted)
    core, extra = machine.examine_packages(["remote"])
    assert core.status == "problem"
    assert core.text.startswith("numpy is ")
    assert core.text.endswith("needed is >=999")
    assert extra.text == "nosuchpackage is not installed"
    assert extra.remedy == "pip install 'pytest-quantguard[remote]'"


def test_what_nvidia_smi_prints() -> None:
    text = f"{B200}1, NVIDIA B200, 183359, [N/A], 580.65.06, 10.0\n2, broken, [Unknown Error], x\n"
    assert [gpu.index for gpu in parse_gpus(text)] == [0, 1]
    assert parse_gpus(text)[0] == Gpu(0, "NVIDIA B200", 183359, 0, "580.65.06", (10, 0))


def test_findings_at_a_narrow_width() -> None:
    findings = [Finding("a name", "problem", "word " * 40, "do " * 40), Finding("b", "warning", "x")]
    lines = render(findings, 60)
    assert max(map(len, lines)) <= 60
    assert lines[-1] == "1 problem, 1 warning"
    assert "PROBLEM" in lines[0]
