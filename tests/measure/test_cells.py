"""Cells against the toy model, whose right rows are computed position by position."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pytest_quantguard.baseline.recording import CellKey, PromptRecord
from pytest_quantguard.errors import BaselineError, ConfigError, InvalidAnswerError
from pytest_quantguard.measure.cells import measure_cell
from pytest_quantguard.measure.decode import DecodeChoice, choose_decode
from pytest_quantguard.serving.answers import Capabilities

from .toy import VOCAB, ToyClient, ToyModel, toy_prompts

WIDTH = 8
SPAN = 6
PREFILL = CellKey("prefill", 4)
DECODE = CellKey("decode", 4)
FORCED = DecodeChoice("forced")
RESYNC = DecodeChoice("resync")


def assert_rows_are_right(measurement, model: ToyModel, prompts, *, width: int = WIDTH) -> None:
    """Every position of every span, once, in order, conditioned on the reference's prefix."""
    assert len(measurement.cell.rows) == len(prompts)
    for prompt, rows in zip(prompts, measurement.cell.rows, strict=True):
        tokens = prompt.token_ids.tolist()
        assert rows.positions == len(tokens) - prompt.span_start
        for position in range(rows.positions):
            place = prompt.span_start + position
            ids, logprobs = model.row(tokens[:place], width)
            assert rows.token_ids[position].tolist() == ids.tolist()
            assert rows.logprobs[position] == pytest.approx(logprobs, abs=1e-6)
            assert rows.chosen_ids[position] == tokens[place]
            full = model.logprobs(tokens[:place])
            if np.isnan(rows.chosen_logprobs[position]):
                assert tokens[place] not in ids
            else:
                assert rows.chosen_logprobs[position] == pytest.approx(full[tokens[place]], abs=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 32])
