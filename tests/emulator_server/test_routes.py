"""The other routes, on a tiny model: descriptions, tokens, OpenAI's, control."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_quantguard.emulator.faults import FAULTS

from .processes import TINY, Emulator, emulator


def test_server_info_names_model_and_arguments(tiny: Emulator) -> None:
    info = tiny.get("/server_info").json()
    assert info == {**tiny.get("/get_server_info").json()}
    assert info["model_path"] == str(TINY)
    assert (info["port"], info["quantization"], info["kv_cache_dtype"]) == (tiny.port, None, "auto")
    own = info["quantguard_emulator"]
    assert own["forced_output_ids"] is True
    assert (own["vocab_size"], own["context_length"], own["faults"]) == (512, 512, [])
    assert own["process_id"] == tiny.process.pid


def test_model_info_and_models(tiny: Emulator) -> None:
    info = tiny.get("/model_info").json()
    assert info["architectures"] == ["LlamaForCausalLM"]
    assert info["model_type"] == "llama"
    card = tiny.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == (str(TINY), 512)


def test_openapi_names_the_fields_that_a_client_looks_for(tiny: Emulator) -> None:
    schema = tiny.get("/openapi.json").json()
    fields = schema["components"]["schemas"]["GenerateReqInput"]["properties"]
    assert {"return_flat_raw_top_logprobs", "forced_output_ids", "input_ids"} <= set(fields)
    assert {"post", "put"} == set(schema["paths"]["/generate"])


def test_metrics_count(tiny: Emulator) -> None:
    before = metrics(tiny)
    tiny.generate(
        {
            "input_ids": [5, 6, 7],
            "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
        }
    )
    after = metrics(tiny)
    assert after["sglang:prompt_tokens_total"] - before["sglang:prompt_tokens_total"] == 3
    assert after["sglang:generation_tokens_total"] - before["sglang:generation_tokens_total"] == 4
    assert after["sglang:num_requests_total"] - before["sglang:num_requests_total"] == 1
    assert after["sglang:num_running_reqs"] == 0


def metrics(server: Emulator) -> dict[str, float]:
    """/metrics, by name."""
    lines = [line for line in server.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_tokenize_and_detokenize(tiny: Emulator) -> None:
    answer = tiny.post("/tokenize", {"prompt": ["The capital", "ü"]}).json()
    assert answer["count"] == [len(ids) for ids in answer["tokens"]]
    assert tiny.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"text": ["The capital", "ü"]}
    assert tiny.post("/detokenize", {"tokens": [2]}).json() == {"text": ""}
    assert tiny.post("/detokenize", {"tokens": [2], "skip_special_tokens": False}).json() == {
        "text": "<|im_end|>"
    }
    assert tiny.post("/detokenize", {"tokens": []}).json() == {"text": ""}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": 3}),
        ("/tokenize", []),
        ("/detokenize", {"tokens": [512]}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": None}),
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": ["hi"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "stream": True, "logprobs": True},
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "frequency_penalty": 1}),
    ],
)
def test_what_openai_routes_refuse(tiny: Emulator, path: str, body: Any) -> None:
    response = tiny.post(path, body)
    answer = response.json()
    assert response.status_code == 400
    assert answer["object"] == "error"
    assert answer["message"]


def test_completions_with_echo_hold_the_prompts_logprobs(tiny: Emulator) -> None:
    body = {
        "prompt": "The capital",
        "max_tokens": 3,
        "temperature": 0,
        "logprobs": 2,
        "echo": True,
        "ignore_eos": True,
    }
    choice = tiny.post("/v1/completions", body).json()["choices"][0]
    count = tiny.post("/tokenize", {"prompt": "The capital"}).json()["count"]
    assert choice["text"].startswith("The capital")
    assert len(choice["logprobs"]["token_logprobs"]) == count + 3
    assert choice["logprobs"]["token_logprobs"][0] is None


def test_chat_uses_the_models_template(tiny: Emulator) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}]}
    ]
    answer = tiny.post(
        "/v1/chat/completions", {"messages": messages, "max_tokens": 2, "temperature": 0}
    ).json()
    text = "<|im_start|>user\nHi you<|im_end|>\n<|im_start|>assistant\n"
    assert answer["usage"]["prompt_tokens"] == tiny.post("/tokenize", {"prompt": text}).json()["count"]
    assert (
        tiny.post("/tokenize", {"messages": messages}).json()
        == tiny.post("/tokenize", {"prompt": text}).json()
    )


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_streamed_completions_add_up(tiny: Emulator, chat: bool) -> None:
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if chat else {"prompt": "Once"}
    body = {**prompt, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    tiny.post("/flush_cache")
    whole = tiny.post(path, body).json()["choices"][0]
    expected = whole["message"]["content"] if chat else whole["text"]
    tiny.post("/flush_cache")
    response = tiny.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    lines = [line.removeprefix("data: ") for line in response.text.strip().split("\n\n")]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    usage = chunks.pop()
    assert usage["usage"]["completion_tokens"] == 30
    choices = [chunk["choices"][0] for chunk in chunks]
    assert (
        "".join(choice["delta"].get("content", "") if chat else choice["text"] for choice in choices)
        == expected
    )
    assert choices[-1]["finish_reason"] == "length"


def test_an_unknown_fault_is_refused_and_nothing_changes(tiny: Emulator) -> None:
    response = tiny.post("/quantguard/faults", {"faults": ["no_such_fault"]})
    assert response.status_code == 400
    assert "no_such_fault" in response.json()["error"]["message"]
    for body in ({"faults": "x"}, [], {"faults": [1]}, {}):
        assert tiny.post("/quantguard/faults", body).status_code == 400
    assert tiny.get("/quantguard/faults").json() == {"faults": []}


def test_a_fault_is_switched_on_and_off_in_the_running_server(tiny: Emulator) -> None:
    body = {
        "input_ids": [5, 6, 7, 8],
        "sampling_params": {"temperature": 0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 512,
    }
    clean = tiny.generate(body)["meta_info"]["input_top_logprobs"]
    assert "lm_head_zero" in FAULTS
    assert tiny.post("/quantguard/faults", {"faults": ["lm_head_zero"]}).json() == {
        "faults": ["lm_head_zero"]
    }
    assert tiny.get("/server_info").json()["quantguard_emulator"]["faults"] == ["lm_head_zero"]
    broken = tiny.generate(body)["meta_info"]["input_top_logprobs"]
    assert {round(value, 4) for value, _, _ in broken[1]} == {-6.2383}  # ln(1/512): all tokens alike
    assert tiny.post("/quantguard/faults", {"faults": []}).json() == {"faults": []}
    tiny.post("/flush_cache")
    assert tiny.generate(body)["meta_info"]["input_top_logprobs"] == clean


def test_an_api_key_is_asked_for_except_by_health_and_metrics(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with emulator(tmp_path_factory.mktemp("key") / "server.log", TINY, "--api-key", "s3cret") as server:
        assert server.get("/health_generate").status_code == 200
        assert server.get("/metrics").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            response = server.get("/server_info", headers=headers)
            assert (response.status_code, response.json()) == (401, {"error": "Unauthorized"})
        response = server.get("/server_info", headers={"Authorization": "Bearer s3cret"})
        assert response.json()["api_key"] == "<redacted>"
        assert "s3cret" not in response.text
        assert "s3cret" not in server.log
