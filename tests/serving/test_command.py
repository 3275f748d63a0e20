"""Command lines of servers, word by word."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_quantguard.config import EmulatorServer, SglangServer
from pytest_quantguard.errors import ConfigError
from pytest_quantguard.serving.command import plan_launch
from pytest_quantguard.serving.gpu_memory import used_bytes
from tests.serving.test_gpu_memory import GIB, FakeNvml


def sglang(**options: Any) -> SglangServer:
    return SglangServer(backend="sglang", model_path="Qwen/Qwen3-8B", **options)


def words(config: SglangServer | EmulatorServer, port: int = 31000) -> list[str]:
    return list(plan_launch(config, port=port).command)


BASE = ["--model-path", "Qwen/Qwen3-8B", "--host", "127.0.0.1", "--port", "31000", "--dtype", "bfloat16"]


def test_the_usual_program_and_typed_fields() -> None:
    config = sglang(
        quantization="modelopt_fp4", kv_cache_dtype="fp8_e4m3", revision="main", tokenizer_path="t"
    )
    assert words(config) == [
        *(sys.executable, "-m", "sglang.launch_server"),
        *BASE,
        *("--quantization", "modelopt_fp4", "--kv-cache-dtype", "fp8_e4m3", "--revision", "main"),
        *("--tokenizer-path", "t"),
    ]


@pytest.mark.parametrize(
    "prefix",
    [
        ["sglang", "serve"],
        [
            "docker",
            "run",
            "--rm",
            "--gpus=all",
            "--network=host",
            "lmsysorg/sglang:v0.5.23",
            "sglang",
            "serve",
        ],
        ["srun", "--gres=gpu:1", "python", "-m", "sglang.launch_server"],
        ["ssh", "gpu-1", "sglang", "serve"],
    ],
)
def test_any_program_before_the_arguments(prefix: list[str]) -> None:
    assert words(sglang(command=prefix)) == [*prefix, *BASE]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"disable_radix_cache": True}, ["--disable-radix-cache"]),
        ({"disable-radix-cache": True}, ["--disable-radix-cache"]),
        ({"--disable-radix-cache": True}, ["--disable-radix-cache"]),
        ({"disable_radix_cache": False}, []),
        ({"tp_size": 8, "pp_size": 2}, ["--tp-size", "8", "--pp-size", "2"]),
        ({"nnodes": 2, "dist_init_addr": "h:5000"}, ["--nnodes", "2", "--dist-init-addr", "h:5000"]),
        ({"mem_fraction_static": 0.85}, ["--mem-fraction-static", "0.85"]),
        ({"cuda_graph_bs": [1, 2, 4]}, ["--cuda-graph-bs", "1", "2", "4"]),
        ({"json_model_override_args": {"a": [1, True]}}, ["--json-model-override-args", '{"a": [1, true]}']),
        ({"speculative_algorithm": "EAGLE"}, ["--speculative-algorithm", "EAGLE"]),
    ],
)  # fmt: skip
def test_server_args(args: dict[str, Any], expected: list[str]) -> None:
    assert words(sglang(command=["x"], server_args=args)) == ["x", *BASE, *expected]


def test_server_args_replace_and_remove_what_we_would_say() -> None:
    got = words(sglang(command=["x"], server_args={"host": "0.0.0.0", "dtype": None}))
    assert got == ["x", "--model-path", "Qwen/Qwen3-8B", "--host", "0.0.0.0", "--port", "31000"]


@pytest.mark.parametrize(
    ("name", "key"), [("port", "port"), ("api_key", "api_key"), ("--model-path", "model_path")]
)
def test_what_we_must_know_has_a_key_of_its_own(name: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"server_args.{name}: use the key {key}"):
        words(sglang(server_args={name: "x"}))


def test_the_emulator_differs_in_the_command_only() -> None:
    config = EmulatorServer(
        backend="emulator",
        model_path="smollm2-135m",
        quantization={"*": "nvfp4", "*.down_proj": "bf16"},
        kv_cache_dtype="fp8_e4m3",
        faults=["nibble_swap", "kv_scale:value=2"],
        threads=2,
        server_args={"disable_radix_cache": True},
    )
    assert words(config) == [
        *(sys.executable, "-m", "pytest_quantguard.emulator", "--model-path", "smollm2-135m"),
        *("--host", "127.0.0.1", "--port", "31000", "--dtype", "bfloat16"),
        *("--quantization", '{"*": "nvfp4", "*.down_proj": "bf16"}', "--kv-cache-dtype", "fp8_e4m3"),
        *("--threads", "2", "--fault", "nibble_swap", "--fault", "kv_scale:value=2", "--disable-radix-cache"),
    ]


def test_environment_folder_and_devices() -> None:
    config = sglang(env={"A": "1"}, cwd=Path("/srv"), devices=["0,1", "2,3"])
    launch = plan_launch(config, port=1, worker=1)
    assert (launch.env["A"], launch.env["CUDA_VISIBLE_DEVICES"], launch.cwd) == ("1", "2,3", Path("/srv"))
    with pytest.raises(ConfigError, match="xdist worker 3; add one per worker or run with -n 2"):
        plan_launch(config, port=1, worker=2)


def test_the_emulator_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nobody's GPU memory is waited for, and nobody's hot GPU makes its times doubtful."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    emulator = EmulatorServer(backend="emulator", model_path="m")
    assert plan_launch(emulator, port=1).env["CUDA_VISIBLE_DEVICES"] == ""
    assert plan_launch(sglang(), port=1).env["CUDA_VISIBLE_DEVICES"] == "0"


def test_the_emulator_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU machine that others use too, nothing is waited for and nothing slows it down."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([GIB, 40 * GIB]))
    devices = plan_launch(EmulatorServer(backend="emulator", model_path="m"), port=1).env[
        "CUDA_VISIBLE_DEVICES"
    ]
    assert used_bytes(devices) == {}
    assert len(used_bytes(sglang_devices := plan_launch(sglang(), port=1).env["CUDA_VISIBLE_DEVICES"])) == 2
    assert sglang_devices == "0,1"


def test_secrets_are_not_shown() -> None:
    config = sglang(
        command=["x"],
        api_key="sk-one",
        env={"HF_TOKEN": "hf-two", "PLAIN": "three"},
        server_args={"admin_api_key": "four-4", "max_total_tokens": "4096"},
    )
    launch = plan_launch(config, port=31000)
    shown = " ".join(launch.shown_command)
    assert shown == f"x {' '.join(BASE)} --api-key *** --admin-api-key *** --max-total-tokens 4096"
    assert set(launch.secrets) == {"sk-one", "hf-two", "four-4"}
    emulator = EmulatorServer(backend="emulator", model_path="m", api_key="sk-one")
    launch = plan_launch(emulator, port=1)
    assert "sk-one" not in launch.command  # other users can read a command line
    assert launch.env["QUANTGUARD_EMULATOR_API_KEY"] == "sk-one"