def test_prefill_asks_for_the_span_only(batch_size: int) -> None:
    prompts = toy_prompts(10, SPAN)
    client = ToyClient()
    measurement = measure_cell(client, prompts, CellKey("prefill", batch_size), top_logprobs=WIDTH)
    assert_rows_are_right(measurement, client.model, prompts)
    batches = -(-10 // batch_size)
    assert measurement.cost.requests == len(client.requests) == batches
    assert client.flushes == batches
    assert [len(batch) for batch in client.requests] == [len(batch) for batch in measurement.cell.batches]
    assert [index for batch in measurement.cell.batches for index in batch] == list(range(10))
    sent = [request for batch in client.requests for request in batch]
    assert [request.logprob_start_len for request in sent] == [prompt.span_start - 1 for prompt in prompts]
    assert measurement.cost.input_tokens == sum(prompt.token_ids.size for prompt in prompts)
    assert measurement.mode == "prefill"
    assert measurement.decoded_share == 0


@pytest.mark.parametrize("choice", [FORCED, RESYNC])
def test_span_may_reach_into_the_prompt(choice: DecodeChoice) -> None:
    prompts = tuple(
        dataclasses.replace(prompt, span_start=prompt.prompt_tokens - 2) for prompt in toy_prompts(4, SPAN)
    )
    client = ToyClient()
    assert_rows_are_right(measure_cell(client, prompts, PREFILL, top_logprobs=WIDTH), client.model, prompts)
    measurement = measure_cell(client, prompts, DECODE, top_logprobs=WIDTH, decode=choice)
    assert_rows_are_right(measurement, client.model, prompts)


def test_forced_takes_one_request_per_batch() -> None:
    prompts = toy_prompts(10, SPAN)
    model = ToyModel(disagree=lambda length: length % 3 == 0)
    client = ToyClient(model)
    measurement = measure_cell(client, prompts, DECODE, top_logprobs=WIDTH, decode=FORCED)
    assert_rows_are_right(measurement, model, prompts)
    assert measurement.cost.requests == 3
    assert measurement.cost.output_tokens == 10 * SPAN
    assert measurement.decoded_share == pytest.approx((SPAN - 1) / SPAN)


def scattered(length: int) -> bool:
    return bool(np.random.default_rng(length).random() < 0.4)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize(
    ("disagree", "requests_per_batch"),
    [(lambda _length: False, 1), (lambda _length: True, 20), (scattered, None)],
    ids=["never", "everywhere", "scattered"],
)
def test_resync_measures_each_position_once_under_the_right_prefix(
    batch_size: int, disagree, requests_per_batch: int | None
) -> None:
    prompts = toy_prompts(8, 20)
    model = ToyModel(disagree=disagree)
    client = ToyClient(model)
    key = CellKey("decode", batch_size)
    measurement = measure_cell(client, prompts, key, top_logprobs=WIDTH, decode=RESYNC)
    assert_rows_are_right(measurement, model, prompts)
    batches = len(measurement.cell.batches)
    assert measurement.cost.requests == len(client.requests)
    if requests_per_batch is not None:
        assert measurement.cost.requests == requests_per_batch * batches
        return
    # A prompt needs one request, and one more for every divergence before its last position.
    needed = [
        1 + sum(disagree(place) for place in range(prompt.span_start, prompt.token_ids.size - 1))
        for prompt in prompts
    ]
    least = sum(max(needed[index] for index in batch) for batch in measurement.cell.batches)
    assert least <= measurement.cost.requests <= 20 * batches
    # Asking always for the whole rest would have generated about twice as much.
    assert measurement.cost.output_tokens < 8 * 20 * 7


def test_resync_says_which_rows_a_decode_step_made() -> None:
    prompts = toy_prompts(1, 6)
    start = prompts[0].span_start
    model = ToyModel(disagree=lambda length: length == start + 2)
    measurement = measure_cell(
        ToyClient(model), prompts, CellKey("decode", 1), top_logprobs=WIDTH, decode=RESYNC
    )
    assert measurement.notes == (
        "decode-bs1: resync took 2 requests, 67% of the positions came out of decode steps",
    )
    # Positions 0 and 3 open a request: 0..2 (divergence at 2), then 3..5.
    assert measurement.decoded[0].tolist() == [False, True, True, False, True, True]
    assert measurement.cost.requests == 2


def test_resync_keeps_the_batch_full() -> None:
    prompts = toy_prompts(4, 12)
    model = ToyModel(disagree=scattered)
    client = ToyClient(model)
    measure_cell(
        client, prompts, DECODE, top_logprobs=WIDTH, decode=DecodeChoice("resync", context_length=1000)
    )
    for batch in client.requests:
        assert len(batch) == 4
        assert len({request.max_new_tokens for request in batch}) == 1


def test_resync_stays_within_the_context() -> None:
    prompts = toy_prompts(4, 12)
    context = max(prompt.token_ids.size for prompt in prompts)
    client = ToyClient(ToyModel(disagree=scattered))
    choice = DecodeChoice("resync", context_length=context)
    measurement = measure_cell(client, prompts, DECODE, top_logprobs=WIDTH, decode=choice)
    assert_rows_are_right(measurement, client.model, prompts)
    for batch in client.requests:
        for request in batch:
            assert len(request.input_ids) + request.max_new_tokens <= context


def test_resync_copes_with_answers_that_end_early() -> None:
    class Short(ToyClient):
        def generate(self, batch, *, top_logprobs=0):
            return super().generate(
                [
                    dataclasses.replace(request, max_new_tokens=min(2, request.max_new_tokens))
                    for request in batch
                ],
                top_logprobs=top_logprobs,
            )

    prompts = toy_prompts(3, 7)
    client = Short()
    measurement = measure_cell(client, prompts, DECODE, top_logprobs=WIDTH, decode=RESYNC)
    assert_rows_are_right(measurement, client.model, prompts)
    assert measurement.cost.requests == 4


def test_resync_that_generates_nothing_is_an_error() -> None:
    class Silent(ToyClient):
        def generate(self, batch, *, top_logprobs=0):
            return super().generate(
                [dataclasses.replace(request, max_new_tokens=0) for request in batch],
                top_logprobs=top_logprobs,
            )

    with pytest.raises(InvalidAnswerError, match=r"toy-0, position 0 .* generated nothing"):
        measure_cell(Silent(), toy_prompts(2, 4), DECODE, top_logprobs=WIDTH, decode=RESYNC)


@pytest.mark.parametrize("choice", [FORCED, RESYNC])
def test_warm_cells_prove_the_cache(choice: DecodeChoice) -> None:
    prompts = toy_prompts(6, SPAN)
    client = ToyClient(radix_cache=True)
    for key in (PREFILL, DECODE):
        warm = measure_cell(client, prompts, key, top_logprobs=WIDTH, decode=choice, warm=True)
        assert warm.warm
        assert warm.cost.cached_tokens >= sum(prompt.span_start - 1 for prompt in prompts)
        assert_rows_are_right(warm, client.model, prompts)
        cold = measure_cell(client, prompts, key, top_logprobs=WIDTH, decode=choice)
        assert cold.cost.cached_tokens == 0
    with pytest.raises(
        InvalidAnswerError, match=r"warm measurement met no prefix cache.*disable_radix_cache"
    ):
        measure_cell(ToyClient(), prompts, PREFILL, top_logprobs=WIDTH, warm=True)


@pytest.mark.parametrize("choice", [FORCED, RESYNC])
@pytest.mark.parametrize("key", [PREFILL, DECODE])
def test_cold_cells_refuse_the_cache(key: CellKey, choice: DecodeChoice) -> None:
    client = ToyClient(radix_cache=True, flush_works=False)
    prompts = toy_prompts(4, SPAN)
    measure_cell(client, prompts, key, top_logprobs=WIDTH, decode=choice)
    with pytest.raises(InvalidAnswerError, match=r"toy-0 \(2 of \d+ tokens\).*disable_radix_cache: true"):
        measure_cell(client, prompts, key, top_logprobs=WIDTH, decode=choice)


def test_a_server_that_caps_the_width_is_used_and_noted() -> None:
    prompts = toy_prompts(4, SPAN)
    client = ToyClient(most_logprobs=5)
    measurement = measure_cell(client, prompts, DECODE, top_logprobs=WIDTH, decode=RESYNC)
    assert_rows_are_right(measurement, client.model, prompts, width=5)
    assert any(
        "answered 5 log-probabilities per position where 8 were asked: K = 5" in n for n in measurement.notes
    )


def test_too_few_positions() -> None:
    with pytest.raises(InvalidAnswerError, match="prompt toy-0: 6 positions were asked, 4 came back"):
        measure_cell(ToyClient(drop_rows=2), toy_prompts(2, SPAN), PREFILL, top_logprobs=WIDTH)


def test_rows_of_other_tokens() -> None:
    with pytest.raises(
        InvalidAnswerError, match=r"toy-0, position 0 .* belongs to token \d+, the baseline's"
    ):
        measure_cell(ToyClient(shift_chosen=True), toy_prompts(2, SPAN), PREFILL, top_logprobs=WIDTH)


def test_what_the_client_refuses_gets_a_place_and_names() -> None:
    class Refusing(ToyClient):
        def generate(self, batch, *, top_logprobs=0):
            if len(self.requests) == 1:
                raise InvalidAnswerError("prompt 1 of a batch of 4: null in the middle")
            return super().generate(batch, top_logprobs=top_logprobs)

    with pytest.raises(InvalidAnswerError, match=r"prefill-bs4, batch 2: .*null in the middle \(.*1 = toy-5"):
        measure_cell(Refusing(), toy_prompts(8, SPAN), PREFILL, top_logprobs=WIDTH)


def test_vocabularies_that_differ_between_rows() -> None:
    class Moody(ToyClient):
        def generate(self, batch, *, top_logprobs=0):
            self.vocab_size = VOCAB + len(self.requests)
            return super().generate(batch, top_logprobs=top_logprobs)

    with pytest.raises(InvalidAnswerError, match=r"vocabularies of different sizes: \[64, 65\]"):
        measure_cell(Moody(), toy_prompts(8, SPAN), PREFILL, top_logprobs=WIDTH)


def test_nothing_to_measure() -> None:
    with pytest.raises(BaselineError, match="the suite has no prompts"):
        measure_cell(ToyClient(), (), PREFILL, top_logprobs=WIDTH)
    empty = PromptRecord("hollow", "qa", np.array([1, 2, 3], dtype=np.int32), 3, 3)
    with pytest.raises(BaselineError, match=r"no scored position in hollow.*quantguard capture"):
        measure_cell(ToyClient(), (empty,), PREFILL, top_logprobs=WIDTH)


def capabilities(**changes: object) -> Capabilities:
    plain = Capabilities(
        kind="sglang", version="0.5.23", model_path=None, dtype=None, quantization=None, kv_cache_dtype=None,
        vocab_size=None, context_length=4096, flat_logprobs=True, forced_decode=None, deterministic=None,
        radix_cache=None, chunked_prefill_size=None, device=None,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def test_the_choice_of_decode() -> None:
    offers = capabilities(forced_decode="custom_logit_processor")
    assert choose_decode("auto", offers) == DecodeChoice("forced", 4096)
    assert choose_decode("resync", offers) == DecodeChoice("resync", 4096)
    fallen_back = choose_decode("auto", capabilities())
    assert fallen_back.mode == "resync"
    assert fallen_back.note is not None
    assert "enable_custom_logit_processor" in fallen_back.note
    measurement = measure_cell(ToyClient(), toy_prompts(2, 4), DECODE, top_logprobs=4, decode=fallen_back)
    assert fallen_back.note in measurement.notes
    with pytest.raises(ConfigError, match=r"suite\.decode_mode is 'forced'.*enable_custom_logit_processor"):
        choose_decode("forced", capabilities())


def test_progress_names_cell_and_batch() -> None:
    lines: list[str] = []
    measure_cell(ToyClient(), toy_prompts(5, 4), PREFILL, top_logprobs=4, progress=lines.append)
    assert lines == ["prefill-bs4: batch 1 of 2", "prefill-bs4: batch 2 of 2"]
