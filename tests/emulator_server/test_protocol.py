"""What a /generate body may hold: the checks alone, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_quantguard.emulator.protocol import (
    GENERATE_FIELDS,
    GenerateCall,
    HttpError,
    Limits,
    parse_generate,
)
from pytest_quantguard.emulator.sampling_fields import FIELDS

LIMITS = Limits(vocab_size=512, context_length=64, encode=lambda text: [ord(letter) % 512 for letter in text])
PROMPT = [5, 6, 7, 8]


def parse(**body: Any) -> GenerateCall:
    return parse_generate({"input_ids": PROMPT, **body}, LIMITS)


def refusal(body: Any) -> HttpError:
    """The refusal of a body, which must happen."""
    with pytest.raises(HttpError) as caught:
        parse_generate(body, LIMITS)
    json.dumps(caught.value.body)
    return caught.value


def test_defaults_are_sglangs() -> None:
    call = parse()
    assert (call.single, call.stream) == (True, False)
    request = call.items[0].request
    assert (request.temperature, request.top_p, request.top_k, request.seed) == (1.0, 1.0, -1, None)
    assert request.max_new_tokens == 60  # 128, but the context ends there
    assert not request.return_logprob
    assert len(request.rid) == 32


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logprob_start_len": -2, "return_logprob": True}, ["logprob_start_len", "-2"]),
        ({"logprob_start_len": 5, "return_logprob": True}, ["logprob_start_len=5", "4"]),
        ({"top_logprobs_num": 513, "return_logprob": True}, ["top_logprobs_num=513", "512"]),
        ({"logprob_start_len": "0"}, ['string "0"', "Int64OrList"]),
        ({"logprob_start_len": True}, ["boolean `true`", "Int64OrList"]),
        ({"top_logprobs_num": 1.5}, ["floating point `1.5`", "Int64OrList"]),
        ({"return_logprob": 1}, ["integer `1`", "BoolOrList"]),
        ({"return_logprob": [True]}, ["sequence", "BoolOrList"]),
        ({"stream": "yes"}, ['string "yes"', "boolean"]),
        ({"token_ids_logprob": [512]}, ["token_ids_logprob", "512"]),
        ({"token_ids_logprob": "a"}, ["token_ids_logprob"]),
        ({"forced_output_ids": [-1]}, ["forced_output_ids", "-1", "512"]),
        ({"forced_output_ids": []}, ["forced_output_ids cannot be empty"]),
        ({"forced_output_ids": [1] * 61}, ["forced_output_ids", "61", "60", "64"]),
        ({"forced_output_ids": "a"}, ["forced_output_ids"]),
        ({"custom_logit_processor": "{}"}, ["custom_logit_processor", "forced_output_ids"]),
        ({"input_embeds": [[0.1]]}, ["input_embeds", "input_ids"]),
        ({"image_data": "x"}, ["image_data", "not supported"]),
        ({"lora_path": "x"}, ["lora_path", "not supported"]),
        ({"rid": 3}, ["rid"]),
        ({"sampling_params": "x"}, ["sampling_params", "dictionary"]),
        ({"sampling_params": {"foo": 1}}, ["unknown field `foo`", "`temperature`"]),
        ({"sampling_params": {"temperature": "hot"}}, ['invalid type: string "hot", expected f64']),
        ({"sampling_params": {"temperature": 1e999}}, ["temperature", "finite", "inf"]),
        ({"sampling_params": {"temperature": -0.5}}, ["temperature", "-0.5"]),
        ({"sampling_params": {"top_p": 0}}, ["top_p", "(0, 1]"]),
        ({"sampling_params": {"top_k": 0}}, ["top_k", "at least 1"]),
        ({"sampling_params": {"max_new_tokens": 2.0}}, ["floating point", "i64"]),
        ({"sampling_params": {"max_new_tokens": 61}}, ["65 tokens", "4 tokens from the input"]),
        ({"sampling_params": {"n": -1}}, ["n must be"]),
        ({"sampling_params": {"n": 1000}}, ["n must be", "128"]),
        ({"sampling_params": {"stop": 3}}, ["integer `3`", "StringOrList"]),
        ({"sampling_params": {"stop": ["a"] * 65}}, ["stop strings", "65"]),
        ({"sampling_params": {"stop_token_ids": ["a"]}}, ["sequence of i64"]),
        ({"sampling_params": {"ignore_eos": 1}}, ["integer `1`", "boolean"]),
        ({"sampling_params": {"min_p": 0.1}}, ["min_p", "not supported"]),
        ({"sampling_params": {"json_schema": "{}"}}, ["json_schema", "not supported"]),
        ({"sampling_params": {"repetition_penalty": 1.2}}, ["repetition_penalty", "not supported"]),
        ({"sampling_params": {"sampling_seed": 2**63}}, ["sampling_seed"]),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], words: list[str]) -> None:
    error = refusal({"input_ids": PROMPT, **fields})
    assert error.status == 400
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (None, ["dictionary"]),
        ([], ["dictionary"]),
        ({}, ["Either text, input_ids"]),
        ({"input_ids": [[5], []]}, ["cannot be empty"]),
        ({"input_ids": [[]]}, ["cannot be empty"]),
        ({"input_ids": [[5], 6]}, ["input_ids", "int"]),
        ({"input_ids": [5, [6]]}, ["input_ids", "list"]),
        ({"input_ids": [5, None]}, ["input_ids", "null"]),
        ({"input_ids": [5, True]}, ["input_ids", "bool"]),
        ({"input_ids": [5.0]}, ["input_ids", "float"]),
        ({"input_ids": [512]}, ["input_ids", "512"]),
        ({"input_ids": [-1]}, ["input_ids", "-1"]),
        ({"input_ids": [5] * 64}, ["64 tokens", "longer"]),
        ({"text": ""}, ["text cannot be empty"]),
        ({"text": []}, ["text cannot be empty"]),
        ({"text": ["a", 3]}, ["text"]),
        ({"text": 3}, ["text"]),
        ({"input_ids": [[5], [6]], "logprob_start_len": [0]}, ["logprob_start_len", "batch size"]),
        ({"input_ids": [[5], [6]], "rid": ["a"]}, ["rids", "batch_size"]),
        ({"input_ids": [[5], [6]], "rid": ["a", "a"]}, ["Duplicate", "'a'"]),
        ({"input_ids": [[5], [6]], "forced_output_ids": [[1]]}, ["forced_output_ids", "batch size"]),
        ({"input_ids": [[5], [6]], "forced_output_ids": [1, 2]}, ["forced_output_ids"]),
        ({"input_ids": [[5], [6]], "sampling_params": [{"n": 1}, {"n": 2}]}, ["parallel_sample_num"]),
        ({"input_ids": [[5]] * 33, "sampling_params": {"n": 128}}, ["4096 sequences", "4224"]),
    ],
)
def test_a_wrong_body_is_explained(body: Any, words: list[str]) -> None:
    error = refusal(body)
    for word in words:
        assert word in str(error)


FLAT = "return_flat_raw_top_logprobs"
FLAT_OUTPUT = "return_flat_raw_output_top_logprobs"
FLAT_BYTES = "return_flat_raw_top_logprobs_b64"


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({FLAT: True}, False),
        ({FLAT: True, "stream": True}, False),
        ({FLAT_OUTPUT: True}, False),
        ({FLAT_OUTPUT: True, "stream": True}, True),
        ({FLAT_OUTPUT: False, "stream": True}, False),
        ({FLAT_BYTES: True}, True),
        ({FLAT_BYTES: True, FLAT: True}, False),
        ({FLAT_BYTES: True, FLAT_OUTPUT: True}, False),
    ],
)
def test_which_flat_flags_go_together(fields: dict[str, bool], refused: bool) -> None:
    if refused:
        assert "return_flat_raw" in str(refusal({"input_ids": PROMPT, **fields}))
    else:
        assert parse(**fields).items


def test_the_first_and_the_last_token_of_the_vocabulary_are_taken() -> None:
    body = {"input_ids": [0, 511], "token_ids_logprob": [0, 511], "return_logprob": True}
    request = parse_generate({**body, "forced_output_ids": [0, 511]}, LIMITS).items[0].request
    assert (request.input_ids, request.forced_ids, request.token_ids_logprob) == ((0, 511),) * 3


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(HttpError, match=r"no tokenizer\.json: send input_ids"):
        parse_generate({"text": "a"}, Limits(512, 64, None))


def test_input_ids_win_over_text() -> None:
    assert parse(text="other").items[0].request.input_ids == tuple(PROMPT)


@pytest.mark.parametrize(("start", "expected"), [(None, -1), (-1, -1), (0, 0), (3, 3), (4, -1)])
def test_the_prompts_own_length_asks_for_nothing(start: int | None, expected: int) -> None:
    request = parse(return_logprob=True, logprob_start_len=start).items[0].request
    assert request.logprob_start_len == expected


def test_a_wrong_start_matters_only_with_logprobs() -> None:
    assert parse(logprob_start_len=-2).items[0].request.logprob_start_len == -1


def test_a_negative_number_of_top_logprobs_is_none() -> None:
    assert parse(return_logprob=True, top_logprobs_num=-1).items[0].request.top_logprobs_num == 0


def test_forced_tokens_set_the_length() -> None:
    assert parse(forced_output_ids=[1, 2, 3]).items[0].request.max_new_tokens == 3
    limited = parse(forced_output_ids=[1, 2, 3], sampling_params={"max_new_tokens": 2}).items[0].request
    assert (limited.max_new_tokens, limited.forced_ids, limited.ignore_eos) == (2, (1, 2), True)
    assert (
        parse(forced_output_ids=[1], sampling_params={"max_new_tokens": 0}).items[0].request.forced_ids
        is None
    )


def test_a_batch_of_one_is_a_list() -> None:
    call = parse_generate({"input_ids": [PROMPT], "rid": "r"}, LIMITS)
    assert not call.single
    assert call.items[0].request.rid == "r_0"


def test_samples_of_a_prompt_stand_together() -> None:
    call = parse_generate({"input_ids": [[5], [6]], "sampling_params": {"n": 2}, "rid": ["a", "b"]}, LIMITS)
    assert [item.request.rid for item in call.items] == ["a_0", "a_1", "b_0", "b_1"]
    assert [item.request.input_ids for item in call.items] == [(5,), (5,), (6,), (6,)]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(["", "a", "\u00fc\ud800", "nan"])
    | st.lists(st.integers(-2, 600), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*FIELDS, *GENERATE_FIELDS, "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(st.sampled_from([*GENERATE_FIELDS, "custom_logit_processor"]), json_values, max_size=8)
)
def test_any_body_is_taken_or_refused(body: dict[str, Any]) -> None:
    """Nothing but HttpError escapes, and what is taken is within the model's limits."""
    refused: HttpError | None = None
    try:
        call = parse_generate(body, LIMITS)
    except HttpError as error:
        refused = error
    if refused is not None:
        assert refused.status == 400
        json.dumps(refused.body)
        return
    for item in call.items:
        request = item.request
        assert request.input_ids
        assert all(0 <= token < 512 for token in request.input_ids)
        assert 0 <= request.max_new_tokens <= 64 - len(request.input_ids)
        assert -1 <= request.logprob_start_len < len(request.input_ids)
        assert 0 <= request.top_logprobs_num <= 512
