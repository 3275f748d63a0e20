"""Faults as a client sees them: what a broken server answers, and that every fault goes on and off."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from pytest_quantguard.emulator.faults import FAULTS

from .processes import TINY, Emulator, emulator

PROMPT = [54, 74, 71, 278, 67, 82, 292, 291]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """A server with NVFP4 weights and an FP8 cache: faults of all kinds have something to act on."""
    log = tmp_path_factory.mktemp("faults") / "server.log"
    with emulator(log, TINY, "--quantization", "nvfp4", "--kv-cache-dtype", "fp8_e4m3") as running:
        yield running


@contextlib.contextmanager
def fault(server: Emulator, *specifications: str) -> Iterator[None]:
    """The faults are on inside."""
    switched = server.post("/quantguard/faults", {"faults": list(specifications)})
    assert switched.status_code == 200, switched.text
    try:
        yield
    finally:
        assert server.post("/quantguard/faults", {"faults": []}).json() == {"faults": []}


def batch(size: int, **fields: Any) -> dict[str, Any]:
    return {
        "input_ids": [PROMPT[: 4 + i] for i in range(size)],
        "sampling_params": {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 4,
        **fields,
    }


def test_nan_is_an_error_in_json_and_passes_in_bytes(quantized: Emulator) -> None:
    with fault(quantized, "nan_at_batch"):
        response = quantized.post("/generate", batch(4))
        assert response.status_code == 400
        assert response.json() == {
            "error": {"message": "Out of range float values are not JSON compliant: nan"}
        }
        assert quantized.post("/generate", batch(1)).status_code == 200
        streamed = quantized.post("/generate", batch(4, stream=True)).text
        assert "not JSON compliant" in streamed
        assert streamed.endswith("data: [DONE]\n\n")
    assert quantized.post("/generate", batch(4)).status_code == 200


def test_the_sentinel_is_answered_as_sglang_writes_it(quantized: Emulator) -> None:
    with fault(quantized, "logprob_sentinel"):
        meta = quantized.generate(batch(1))[0]["meta_info"]
    assert {row[0] for row in meta["output_token_logprobs"]} == {0.0}
    assert min(cell[0] for row in meta["output_top_logprobs"] for cell in row) == -3.4028234663852886e38


def test_permuted_rows_keep_the_ids_of_their_places(quantized: Emulator) -> None:
    fields = {"rid": ["a", "b", "c"], "logprob_start_len": 0}
    clean = quantized.generate(batch(3, **fields))
    quantized.post("/flush_cache")
    with fault(quantized, "rows_permuted"):
        permuted = quantized.generate(batch(3, **fields))
    assert [answer["meta_info"]["id"] for answer in permuted] == ["a", "b", "c"]
    lengths = [len(answer["meta_info"]["input_token_logprobs"]) for answer in permuted]
    expected = [len(answer["meta_info"]["input_token_logprobs"]) for answer in clean]
    assert lengths != expected
    assert sorted(lengths) == sorted(expected)


def test_faults_come_together_and_are_listed_with_their_parameters(quantized: Emulator) -> None:
    specifications = ["scale_swizzle:module=model.layers.0.self_attn.q_proj", "logprob_temperature"]
    with fault(quantized, *specifications):
        assert quantized.get("/quantguard/faults").json() == {"faults": specifications}
        assert quantized.get("/server_info").json()["quantguard_emulator"]["faults"] == specifications


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAULTS))
def test_every_fault_is_switched_on_and_leaves_no_trace(quantized: Emulator, name: str) -> None:
    body = batch(4, logprob_start_len=0)
    assert quantized.post("/flush_cache").status_code == 200
    clean = quantized.generate(body)
    with fault(quantized, name):
        assert quantized.post("/generate", body).status_code in (200, 400)
    after = quantized.generate(body)
    for mine, theirs in zip(after, clean, strict=True):
        assert mine["output_ids"] == theirs["output_ids"]
        assert mine["meta_info"]["input_top_logprobs"] == theirs["meta_info"]["input_top_logprobs"]


def test_a_server_starts_with_its_faults(tmp_path_factory: pytest.TempPathFactory) -> None:
    log = tmp_path_factory.mktemp("started") / "server.log"
    with emulator(
        log, TINY, "--fault", "lm_head_zero", "--fault", "logprob_temperature:temperature=0.5"
    ) as server:
        faults = server.get("/quantguard/faults").json()["faults"]
        assert faults == ["lm_head_zero", "logprob_temperature:temperature=0.5"]
        values = {
            cell[0]
            for row in server.generate(batch(1))[0]["meta_info"]["output_top_logprobs"]
            for cell in row
        }
        assert {round(value, 4) for value in values} == {-6.2383}  # ln(1/512): all tokens alike
    assert "lm_head_zero" in server.log
