"""How results are laid out: JSON fragments against plain lists, and values that JSON does not have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from pytest_quantguard.emulator.encoding import Timing, encode_answer
from pytest_quantguard.emulator.protocol import GenerateItem, HttpError, Limits, parse_generate
from pytest_quantguard.emulator.sequences import LogprobRows, SequenceResult

LIMITS = Limits(vocab_size=100, context_length=64, encode=lambda text: [len(text)])
TIMING = Timing(received=1.0, dispatched=1.5, first_token=2.0, finished=4.0)


def item(**fields: Any) -> GenerateItem:
    body = {
        "input_ids": [1, 2, 3],
        "return_logprob": True,
        "top_logprobs_num": 3,
        "logprob_start_len": 0,
        **fields,
    }
    return parse_generate(body, LIMITS).items[0]


def rows(count: int, null_prefix: int, seed: int = 0, selected: int = 0) -> LogprobRows:
    generator = np.random.default_rng(seed)
    values = -np.sort(generator.exponential(2, (count, 3)).astype(np.float32), axis=1)
    ids = generator.integers(0, 100, (count, 3)).astype(np.int32)
    values[:null_prefix], ids[:null_prefix] = np.nan, -1
    return LogprobRows(
        token_ids=ids[:, 0].copy() if not null_prefix else np.arange(count, dtype=np.int32),
        logprobs=values[:, 0].copy(),
        top_ids=ids,
        top_logprobs=values,
        selected_logprobs=np.full((count, selected), -1.5, np.float32),
        null_prefix=null_prefix,
    )


def result(prompt: LogprobRows | None, output: LogprobRows) -> SequenceResult:
    ids = tuple(output.token_ids.tolist())
    return SequenceResult("r", 3, 0, ids, {"type": "length", "length": len(ids)}, prompt, output)


def encoded(wanted: GenerateItem, outcome: SequenceResult) -> dict[str, Any]:
    """The answer as a client decodes it."""
    text_of = {token: f'<"{token}">' for token in range(-1, 100)}.__getitem__
    answer = orjson.loads(orjson.dumps(encode_answer(wanted, outcome, "text", TIMING, text_of)))
    assert isinstance(answer["meta_info"], dict)
    return answer


def test_fragments_are_the_lists_that_they_stand_for() -> None:
    prompt, output = rows(3, 1), rows(2, 0, seed=1)
    meta = encoded(item(), result(prompt, output))["meta_info"]
    for side, part in (("input", prompt), ("output", output)):
        expected: list[Any] = [None] * part.null_prefix
        for values, ids in zip(
            part.top_logprobs[part.null_prefix :], part.top_ids[part.null_prefix :], strict=True
        ):
            expected.append(
                [[float(value), int(token), None] for value, token in zip(values, ids, strict=True)]
            )
        assert meta[f"{side}_top_logprobs"] == expected


def test_texts_are_escaped_by_the_encoder() -> None:
    meta = encoded(item(return_text_in_logprobs=True), result(rows(3, 1), rows(2, 0)))["meta_info"]
    for row in [*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]]:
        assert all(text == f'<"{token}">' for _, token, text in row)


def test_times_are_differences_of_the_clock() -> None:
    meta = encoded(item(), result(rows(3, 1), rows(2, 0)))["meta_info"]
    assert (meta["e2e_latency"], meta["first_token_latency"], meta["decode_throughput"]) == (3.0, 1.0, 0.5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("field", ["logprobs", "top_logprobs", "selected_logprobs"])
def test_a_value_that_json_does_not_have_is_an_error(field: str, value: float) -> None:
    output = rows(2, 0, selected=1)
    getattr(output, field)[1] = value
    with pytest.raises(HttpError, match="Out of range float values are not JSON compliant") as caught:
        encode_answer(item(token_ids_logprob=[4]), result(rows(3, 1, selected=1), output), "", TIMING)
    assert caught.value.status == 400


def test_flat_bytes_carry_any_value() -> None:
    output = rows(2, 0)
    output.top_logprobs[1, 2] = np.nan
    flags = {"return_flat_raw_output_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
    meta = encoded(item(**flags), result(rows(3, 1), output))["meta_info"]
    assert meta["output_top_logprobs_shape"] == [2, 3]


def test_the_sentinel_is_a_number() -> None:
    output = rows(1, 0)
    output.top_logprobs[0, 2] = np.finfo(np.float32).min
    meta = encoded(item(), result(rows(3, 1), output))["meta_info"]
    assert meta["output_top_logprobs"][0][2][0] == float(np.finfo(np.float32).min)


def test_a_running_sequence_has_no_clock_fields() -> None:
    running = replace(result(rows(3, 1), rows(2, 0)), finish_reason=None)
    answer = encode_answer(item(), running, "", Timing(1.0, 1.5, 2.0))
    assert "e2e_latency" not in answer["meta_info"]
    assert "weight_versions" not in answer["meta_info"]
