"""/generate on a tiny model: the fields, checked against each other and against the whole distribution."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
import requests

from .processes import Emulator

PROMPT = [54, 74, 71, 278, 67, 82, 292, 291, 282, 9, 100, 11]
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


def scored(**fields: Any) -> dict[str, Any]:
    """A request that asks for log-probabilities."""
    return {"input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True, **fields}


@pytest.fixture
def server(tiny: Emulator) -> Emulator:
    """A server whose prefix cache is empty."""
    assert tiny.post("/flush_cache").status_code == 200
    return tiny


def test_rows_are_distributions_in_order(server: Emulator) -> None:
    meta = server.generate(scored(logprob_start_len=0, top_logprobs_num=512))["meta_info"]
    assert meta["input_top_logprobs"][0] is None
    assert meta["input_token_logprobs"][0] == [None, PROMPT[0], None]
    rows = [*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]]
    chosen = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
    assert len(rows) == len(PROMPT) - 1 + 6
    for row, (value, token, _) in zip(rows, chosen, strict=True):
        values = np.array([entry[0] for entry in row])
        assert sorted(entry[1] for entry in row) == list(range(512))
        assert np.exp(values).sum() == pytest.approx(1, abs=1e-4)
        assert (np.diff(values) <= 0).all()
        assert {entry[1]: entry[0] for entry in row}[token] == value


def test_greedy_picks_the_best_token(server: Emulator) -> None:
    answer = server.generate(scored(top_logprobs_num=2))
    assert answer["output_ids"] == [row[0][1] for row in answer["meta_info"]["output_top_logprobs"]]
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 6}


@pytest.mark.parametrize("as_bytes", [True, False], ids=["base64", "lists"])
@pytest.mark.parametrize("start", [-1, 0, 5, 11, 12])
def test_flat_rows_equal_nested_ones(server: Emulator, start: int, as_bytes: bool) -> None:
    asked = scored(logprob_start_len=start, top_logprobs_num=7)
    nested = server.generate(asked)["meta_info"]
    server.post("/flush_cache")
    flags = {"return_flat_raw_top_logprobs": True, "return_flat_raw_output_top_logprobs": True}
    flat = server.generate({**asked, **flags, "return_flat_raw_top_logprobs_b64": as_bytes})["meta_info"]
    for side in ("input", "output"):
        values, ids = unpack(flat, side, as_bytes)
        prefix = flat[f"{side}_top_logprobs_null_prefix"]
        rows = nested[f"{side}_top_logprobs"]
        assert rows[:prefix] == [None] * prefix
        assert [[cell[0] for cell in row] for row in rows[prefix:]] == values
        assert [[cell[1] for cell in row] for row in rows[prefix:]] == ids
        assert f"{side}_top_logprobs" not in flat


def unpack(meta: dict[str, Any], side: str, as_bytes: bool) -> tuple[list[list[float]], list[list[int]]]:
    """The flat arrays as nested lists."""
    shape = meta[f"{side}_top_logprobs_shape"]
    if not as_bytes:
        values = np.array(meta[f"{side}_top_logprobs_val_flat"], np.float64)
        ids = np.array(meta[f"{side}_top_logprobs_idx_flat"], np.int64)
    else:
        values = np.frombuffer(base64.b64decode(meta[f"{side}_top_logprobs_val_flat_b64"]), "<f4")
        ids = np.frombuffer(base64.b64decode(meta[f"{side}_top_logprobs_idx_flat_b64"]), "<i4")
        assert meta[f"{side}_top_logprobs_val_flat_b64_dtype"] == "float32"
        assert meta[f"{side}_top_logprobs_idx_flat_b64_dtype"] == "int32"
    return values.astype(np.float64).reshape(shape).tolist(), ids.reshape(shape).tolist()


def test_token_ids_logprob_are_entries_of_the_distribution(server: Emulator) -> None:
    wanted = [5, 300, 5, 0]
    meta = server.generate(scored(logprob_start_len=0, top_logprobs_num=512, token_ids_logprob=wanted))[
        "meta_info"
    ]
    for side in ("input", "output"):
        for row, chosen in zip(meta[f"{side}_top_logprobs"], meta[f"{side}_token_ids_logprobs"], strict=True):
            if row is None:
                assert chosen is None
            else:
                known = {token: value for value, token, _ in row}
                assert chosen == [[known[token], token, None] for token in wanted]


def test_a_batch_gives_each_prompt_its_own_parameters(server: Emulator) -> None:
    body = {
        "input_ids": [PROMPT, PROMPT[:4], PROMPT[:7]],
        "sampling_params": [{**GREEDY, "max_new_tokens": count} for count in (1, 3, 0)],
        "return_logprob": [True, False, True],
        "logprob_start_len": [2, 0, -1],
        "top_logprobs_num": [2, 9, 4],
        "rid": ["a", "b", "c"],
    }
    first, second, third = server.generate(body)
    assert [answer["meta_info"]["id"] for answer in (first, second, third)] == ["a", "b", "c"]
    assert [len(answer["output_ids"]) for answer in (first, second, third)] == [1, 3, 0]
    assert len(first["meta_info"]["input_top_logprobs"]) == len(PROMPT) - 2
    assert len(first["meta_info"]["input_top_logprobs"][1]) == 2
    assert "output_token_logprobs" not in second["meta_info"]
    assert third["meta_info"]["input_token_logprobs"] == []
    assert third["meta_info"]["output_token_logprobs"] == []
    assert len(third["meta_info"]["output_top_logprobs"]) == 1


def test_no_new_tokens_scores_the_prompt(server: Emulator) -> None:
    score = server.generate(
        scored(sampling_params={"temperature": 0, "max_new_tokens": 0}, top_logprobs_num=3)
    )
    server.post("/flush_cache")
    one = server.generate(scored(sampling_params={**GREEDY, "max_new_tokens": 1}, top_logprobs_num=3))
    assert (score["text"], score["output_ids"]) == ("", [])
    assert score["meta_info"]["output_top_logprobs"] == one["meta_info"]["output_top_logprobs"]


def test_forced_tokens_are_emitted_and_scored_as_by_prefill(server: Emulator) -> None:
    forced = [2, 400, 17, 2, 55]
    answer = server.generate(
        scored(sampling_params={"temperature": 0}, forced_output_ids=forced, top_logprobs_num=4)
    )
    assert answer["output_ids"] == forced
    server.post("/flush_cache")
    whole = server.generate(
        scored(
            input_ids=PROMPT + forced,
            logprob_start_len=len(PROMPT) - 1,
            sampling_params={"max_new_tokens": 0},
        )
    )
    decoded = [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]]
    prefilled = [value for value, _, _ in whole["meta_info"]["input_token_logprobs"][1:]]
    assert decoded == pytest.approx(prefilled, abs=0.1)
    chosen = [row[0][1] for row in answer["meta_info"]["output_top_logprobs"]]
    assert chosen != forced


def test_forced_tokens_of_a_batch(server: Emulator) -> None:
    body = {
        "input_ids": [PROMPT, PROMPT[:3], PROMPT[:5]],
        "sampling_params": {"temperature": 0},
        "forced_output_ids": [[7, 8, 9], None, [1]],
    }
    answers = server.generate(
        {**body, "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}}
    )
    assert answers[0]["output_ids"] == [7, 8]
    assert len(answers[1]["output_ids"]) == 2
    assert answers[2]["output_ids"] == [1]


def test_text_in_logprobs_is_the_tokens_own(server: Emulator) -> None:
    meta = server.generate(scored(logprob_start_len=0, top_logprobs_num=2, return_text_in_logprobs=True))[
        "meta_info"
    ]
    texts = [text for _, _, text in meta["input_token_logprobs"]]
    assert "".join(texts[:9]) == "The capital of"
    for row in [*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]]:
        for _, token, text in row:
            ids = server.post("/detokenize", {"tokens": [token], "skip_special_tokens": False}).json()
            assert text == ids["text"]


def test_text_prompts_are_tokenized(server: Emulator) -> None:
    ids = server.post("/tokenize", {"prompt": "The capital"}).json()["tokens"]
    by_text = server.generate({"text": "The capital", "sampling_params": GREEDY})
    server.post("/flush_cache")
    by_ids = server.generate({"input_ids": ids, "sampling_params": GREEDY})
    assert by_text["output_ids"] == by_ids["output_ids"]
    assert by_text["meta_info"]["prompt_tokens"] == len(ids)


def afresh(server: Emulator, body: dict[str, Any]) -> Any:
    """The answer with an empty prefix cache: after a cached prefix fewer rows are computed at once, which may
    round a near tie the other way."""
    server.post("/flush_cache")
    return server.generate(body)


def long_text(server: Emulator) -> tuple[str, list[int]]:
    answer = afresh(server, {"input_ids": PROMPT, "sampling_params": {**GREEDY, "max_new_tokens": 40}})
    return answer["text"], answer["output_ids"]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_stop_string_ends_the_answer_before_it(server: Emulator, streamed: bool) -> None:
    text, ids = long_text(server)
    stop = text[12:15]
    body = {
        "input_ids": PROMPT,
        "sampling_params": {**GREEDY, "max_new_tokens": 40, "stop": ["never seen", stop]},
    }
    answer = last_event(server, body) if streamed else afresh(server, body)
    assert answer["text"] == text[: text.index(stop)]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    steps = len(answer["output_ids"])
    assert answer["output_ids"] == ids[:steps]
    assert steps == answer["meta_info"]["completion_tokens"] < 40
    kept = afresh(server, {**body, "sampling_params": {**body["sampling_params"], "no_stop_trim": True}})
    assert kept["text"] == text[: text.index(stop) + len(stop)]


def test_logprobs_end_with_the_stop_string(server: Emulator) -> None:
    text, _ = long_text(server)
    sampling = {**GREEDY, "max_new_tokens": 40, "stop": text[12:15]}
    answer = afresh(server, scored(sampling_params=sampling, top_logprobs_num=2, token_ids_logprob=[3]))
    steps = len(answer["output_ids"])
    for key in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
        assert len(answer["meta_info"][key]) == steps


def test_a_stop_token_ends_the_answer_with_it(server: Emulator) -> None:
    text, ids = long_text(server)
    stop = ids[5]
    first = ids.index(stop)
    sampling = {"temperature": 0, "max_new_tokens": 40, "stop_token_ids": [stop]}
    answer = afresh(server, {"input_ids": PROMPT, "sampling_params": sampling})
    if 2 in ids[:first]:
        pytest.fail("the end-of-text token comes first: choose another prompt")
    assert answer["output_ids"] == ids[: first + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert text.startswith(answer["text"])
    ignored = server.generate({"input_ids": PROMPT, "sampling_params": {**sampling, "ignore_eos": True}})
    assert len(ignored["output_ids"]) == 40


def events(response: requests.Response) -> list[Any]:
    """The events of a stream, decoded; the last must be [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.strip().split("\n\n")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def last_event(server: Emulator, body: dict[str, Any]) -> Any:
    server.post("/flush_cache")
    return events(server.post("/generate", {**body, "stream": True}))[-1]


def test_streamed_events_are_cumulative(server: Emulator) -> None:
    whole = server.generate(scored(top_logprobs_num=3))
    server.post("/flush_cache")
    streamed = events(server.post("/generate", scored(top_logprobs_num=3, stream=True)))
    assert [event["output_ids"] for event in streamed] == [whole["output_ids"][: i + 1] for i in range(6)]
    assert [event["meta_info"]["finish_reason"] for event in streamed[:-1]] == [None] * 5
    assert all("index" not in event for event in streamed)
    for key in ("output_token_logprobs", "output_top_logprobs", "finish_reason", "completion_tokens"):
        assert streamed[-1]["meta_info"][key] == whole["meta_info"][key]
        assert streamed[-1]["text"] == whole["text"]


def test_streamed_batches_carry_an_index(server: Emulator) -> None:
    prompts = [PROMPT, PROMPT[:5], PROMPT[:9]]
    streamed = events(
        server.post("/generate", {"input_ids": prompts, "sampling_params": GREEDY, "stream": True})
    )
    server.post("/flush_cache")
    whole = server.generate({"input_ids": prompts, "sampling_params": GREEDY})
    for index, answer in enumerate(whole):
        mine = [event for event in streamed if event["index"] == index]
        assert [len(event["output_ids"]) for event in mine] == [1, 2, 3, 4, 5, 6]
        assert mine[-1]["output_ids"] == answer["output_ids"]


def test_sampling_is_reproducible_by_its_seed(server: Emulator) -> None:
    def sample(seed: int) -> list[int]:
        sampling = {"temperature": 1.5, "max_new_tokens": 12, "sampling_seed": seed, "ignore_eos": True}
        return afresh(server, {"input_ids": PROMPT, "sampling_params": sampling})["output_ids"]

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_several_samples_of_one_prompt_come_as_a_list(server: Emulator) -> None:
    sampling = {"temperature": 1.5, "max_new_tokens": 12, "n": 3, "ignore_eos": True}
    answers = server.generate({"input_ids": PROMPT, "sampling_params": sampling})
    assert len(answers) == 3
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 1


def test_a_sampled_answers_logprobs_are_scaled_by_the_temperature(server: Emulator) -> None:
    plain = server.generate(scored(sampling_params={**GREEDY, "max_new_tokens": 1}, top_logprobs_num=512))
    server.post("/flush_cache")
    hot = server.generate(
        scored(
            sampling_params={"temperature": 0.5, "max_new_tokens": 1, "ignore_eos": True},
            top_logprobs_num=512,
        )
    )
    logits = {token: value for value, token, _ in plain["meta_info"]["output_top_logprobs"][0]}
    scale = np.log(np.exp(np.array(list(logits.values())) / 0.5).sum())
    for value, token, _ in hot["meta_info"]["output_top_logprobs"][0]:
        assert value == pytest.approx(logits[token] / 0.5 - scale, abs=1e-3)


def test_the_prefix_cache_is_used_reported_and_flushed(server: Emulator) -> None:
    def cached(**fields: Any) -> int:
        return server.generate(scored(**fields))["meta_info"]["cached_tokens"]

    assert cached() == 0
    assert cached() == len(PROMPT) - 1
    assert cached(logprob_start_len=5) == 5
    assert cached(logprob_start_len=0) == 0
    assert server.get("/flush_cache").text.startswith("Cache flushed.")
    assert cached() == 0
