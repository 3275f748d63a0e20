"""Answers of a real server, read; and answers that must not be believed."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import numpy as np
import pytest

from pytest_quantguard.errors import InvalidAnswerError
from pytest_quantguard.serving.answers import Answer, GenerateRequest
from pytest_quantguard.serving.reading import read_answers, split_answers
from tests.serving.samples import VOCAB_SIZE, body_of, requests_of, sample


def read(recorded: dict[str, Any], top_logprobs: int | None = None) -> list[Answer]:
    batch = requests_of(recorded)
    asked = recorded["request"]["body"].get("top_logprobs_num", 0) if top_logprobs is None else top_logprobs
    items = split_answers(body_of(recorded), batch)
    return read_answers(items, batch, top_logprobs=asked, vocab_size=VOCAB_SIZE)


def nested_rows(meta: dict[str, Any], side: str) -> tuple[np.ndarray, np.ndarray]:
    """Read once more, the slow way."""
    rows = [row for row in meta[f"{side}_top_logprobs"] if row is not None]
    return (
        np.array([[entry[1] for entry in row] for row in rows], np.int32),
        np.array([[entry[0] for entry in row] for row in rows], np.float32),
    )


@pytest.mark.parametrize(
    "name", ["gen_ids_lp_start0_top5", "gen_ids_lp_start5_top5", "gen_top256", "old59_s8/gen", "score_max0"]
)
def test_nested_answer_equals_its_own_json(name: str) -> None:
    recorded = sample(name)
    (answer,) = read(recorded)
    meta = recorded["response"]["meta_info"]
    start = recorded["request"]["body"]["logprob_start_len"]
    prompt = recorded["request"]["body"]["input_ids"]
    assert answer.prompt is not None
    ids, values = nested_rows(meta, "input")
    np.testing.assert_array_equal(answer.prompt.token_ids, ids)
    np.testing.assert_array_equal(answer.prompt.logprobs, values)
    assert answer.prompt.chosen_ids.tolist() == prompt[start + 1 :]
    own = [entry[0] for entry in meta["input_token_logprobs"][1:]]
    np.testing.assert_array_equal(answer.prompt.chosen_logprobs, np.array(own, np.float32))
    assert answer.output_ids == tuple(recorded["response"]["output_ids"])
    if answer.output_ids:
        assert answer.output is not None
        ids, values = nested_rows(meta, "output")
        np.testing.assert_array_equal(answer.output.token_ids, ids)
        np.testing.assert_array_equal(answer.output.logprobs, values)
        assert tuple(answer.output.chosen_ids) == answer.output_ids
    else:
        assert answer.output is None  # the one row that comes is the next token's, which nobody generated
    assert answer.finish_reason == "length"
    assert answer.cached_tokens == meta["cached_tokens"]


@pytest.mark.parametrize("name", ["flat_b64", "flat_lists", "flat_max0"])
def test_flat_answer_equals_the_nested_one_of_the_same_prompt(name: str) -> None:
    """Equal values at every rank; the ids too, but for ties, which a top-4 and a top-5 order differently."""
    (flat,) = read(sample(name))
    (nested,) = read(sample("gen_ids_lp_start5_top5"))
    assert flat.prompt is not None
    assert nested.prompt is not None
    np.testing.assert_array_equal(flat.prompt.logprobs, nested.prompt.logprobs[:, :4])
    np.testing.assert_array_equal(flat.prompt.chosen_ids, nested.prompt.chosen_ids)
    np.testing.assert_array_equal(flat.prompt.chosen_logprobs, nested.prompt.chosen_logprobs)
    untied = np.stack(
        [(nested.prompt.logprobs == value[:, None]).sum(1) == 1 for value in flat.prompt.logprobs.T], 1
    )
    assert untied.sum() > 60
    np.testing.assert_array_equal(flat.prompt.token_ids[untied], nested.prompt.token_ids[:, :4][untied])


def test_flat_base64_equals_flat_lists() -> None:
    (encoded,), (plain,) = read(sample("flat_b64")), read(sample("flat_lists"))
    assert encoded.prompt is not None
    assert plain.prompt is not None
    np.testing.assert_array_equal(encoded.prompt.token_ids, plain.prompt.token_ids)
    np.testing.assert_array_equal(encoded.prompt.logprobs, plain.prompt.logprobs)
    assert encoded.output is not None
    assert encoded.output.token_ids[:, 0].tolist() == list(encoded.output_ids)


def test_batches_keep_their_order() -> None:
    answers = read(sample("batch8_ids"))
    assert [answer.prompt_tokens for answer in answers] == [
        len(ids) for ids in sample("batch8_ids")["request"]["body"]["input_ids"]
    ]
    assert answers[0].text.startswith(" Paris")
    first, second = read(sample("flat_b64_batch"))
    assert first.prompt is not None
    assert second.prompt is not None
    assert (first.prompt.positions, second.prompt.positions) == (20, 8)


def test_without_logprobs_only_tokens_come_back() -> None:
    (answer,) = read(sample("batch_one"))
    assert (answer.output_ids, answer.text, answer.prompt, answer.output) == (
        (7042, 30),
        " Paris.",
        None,
        None,
    )


def test_older_server_answers_an_unasked_prompt_row() -> None:
    """0.5.9 returns one row for logprob_start_len -1; nothing was asked, so nothing is read."""
    recorded = sample("old59/tf_encode")
    (answer,) = read(recorded)
    assert answer.prompt is None
    assert answer.output is not None
    assert answer.output.positions == 26


def test_fewer_logprobs_than_asked_are_taken_as_they_came() -> None:
    (answer,) = read(sample("gen_ids_lp_start0_top5"), top_logprobs=256)
    assert answer.prompt is not None
    assert answer.prompt.width == 5


def test_more_logprobs_than_asked_are_refused() -> None:
    with pytest.raises(InvalidAnswerError, match="asked for 4 top log-probabilities, got 5 a position"):
        read(sample("gen_ids_lp_start0_top5"), top_logprobs=4)


def test_one_logprob_is_enough() -> None:
    recorded = copy.deepcopy(sample("gen_ids_lp_start5_top5"))
    meta = recorded["response"]["meta_info"]
    for side in ("input", "output"):
        meta[f"{side}_top_logprobs"] = [row and row[:1] for row in meta[f"{side}_top_logprobs"]]
    (answer,) = read(recorded, top_logprobs=1)
    assert answer.prompt is not None
    assert answer.prompt.width == 1


def test_without_output_ids_the_logprobs_name_the_tokens() -> None:
    recorded = copy.deepcopy(sample("gen_ids_lp_start5_top5"))
    ids = tuple(recorded["response"].pop("output_ids"))
    (answer,) = read(recorded)
    assert answer.output_ids == ids


@pytest.mark.parametrize("ids", ["7042", {"0": 7042}, [7042.5], [None]])
def test_output_ids_that_are_none_are_refused(ids: Any) -> None:
    recorded = copy.deepcopy(sample("batch_one"))
    recorded["response"][0]["output_ids"] = ids
    with pytest.raises(InvalidAnswerError, match="output_ids is not a list of token ids"):
        read(recorded)


def test_of_an_answer_that_we_ended_what_there_was_is_kept() -> None:
    """Only a request with an id of its own can be aborted by us."""
    request = GenerateRequest((1, 2, 3), max_new_tokens=9, rid="r")
    meta = {"finish_reason": {"type": "abort"}, "prompt_tokens": 3, "cached_tokens": 2}
    begun = {"text": "so far", "output_ids": [5, 6], "meta_info": meta}
    (answer,) = read_answers([begun], [request], top_logprobs=0, vocab_size=VOCAB_SIZE)
    assert (answer.text, answer.output_ids, answer.finish_reason) == ("so far", (5, 6), "abort")
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (3, 2, 2)
    unbegun = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}
    (answer,) = read_answers([unbegun], [request], top_logprobs=0, vocab_size=VOCAB_SIZE)
    assert (answer.text, answer.output_ids, answer.prompt_tokens) == ("", (), 0)


def damaged(change: str) -> tuple[dict[str, Any], int]:
    recorded = copy.deepcopy(sample("gen_ids_lp_start5_top5"))
    meta = recorded["response"]["meta_info"]
    match change:
        case "null in the middle of the top":
            meta["input_top_logprobs"][7][2][0] = None
        case "null row":
            meta["input_top_logprobs"][7] = None
        case "null own":
            meta["input_token_logprobs"][7][0] = None
        case "sentinel":
            meta["output_top_logprobs"][3][4][0] = -3.4028234663852886e38
        case "positive":
            meta["output_top_logprobs"][3][0][0] = 0.5
        case "too few positions":
            del meta["input_token_logprobs"][-1]
        case "too few top rows":
            del meta["input_top_logprobs"][-1]
        case "too many positions":
            meta["input_token_logprobs"] = [[None, 6403, None]] + [[-1.0, 1, None]] * 25
        case "rows of another prompt":
            meta["input_token_logprobs"][7][1] = 11
        case "first is not null":
            meta["input_token_logprobs"][0][0] = -1.0
        case "other output tokens":
            meta["output_token_logprobs"][2][1] = 5
        case "fewer new tokens":
            recorded["response"]["output_ids"].pop()
        case "token outside":
            meta["input_top_logprobs"][7][2][1] = 49152
        case "unsorted":
            meta["input_top_logprobs"][7].reverse()
        case "uneven":
            meta["input_top_logprobs"][7].pop()
        case "prompt tokens":
            meta["prompt_tokens"] = 27
        case "aborted":
            meta["finish_reason"] = {"type": "abort", "message": "out of memory"}
        case "no logprobs":
            del meta["input_token_logprobs"]
        case "no meta":
            del recorded["response"]["meta_info"]
        case _:
            raise AssertionError(change)
    return recorded, 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "null in the middle of the top",
            r"non-finite log-probabilities: prompt 0 .* top log-probability in row 6 is nan",
        ),
        ("null row", r"prompt side: row 6 of input_top_logprobs is null"),
        ("null own", r"non-finite log-probabilities: .*own log-probability in row 6 is nan"),
        ("sentinel", r"sentinel .*output side: a top log-probability in row 3 is -3.4"),
        ("positive", r"above 0: .*row 3 is 0.5"),
        ("too few positions", r"asked for the log-probabilities of the 21 tokens from position 5 on, got 20"),
        ("too few top rows", r"expected 20 positions of top log-probabilities, got 19"),
        ("too many positions", r"got 26 \(the server ignored logprob_start_len\)"),
        ("rows of another prompt", r"position 12 should be token \d+, the answer is about token 11"),
        ("first is not null", r"first entry must be null"),
        ("other output tokens", r"other tokens than output_ids"),
        ("fewer new tokens", r"counted 8 new tokens and sent 7"),
        ("token outside", r"row 6 names token id 49152, outside the vocabulary of 49152"),
        ("unsorted", r"row 6 is not sorted"),
        ("uneven", r"row 6 holds 4 log-probabilities, the first holds 5"),
        ("prompt tokens", r"sent 26 prompt tokens, the server counted 27"),
        ("aborted", r"aborted the request: out of memory"),
        ("no logprobs", r"has no input_token_logprobs"),
        ("no meta", r"no meta_info"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused(change: str, message: str) -> None:
    recorded, _ = damaged(change)
    with pytest.raises(InvalidAnswerError, match=message):
        read(recorded)


def flat_with(field: str, value: Any) -> dict[str, Any]:
    recorded = copy.deepcopy(sample("flat_b64"))
    recorded["response"]["meta_info"][field] = value
    return recorded


def encode(values: list[float]) -> str:
    return base64.b64encode(np.array(values, "<f4").tobytes()).decode()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("input_top_logprobs_val_flat_b64", encode([-1.0] * 79 + [np.nan]), "non-finite.*row 19 is nan"),
        ("input_top_logprobs_val_flat_b64", encode([-1.0] * 79 + [-np.inf]), "non-finite.*row 19 is -inf"),
        ("input_top_logprobs_val_flat_b64", encode([-1.0] * 79), "announces 20 x 4 values, but holds 79"),
        ("input_top_logprobs_val_flat_b64", "!!", "cannot be decoded"),
        ("input_top_logprobs_val_flat_b64_dtype", "bfloat16", "dtype 'bfloat16'; float32 is expected"),
        ("input_top_logprobs_null_prefix", 3, "null_prefix is 3, not 1"),
        ("input_top_logprobs_shape", [20], "should be .rows, K."),
        ("output_top_logprobs_shape", [2, 8], "expected 4 positions of top log-probabilities, got 2"),
    ],
)
def test_a_flat_answer_that_does_not_fit_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidAnswerError, match=message):
        read(flat_with(field, value))


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity"])
def test_json_with_nan_is_reported_as_what_it_means(token: str) -> None:
    body = body_of(sample("gen_ids_lp_start5_top5")).replace(b"-0.425002783536911", token.encode())
    with pytest.raises(InvalidAnswerError, match=r"non-finite log-probabilities: .* holds NaN or Infinity"):
        split_answers(body, [GenerateRequest((1,))])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>", "is not JSON"),
        (json.dumps([]).encode(), "asked 1 prompts in one request, got 0 answers"),
        (json.dumps([{}, {}]).encode(), "got 2 answers"),
        (b'"x"', "got str"),
    ],
)
def test_another_number_of_answers_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(InvalidAnswerError, match=message):
        split_answers(body, [GenerateRequest((1,))])
