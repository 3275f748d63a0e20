"""The client, forced decode and attaching against a real SGLang server (BF16, no overlap scheduler, API
key)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import requests

from pytest_quantguard.baseline.store import read_recording
from pytest_quantguard.config import AttachExpectation, AttachServer
from pytest_quantguard.errors import RequestRejectedError, ServerDiedError, ServerStartError
from pytest_quantguard.logprobs.arrays import TopLogprobs
from pytest_quantguard.measure.decode import token_tuple
from pytest_quantguard.serving import client as client_module
from pytest_quantguard.serving.answers import Answer, GenerateRequest
from pytest_quantguard.serving.client import Client
from pytest_quantguard.serving.launch import RunningServer, start
from tests.integration.comparing import (
    forced_batch,
    mean_kl,
    own_differences,
    prefill_of,
    top_differences,
)
from tests.integration.gating import STORED_BASELINE, STORED_SUITE, run_gate
from tests.integration.real_sglang.server import VERSION, server_config

pytestmark = pytest.mark.sglang
API_KEY = "key-of-this-test"


@pytest.fixture(scope="module")
def server(
    sglang_venv: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    config = server_config(sglang_venv, smollm2, api_key=API_KEY, server_args={"enable_metrics": True})
    log = tmp_path_factory.mktemp("client") / "server.log"
    with start(config, log_path=log, progress=print) as running:
        print(f"ready after {running.seconds_to_ready:.1f} s")
        yield running


def prompts(answers: list[Answer]) -> list[TopLogprobs]:
    return [answer.prompt for answer in answers if answer.prompt is not None]


def outputs(answers: list[Answer]) -> list[TopLogprobs]:
    return [answer.output for answer in answers if answer.output is not None]


def test_it_is_what_was_started(server: RunningServer, smollm2: Path) -> None:
    found = server.capabilities
    assert (found.kind, found.version) == ("sglang", VERSION)
    assert found.model_path == str(smollm2)
    assert (found.vocab_size, found.context_length) == (49152, 8192)
    assert found.flat_logprobs
    assert found.forced_decode == "custom_logit_processor"
    assert found.radix_cache
    assert found.device == "cpu"
    assert server.command is not None
    assert API_KEY not in " ".join(server.command)


def test_greedy_text_and_tokenizer(server: RunningServer) -> None:
    ids = server.client.tokenize("The capital of France is")
    assert ids == [504, 3575, 282, 4649, 314]
    assert server.client.detokenize(ids) == "The capital of France is"
    (answer,) = server.client.generate([GenerateRequest(tuple(ids), max_new_tokens=4)])
    assert answer.text.startswith(" Paris")


def test_flat_and_nested_answers_are_equal(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = [
        replace(request, max_new_tokens=3, logprob_start_len=0, forced_ids=None) for request in forced_batch()
    ]
    server.client.flush_cache()
    flat = server.client.generate(batch, top_logprobs=256)
    whole_body = client_module.generate_body

    def without_flags(*args: object, **options: object) -> dict[str, object]:
        body = whole_body(*args, **options)  # type: ignore[arg-type]
        return {name: value for name, value in body.items() if "flat" not in name}

    monkeypatch.setattr(client_module, "generate_body", without_flags)
    server.client.flush_cache()
    nested = server.client.generate(batch, top_logprobs=256)
    for one, other in zip(prompts(flat) + outputs(flat), prompts(nested) + outputs(nested), strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        np.testing.assert_array_equal(one.chosen_logprobs, other.chosen_logprobs)
        assert one.width == (256 if one.positions else 0)


def test_prefill_is_repeatable_and_batches_keep_their_rows(server: RunningServer) -> None:
    batch = prefill_of(forced_batch())
    server.client.flush_cache()
    together = prompts(server.client.generate(batch, top_logprobs=64))
    server.client.flush_cache()
    again = prompts(server.client.generate(batch, top_logprobs=64))
    alone = [prompts(server.client.generate([request], top_logprobs=64))[0] for request in batch]
    for first, second in zip(together, again, strict=True):
        np.testing.assert_array_equal(first.logprobs, second.logprobs)
    assert mean_kl(alone, together) < 1e-3


def test_a_long_prompt_returns_only_its_span(server: RunningServer) -> None:
    """8,000 tokens, prefilled in two chunks; log-probabilities of the last 32 only."""
    rng = np.random.default_rng(0)
    ids = tuple(rng.integers(100, 40_000, 8_000).tolist())
    server.client.flush_cache()
    (answer,) = server.client.generate([GenerateRequest(ids, logprob_start_len=7_967)], top_logprobs=256)
    assert answer.prompt is not None
    assert answer.prompt.token_ids.shape == (32, 256)
    assert answer.prompt.chosen_ids.tolist() == list(ids[-32:])
    assert answer.cached_tokens == 0


def test_flush_empties_the_prefix_cache(server: RunningServer) -> None:
    request = GenerateRequest(tuple(range(100, 164)), max_new_tokens=1)
    server.client.flush_cache()
    cold = server.client.generate([request])[0].cached_tokens
    warm = server.client.generate([request])[0].cached_tokens
    server.client.flush_cache()
    assert (cold, warm, server.client.generate([request])[0].cached_tokens) == (0, 63, 0)


def test_forced_decode_of_the_greedy_tokens_changes_nothing(server: RunningServer) -> None:
    """Same kernels, same batch: what the processor hides and the client restores is what was there before."""
    free = [
        replace(request, forced_ids=None, max_new_tokens=len(request.forced_ids or ()))
        for request in forced_batch()
    ]
    server.client.flush_cache()
    greedy = server.client.generate(free, top_logprobs=64)
    forced = [
        replace(request, max_new_tokens=0, forced_ids=answer.output_ids)
        for request, answer in zip(free, greedy, strict=True)
    ]
    server.client.flush_cache()
    restored = server.client.generate(forced, top_logprobs=64)
    assert np.abs(own_differences(outputs(greedy), outputs(restored))).max() < 2e-6
    for one, other in zip(outputs(greedy), outputs(restored), strict=True):
        assert other.width == 64
        assert np.abs(top_differences(one, other, 64)).max() < 4e-6
        assert np.abs(one.logprobs - other.logprobs)[:, :60].max() < 4e-6


@pytest.mark.parametrize("size", [1, 8])
def test_forced_decode_equals_prefill_within_bf16_noise(server: RunningServer, size: int) -> None:
    batch = forced_batch()[-size:]
    server.client.flush_cache()
    prefill = prompts(server.client.generate(prefill_of(batch), top_logprobs=64))
    server.client.flush_cache()
    decode = outputs(server.client.generate(batch, top_logprobs=64))
    differences = own_differences(prefill, decode)
    rms = float(np.sqrt((differences**2).mean()))
    most = float(np.abs(differences).max())
    kl = mean_kl(prefill, decode)
    print(
        f"forced decode against prefill, {size} prompts: rms {rms:.3f}, most "
        f"{np.abs(differences).max():.3f}, KL {kl:.1e}"
    )
    assert rms < 0.06
    assert most < 0.2
    assert kl < 1e-3


def test_forced_decode_differs_from_prefill_as_decode_does_from_itself(server: RunningServer) -> None:
    """The text of the stored suite: rounding moves decode away from prefill as far as it moves decode of one
    prompt away from decode of eight, with the same tokens."""
    stored = read_recording(STORED_BASELINE).prompts[:16]
    batch = [
        GenerateRequest(token_tuple(prompt.prefix_ids), forced_ids=token_tuple(prompt.span_ids))
        for prompt in stored
    ]

    def measured(requests: list[GenerateRequest], size: int) -> list[TopLogprobs]:
        rows = []
        for first in range(0, len(requests), size):
            server.client.flush_cache()
            answers = server.client.generate(requests[first : first + size], top_logprobs=64)
            rows += outputs(answers) if requests[0].forced_ids is not None else prompts(answers)
        return rows

    prefill, decode = measured(prefill_of(batch), 8), measured(batch, 8)
    alone = measured(batch[:4], 1)
    rms = {}
    for name, one, other in (
        ("prefill, decode of eight", prefill, decode),
        ("prefill, decode alone", prefill[:4], alone),
        ("decode alone, of eight", alone, decode[:4]),
    ):
        differences = np.abs(own_differences(one, other))
        rms[name] = float(np.sqrt((differences**2).mean()))
        print(
            f"{name}, {differences.size} positions: rms {rms[name]:.3f}, 99 % within "
            f"{np.quantile(differences, 0.99):.3f}, most {differences.max():.3f}, "
            f"KL {mean_kl(one, other):.1e}"
        )
        assert rms[name] < 0.08
        assert mean_kl(one, other) < 2e-3
    assert rms["prefill, decode of eight"] < 2 * rms["decode alone, of eight"]


def test_dangerous_requests_stay_here_and_errors_come_back(server: RunningServer) -> None:
    good = GenerateRequest((504, 3575), logprob_start_len=0)
    with pytest.raises(RequestRejectedError, match="refused"):
        server.client.generate([replace(good, input_ids=(49152,))])
    with pytest.raises(RequestRejectedError, match="refused"):
        server.client.generate([good], top_logprobs=49153)
    blind = Client(server.url, api_key=API_KEY, vocab_size=49152)
    with pytest.raises(RequestRejectedError, match="longer than the model's context length"):
        blind.generate([GenerateRequest((504,) * 9000)])
    blind.close()
    server.check_alive()


def test_the_api_key_is_asked_for(server: RunningServer) -> None:
    for key, message in ((None, "none was sent; set api_key"), ("wrong", "the one sent was not accepted")):
        with Client(server.url, api_key=key) as client, pytest.raises(RequestRejectedError, match=message):
            client.probe()


def test_metrics_are_served(server: RunningServer) -> None:
    session = requests.Session()
    session.trust_env = False
    assert (
        "sglang:" in session.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {API_KEY}"}).text
    )


def test_attach(server: RunningServer, smollm2: Path, tmp_path: Path) -> None:
    expect = AttachExpectation(model_path=str(smollm2), version=VERSION)
    config = AttachServer(backend="attach", url=server.url + "/", api_key=API_KEY, expect=expect)
    with start(config, log_path=tmp_path / "log") as attached:
        assert attached.command is None
        assert attached.notes == ()
        attached.check_alive()
        (answer,) = attached.client.generate([GenerateRequest((504, 3575, 282, 4649, 314), max_new_tokens=1)])
        assert answer.text == " Paris"
    server.check_alive()  # attached servers are left running
    other = config.model_copy(update={"expect": AttachExpectation(quantization="modelopt_fp4")})
    with pytest.raises(ServerStartError, match=r"'modelopt_fp4' +None"):
        start(other, log_path=tmp_path / "log")


def test_a_gate_attaches_with_a_key_from_the_environment(
    server: RunningServer, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole gate against the server that runs already; BF16 here by the emulator's stored baseline."""
    monkeypatch.setenv("KEY_OF_THE_SERVER", API_KEY)
    candidate = {
        "backend": "attach",
        "url": server.url,
        "api_key": "${KEY_OF_THE_SERVER}",
        "expect": {"model_path": str(smollm2), "kv_cache_dtype": "auto", "version": VERSION},
    }
    config = {
        "candidate": candidate,
        "baseline": str(STORED_BASELINE),
        "suite": STORED_SUITE,
        "accuracy": {"kl_mean": {"max": 2e-3}, "agreement": {"min": 0.97}},
    }
    gate = run_gate(tmp_path, "attached", config)
    assert gate.exit_code == 0, gate.output
    assert gate.result is not None
    assert gate.result.candidate.url == server.url
    assert gate.result.candidate.command is None
    written = (tmp_path / ".quantguard" / "attached" / "result.json").read_text(encoding="utf-8")
    assert API_KEY not in written + gate.output
    server.check_alive()  # the gate leaves it running
    monkeypatch.setenv("KEY_OF_THE_SERVER", "another")
    refused = run_gate(tmp_path, "refused", config)
    assert refused.exit_code == 1
    assert "the one sent was not accepted; set api_key" in " ".join(refused.output.split())


def test_a_killed_scheduler_is_reported_and_leaves_nothing(server: RunningServer) -> None:
    """The last test of the module: it ends the shared server."""
    assert server._process is not None
    main = psutil.Process(server._process.pid)
    tree = [main, *main.children(recursive=True)]
    scheduler = next(process for process in tree if "scheduler" in " ".join(process.cmdline()))
    scheduler.kill()
    request = GenerateRequest((504, 3575, 282, 4649, 314), max_new_tokens=64)
    with pytest.raises(ServerDiedError, match=r"/generate with 1 prompt"):
        server.client.generate([request])
    assert server._process.wait(60) is not None
    with pytest.raises(ServerDiedError, match="ended with exit code"):
        server.check_alive()
    server.stop()
    assert API_KEY not in server.log_path.read_text(encoding="utf-8")
    assert [process.pid for process in tree if process.is_running()] == []
