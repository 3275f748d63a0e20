"""Forced decode under SGLang's default scheduler, with chunked prefill and retraction; a killed parent; and
the emulator beside a real server, both in float32, where no BF16 rounding hides a difference."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from pytest_quantguard.config import EmulatorServer
from pytest_quantguard.logprobs.arrays import TopLogprobs
from pytest_quantguard.serving.answers import Answer, GenerateRequest
from pytest_quantguard.serving.launch import RunningServer, start
from tests.integration.comparing import forced_batch, mean_kl, own_differences, prefill_of
from tests.integration.real_sglang.server import server_config

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def bf16(
    sglang_venv: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """The overlap scheduler, started by the newer entry point."""
    config = server_config(
        sglang_venv,
        smollm2,
        command=[str(sglang_venv / "bin" / "sglang"), "serve"],
        server_args={"disable_overlap_schedule": None},
    )
    with start(config, log_path=tmp_path_factory.mktemp("overlap") / "server.log", progress=print) as running:
        yield running


@pytest.fixture(scope="module")
def float32(
    sglang_venv: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """Float32, chunks of 32 tokens, and a request retracted every fourth pass (SGLang's own test switch)."""
    config = server_config(
        sglang_venv,
        smollm2,
        dtype="float32",
        server_args={"disable_overlap_schedule": None, "chunked_prefill_size": 32},
        env={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "4"},
    )
    with start(config, log_path=tmp_path_factory.mktemp("float32") / "server.log", progress=print) as running:
        yield running


def rows_of(answers: list[Answer], side: str) -> list[TopLogprobs]:
    return [rows for answer in answers if (rows := getattr(answer, side)) is not None]


@pytest.mark.parametrize("size", [1, 8])
def test_forced_decode_equals_prefill_within_bf16_noise(bf16: RunningServer, size: int) -> None:
    batch = forced_batch()[-size:]
    bf16.client.flush_cache()
    prefill = rows_of(bf16.client.generate(prefill_of(batch), top_logprobs=64), "prompt")
    bf16.client.flush_cache()
    decode = rows_of(bf16.client.generate(batch, top_logprobs=64), "output")
    differences = own_differences(prefill, decode)
    rms, most, kl = (
        float(np.sqrt((differences**2).mean())),
        float(np.abs(differences).max()),
        mean_kl(prefill, decode),
    )
    print(f"overlap, {size} prompts: rms {rms:.3f}, most {most:.3f}, KL {kl:.1e}")
    assert rms < 0.06
    assert most < 0.2
    assert kl < 1e-3


def test_a_killed_parent_leaves_nothing(bf16: RunningServer) -> None:
    """Ends the BF16 server; its scheduler and detokenizer are its children."""
    assert bf16._process is not None
    main = psutil.Process(bf16._process.pid)
    tree = [main, *main.children(recursive=True)]
    assert len(tree) >= 3
    os.kill(main.pid, signal.SIGKILL)
    assert bf16._process.wait(30) == -signal.SIGKILL
    bf16.stop()
    assert [process.pid for process in tree if process.is_running()] == []


@pytest.mark.parametrize("size", [1, 8])
def test_forced_decode_equals_prefill_in_float32(float32: RunningServer, size: int) -> None:
    batch = forced_batch()[-size:]
    prefill = [
        rows_of(float32.client.generate([one], top_logprobs=64), "prompt")[0] for one in prefill_of(batch)
    ]
    float32.client.flush_cache()
    decode = rows_of(float32.client.generate(batch, top_logprobs=64), "output")
    differences = np.abs(own_differences(prefill, decode))
    print(
        f"float32, {size} prompts: rms {np.sqrt((differences**2).mean()):.1e}, most {differences.max():.1e}"
    )
    assert np.sqrt((differences**2).mean()) < 2e-5
    assert differences.max() < 1e-4


def test_forced_decode_survives_chunks_and_retraction(float32: RunningServer) -> None:
    """Long prompts are prefilled in chunks beside running decodes, and requests are thrown back on the
    way."""
    rng = np.random.default_rng(0)
    batch = [
        GenerateRequest(
            tuple(rng.integers(100, 40_000, length).tolist()),
            forced_ids=tuple(rng.integers(100, 40_000, 32).tolist()),
        )
        for length in (50, 60, 41, 70, 33, 64, 20, 90)
    ]
    float32.client.flush_cache()
    decode = rows_of(float32.client.generate(batch, top_logprobs=64), "output")
    log = float32.log_path.read_text(encoding="utf-8")
    assert "Testing retraction. #retracted_reqs: 1" in log
    prefill = [
        rows_of(float32.client.generate([one], top_logprobs=64), "prompt")[0] for one in prefill_of(batch)
    ]
    differences = np.abs(own_differences(prefill, decode))
    assert np.sqrt((differences**2).mean()) < 2e-5
    assert differences.max() < 1e-4


def test_the_emulator_computes_what_the_real_server_does(float32: RunningServer, tmp_path: Path) -> None:
    config = EmulatorServer(backend="emulator", model_path="smollm2-135m", dtype="float32")
    real: list[TopLogprobs] = []
    emulated: list[TopLogprobs] = []
    with start(config, log_path=tmp_path / "emulator.log") as emulator:
        for server, rows in ((float32, real), (emulator, emulated)):
            for request in prefill_of(forced_batch()):
                server.client.flush_cache()
                rows += rows_of(server.client.generate([request], top_logprobs=64), "prompt")
    differences = np.abs(own_differences(real, emulated))
    print(f"real against emulated, float32: most {differences.max():.1e}, KL {mean_kl(real, emulated):.1e}")
    assert differences.max() < 2e-4
    assert mean_kl(real, emulated) < 1e-6
    for one, other in zip(real, emulated, strict=True):
        np.testing.assert_array_equal(one.token_ids[:, 0], other.token_ids[:, 0])
