"""The launcher and the client with the emulator serving a tiny model: the same path as a real server's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pytest_quantguard.config import EmulatorServer
from pytest_quantguard.errors import RequestRejectedError, ServerStartError
from pytest_quantguard.serving.answers import GenerateRequest
from pytest_quantguard.serving.launch import RunningServer, start

MODEL = Path(__file__).parents[1] / "data" / "models" / "bf16-tiny"
VOCAB_SIZE = 512


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    pytest.importorskip("starlette")
    config = EmulatorServer(backend="emulator", model_path=str(MODEL), api_key="emulator-key", threads=1)
    with start(config, log_path=tmp_path_factory.mktemp("emulator") / "server.log") as running:
        yield running


def test_it_says_what_it_is(server: RunningServer) -> None:
    found = server.capabilities
    assert (found.kind, found.forced_decode, found.flat_logprobs) == ("emulator", "emulator_field", True)
    assert (found.vocab_size, found.context_length) == (VOCAB_SIZE, 512)
    assert server.notes == ()
    assert server.command is not None
    assert "emulator-key" not in " ".join(server.command)


def test_forced_decode_equals_prefill_and_greedy(server: RunningServer) -> None:
    prompts = [(1, 2, 3), (4, 5, 6, 7, 8), (9,)]
    free = server.client.generate([GenerateRequest(ids, max_new_tokens=4) for ids in prompts], top_logprobs=8)
    again = server.client.generate(
        [
            GenerateRequest(ids, forced_ids=answer.output_ids)
            for ids, answer in zip(prompts, free, strict=True)
        ],
        top_logprobs=8,
    )
    other = server.client.generate(
        [GenerateRequest(ids, forced_ids=(40, 41, 42)) for ids in prompts], top_logprobs=8
    )
    prefill = server.client.generate(
        [GenerateRequest((*ids, 40, 41, 42), logprob_start_len=len(ids) - 1) for ids in prompts],
        top_logprobs=8,
    )
    for one, two, three, four in zip(free, again, other, prefill, strict=True):
        assert one.output is not None
        assert two.output is not None
        assert three.output is not None
        assert four.prompt is not None
        np.testing.assert_array_equal(one.output.logprobs, two.output.logprobs)
        assert three.output_ids == (40, 41, 42)
        np.testing.assert_allclose(three.output.chosen_logprobs, four.prompt.chosen_logprobs, atol=0.15)
        np.testing.assert_array_equal(three.output.chosen_ids, four.prompt.chosen_ids)


def test_the_whole_vocabulary_can_be_asked(server: RunningServer) -> None:
    (answer,) = server.client.generate(
        [GenerateRequest((1, 2, 3), logprob_start_len=0)], top_logprobs=VOCAB_SIZE
    )
    assert answer.prompt is not None
    np.testing.assert_allclose(np.exp(answer.prompt.logprobs.astype(np.float64)).sum(1), 1, atol=1e-4)


def test_errors_of_the_server_come_back(server: RunningServer) -> None:
    server.client.context_length = None
    with pytest.raises(RequestRejectedError, match="400"):
        server.client.generate([GenerateRequest((1,) * 600)])
    server.check_alive()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_path": "smollm2-136m"}, "model not found"),
        ({"server_args": {"no_such_flag": 1}}, "does not know --no-such-flag"),
        ({"quantization": "nvfp5"}, "nvfp5"),
    ],
)
def test_failed_starts_are_explained(tmp_path: Path, options: dict[str, object], message: str) -> None:
    config = EmulatorServer.model_validate({"backend": "emulator", "model_path": str(MODEL)} | options)
    with pytest.raises(ServerStartError, match=message):
        start(config, log_path=tmp_path / "server.log")
