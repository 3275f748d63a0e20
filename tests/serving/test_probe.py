"""What servers say of themselves, read from recorded answers and from older route names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_quantguard.errors import RequestRejectedError
from pytest_quantguard.serving.client import Client
from pytest_quantguard.serving.probe import model_config
from pytest_quantguard.serving.unlikely_ids import unlikely_ids
from tests.serving.samples import sample
from tests.serving.scripted import Call, Reply, ScriptedServer, as_json


def serving(answers: dict[str, Any]) -> Any:
    def respond(call: Call) -> Reply:
        return as_json(answers[call.path]) if call.path in answers else as_json({"detail": "Not Found"}, 404)

    return respond


RECORDED = {
    "/server_info": "GET_server_info",
    "/model_info": "GET_model_info",
    "/v1/models": "GET_v1_models",
    "/openapi.json": "GET_openapi",
}


def test_a_recorded_server() -> None:
    answers = {route: sample(name)["response"] for route, name in RECORDED.items()}
    with ScriptedServer(serving(answers)) as server, Client(server.url) as client:
        found = client.probe()
        assert client.context_length == 8192
        assert client.vocab_size is None  # config.json of "smollm2-135m" is not on this machine
    assert (found.kind, found.version, found.model_path) == ("sglang", "0.5.23", "smollm2-135m")
    assert (found.dtype, found.quantization, found.kv_cache_dtype, found.device) == (
        "auto",
        None,
        "auto",
        "cpu",
    )
    assert found.flat_logprobs
    assert found.forced_decode is None
    assert found.deterministic is False
    assert found.radix_cache is True
    assert found.chunked_prefill_size == 4096
    assert found.server_args["attention_backend"] == "torch_native"
    assert "internal_states" not in found.server_args


def test_what_a_server_says_is_kept_without_its_secrets() -> None:
    """A real server repeats its keys, by name and in the command that it was launched with."""
    info = {
        "version": "0.5.23",
        "model_path": "m",
        "api_key": "sk-one",
        "launch_command": "--model-path m --api-key sk-one --admin-api-key=sk-two --port 3",
        "nested": {"list": ["as sk-two says"]},
    }
    with ScriptedServer(serving({"/server_info": info})) as server, Client(server.url) as client:
        said = client.probe().server_args
    assert said["api_key"] == "***"
    assert said["launch_command"] == "--model-path m --api-key *** --admin-api-key=*** --port 3"
    assert said["nested"] == {"list": ["as *** says"]}
    assert said["model_path"] == "m"


def test_an_older_server_by_its_older_routes() -> None:
    info = sample("old59_s8/GET_server_info")["response"]
    answers = {"/get_server_info": info, "/get_model_info": sample("old59_s8/GET_get_model_info")["response"]}
    with ScriptedServer(serving(answers)) as server, Client(server.url) as client:
        found = client.probe()
    assert (found.kind, found.version) == ("sglang", "0.5.9")
    assert not found.flat_logprobs
    assert found.context_length is None
    assert [call.path for call in server.calls][:4] == [
        "/server_info",
        "/get_server_info",
        "/model_info",
        "/get_model_info",
    ]


def test_vocabulary_and_context_of_a_local_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 151936}), encoding="utf-8")
    answers = {"/server_info": {"version": "0.5.23", "model_path": str(tmp_path), "context_length": 4096}}
    with ScriptedServer(serving(answers)) as server, Client(server.url) as client:
        client.probe()
        assert (client.vocab_size, client.context_length) == (151936, 4096)


def test_config_from_the_hugging_face_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"vocab_size": 7}', encoding="utf-8")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert model_config("Qwen/Qwen3-8B") == {"vocab_size": 7}
    assert model_config("Qwen/Qwen3-8B", "abc") == {"vocab_size": 7}
    assert model_config("Qwen/Qwen3-8B", "other") == {}
    assert model_config("Qwen/Qwen3-4B") == {}
    assert model_config(None) == {}
    odd: list[Any] = ["../snapshots/abc", "ab*", "**", "/", ["abc"], 7, True, {"a": 1}, "\0"]
    for revision in odd:
        assert model_config("Qwen/Qwen3-8B", revision) == {}, "what a server says is a name, not a pattern"
    for path in odd[4:]:
        assert model_config(path) == {}


def test_something_else_on_the_url_is_said() -> None:
    with (
        ScriptedServer(serving({})) as server,
        Client(server.url) as client,
        pytest.raises(RequestRejectedError, match="answers neither /server_info nor /model_info"),
    ):
        client.probe()


def tokenizer_folder(folder: Path) -> Path:
    added = [
        {"id": 5, "content": "<|im_end|>", "special": True},
        {"id": 6, "content": "<|spare|>", "special": True},
        {"id": 7, "content": "<tool_call>", "special": True},
    ]
    model = {"vocab": {"a": 0, "b": 1, "<s>": 2, "c": 3, "d": 4}}
    (folder / "tokenizer.json").write_text(
        json.dumps({"added_tokens": added, "model": model}), encoding="utf-8"
    )
    return folder


def test_unlikely_ids_are_padding_rows_then_spare_special_tokens(tmp_path: Path) -> None:
    with ScriptedServer(serving({})) as server, Client(server.url) as client:
        assert unlikely_ids(client.transport, str(tokenizer_folder(tmp_path)), 10) == (8, 9, 6)
        assert server.calls == []


def test_unlikely_ids_by_the_server_where_the_folder_is_elsewhere() -> None:
    texts = ["<|endoftext|>", "<|reserved_5|>", "the", "", "[PAD7]"]
    with ScriptedServer(serving({"/detokenize": {"text": texts}})) as server, Client(server.url) as client:
        assert unlikely_ids(client.transport, None, 5) == (3, 1, 4)
        assert server.bodies("/detokenize")[0]["tokens"] == [[0], [1], [2], [3], [4]]
    with ScriptedServer(serving({})) as server, Client(server.url) as client:
        assert unlikely_ids(client.transport, None, 5) == ()


@pytest.mark.parametrize(
    "said",
    [
        {"model_path": "m\0"},
        {"model_path": "m" * 5000},
        {"model_path": "org/m", "revision": "/etc/*"},
        {"model_path": "org/m", "revision": "\0"},
        {"model_path": ["m"], "version": {}, "context_length": -1, "vocab_size": "many"},
    ],
)
def test_what_no_model_can_be_called_is_taken_as_unknown(said: dict[str, Any]) -> None:
    answers = {"/server_info": {"version": "1", **said}, "/v1/models": {"data": ["m"]}, "/openapi.json": []}
    with ScriptedServer(serving(answers)) as server, Client(server.url) as client:
        found = client.probe()
        assert (found.vocab_size, found.context_length) == (None, None)
