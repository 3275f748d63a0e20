"""What a recording says of its server: nothing that differs from start to start or names this machine."""

from __future__ import annotations

from dataclasses import replace

from pytest_quantguard.config import EmulatorServer
from pytest_quantguard.measure.identity import describe_server
from pytest_quantguard.serving.answers import Capabilities

SAID = Capabilities(
    kind="emulator",
    version="0.1.0",
    model_path="/somewhere/models/tiny",
    dtype="bfloat16",
    quantization=None,
    kv_cache_dtype="auto",
    vocab_size=512,
    context_length=256,
    flat_logprobs=True,
    forced_decode="emulator_field",
    deterministic=None,
    radix_cache=True,
    chunked_prefill_size=4096,
    device="cpu",
)
ASKED = EmulatorServer(backend="emulator", model_path="tiny")


def record(**arguments: object) -> dict[str, object]:
    return describe_server(ASKED, replace(SAID, server_args=arguments)).model_dump()


def test_two_starts_of_one_server_are_recorded_alike_at_any_depth() -> None:
    first = record(
        port=1, page_size=16, quantguard_emulator={"process_id": 7, "running": 0, "vocab_size": 512}
    )
    second = record(
        port=2, page_size=16, quantguard_emulator={"process_id": 8, "running": 3, "vocab_size": 512}
    )
    assert first == second
    assert first["arguments"] == {"page_size": 16, "quantguard_emulator": {"vocab_size": 512}}


def test_no_folder_of_this_machine_is_recorded() -> None:
    said = record(
        model_path="/somewhere/models/tiny", quantguard_emulator={"model_folder": "/somewhere/models/tiny"}
    )
    assert "/somewhere" not in str(said)
