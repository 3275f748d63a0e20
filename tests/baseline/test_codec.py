from __future__ import annotations

import contextlib
import dataclasses
import lzma
import struct

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pytest_quantguard.baseline import rowcoding
from pytest_quantguard.baseline.codec import MAGIC, decode_cells, encode_cells
from pytest_quantguard.baseline.recording import Cell, CellKey, PromptRecord, plan_batches
from pytest_quantguard.errors import BaselineError
from pytest_quantguard.logprobs.arrays import TopLogprobs

from .samples import KEYS, assert_same_cells, make_cells, make_prompts

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def recordings(draw: st.DrawFn) -> tuple[tuple[PromptRecord, ...], dict[CellKey, Cell]]:
    """Anything that a recording may hold, sensible or not."""
    vocab_size = draw(st.integers(4, 2**31 - 1 if draw(st.booleans()) else 40))
    vocab_size = min(vocab_size, 200_000)
    prompts = []
    for index in range(draw(st.integers(1, 3))):
        ids = draw(hnp.arrays(np.int32, st.integers(2, 6), elements=st.integers(0, vocab_size - 1)))
        start = draw(st.integers(1, len(ids) - 1))
        prompts.append(PromptRecord(f"p{index}", "t", ids, prompt_tokens=1, span_start=start))
    cells = {}
    for key in KEYS[: draw(st.integers(1, 3))]:
        width = draw(st.integers(1, 4))
        rows = []
        for prompt in prompts:
            count = len(prompt.span_ids)
            ids = hnp.arrays(np.int32, (count, width), elements=st.integers(0, vocab_size - 1))
            rows.append(
                TopLogprobs(
                    token_ids=draw(ids),
                    logprobs=draw(hnp.arrays(np.float32, (count, width), elements=FINITE)),
                    chosen_ids=prompt.span_ids,
                    vocab_size=vocab_size,
                    chosen_logprobs=draw(
                        hnp.arrays(np.float32, count, elements=FINITE | st.just(float("nan")))
                    ),
                )
            )
        cells[key] = Cell(key, plan_batches(len(prompts), key.batch_size), tuple(rows))
    return tuple(prompts), cells


@given(recordings())
@settings(max_examples=80)
def test_every_bit_comes_back(recording: tuple[tuple[PromptRecord, ...], dict[CellKey, Cell]]) -> None:
    prompts, cells = recording
    assert_same_cells(cells, decode_cells(encode_cells(cells, prompts), prompts))


@pytest.mark.parametrize("bfloat16", [True, False])
def test_random_logits_come_back_and_stay_under_the_size(bfloat16: bool) -> None:
    prompts = make_prompts(np.random.default_rng(1), 4, 32, 49_152)
    cells = make_cells(prompts, KEYS[:1], vocab_size=49_152, width=256, bfloat16=bfloat16)
    payload = encode_cells(cells, prompts)
    assert_same_cells(cells, decode_cells(payload, prompts))
    per_position = len(payload) / (4 * 32)
    # A BF16 server's row is a few multiples of a grid step; a float32 row has about 18 random bits a value.
    assert per_position < (650 if bfloat16 else 1100)


def test_rows_of_bfloat16_logits_lie_on_a_grid() -> None:
    prompts = make_prompts(np.random.default_rng(2), 4, 16, 4000)
    for rows in make_cells(prompts, KEYS[:1]).popitem()[1].rows:
        grids, _, residuals = rowcoding.to_levels(rows.logprobs)
        assert grids.max() <= 7
        assert not residuals.any()


def test_an_identical_cell_costs_next_to_nothing_and_a_similar_one_little() -> None:
    prompts = make_prompts(np.random.default_rng(3), 8, 16, 4000)
    one, same, similar = (
        make_cells(prompts, KEYS[:1], width=128),
        make_cells(prompts, KEYS[:1], width=128),
        make_cells(prompts, KEYS[:2], width=128, noise=0.01),
    )
    twice = {**one, KEYS[1]: dataclasses.replace(same[KEYS[0]], key=KEYS[1])}
    alone = len(encode_cells(one, prompts))
    assert len(encode_cells(twice, prompts)) < alone + 200
    first = {KEYS[0]: similar[KEYS[0]]}
    assert len(encode_cells(similar, prompts)) < 1.7 * len(encode_cells(first, prompts))
    assert_same_cells(twice, decode_cells(encode_cells(twice, prompts), prompts))


def test_decoded_rows_cannot_be_changed() -> None:
    prompts = make_prompts(np.random.default_rng(4), 2, 4, 4000)
    decoded = decode_cells(encode_cells(make_cells(prompts), prompts), prompts)
    with pytest.raises(ValueError, match="read-only"):
        decoded[KEYS[0]].rows[0].logprobs[0, 0] = 0


@given(st.data())
@settings(max_examples=120)
def test_damage_is_refused_or_harmless(data: st.DataObject) -> None:
    """Without a digest to protect them, changed bytes lead to other numbers or BaselineError."""
    prompts = make_prompts(np.random.default_rng(5), 2, 3, 50)
    payload = bytearray(encode_cells(make_cells(prompts, vocab_size=50, width=5), prompts))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    length = data.draw(st.integers(0, len(payload)) | st.just(len(payload)))
    with contextlib.suppress(BaselineError):
        decode_cells(bytes(payload[:length]), prompts)


def _rebuild(payload: bytes, change: object) -> bytes:
    """The payload with `change(header, streams)` applied."""
    (length,) = struct.unpack_from("<I", payload, len(MAGIC))
    start = len(MAGIC) + 4
    header = orjson.loads(payload[start : start + length])
    body = bytearray(payload[start + length :])
    change(header, body)  # type: ignore[operator]
    text = orjson.dumps(header)
    return MAGIC + struct.pack("<I", len(text)) + text + bytes(body)


def test_a_stream_that_expands_without_end_is_cut_off() -> None:
    prompts = make_prompts(np.random.default_rng(6), 2, 3, 50)
    payload = encode_cells(make_cells(prompts, KEYS[:1], vocab_size=50, width=5), prompts)

    def bomb(header: dict[str, list[dict[str, int]]], body: bytearray) -> None:
        first = header["dictionary"][0]
        compressed = lzma.compress(bytes(32 << 20))
        body[: first["compressed"]] = compressed
        first["compressed"] = len(compressed)

    with pytest.raises(BaselineError, match="another length than its header says"):
        decode_cells(_rebuild(payload, bomb), prompts)

    def honest_bomb(header: dict[str, list[dict[str, int]]], body: bytearray) -> None:
        bomb(header, body)
        header["dictionary"][0]["raw"] = 32 << 20

    with pytest.raises(BaselineError, match="a stream of 33554432 bytes, expected 1 to 50"):
        decode_cells(_rebuild(payload, honest_bomb), prompts)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("cells", 0, "width"), 1 << 20, "expected"),
        (("cells", 0, "based_on"), 0, "does not come before it"),
        (("cells", 0, "same_as"), 1, "does not come before it"),
        (("cells", 0, "batches"), [[0]], "does not hold each prompt once"),
        (("cells", 1, "batch_size"), 1, "occurs twice"),
        (("spans",), [3], "scored spans"),
        (("vocab_size",), 2, "expected"),
        (("dictionary_groups",), [1], "do not add up"),
        (("cells",), [], "at least 1 item"),
    ],
)
def test_headers_that_contradict_themselves(path: tuple[str | int, ...], value: object, message: str) -> None:
    prompts = make_prompts(np.random.default_rng(7), 2, 3, 50)
    payload = encode_cells(make_cells(prompts, KEYS[:2], vocab_size=50, width=5), prompts)

    def change(header: object, _: bytearray) -> None:
        for step in path[:-1]:
            header = header[step]  # type: ignore[index]
        header[path[-1]] = value  # type: ignore[index]

    with pytest.raises(BaselineError, match=message):
        decode_cells(_rebuild(payload, change), prompts)


def test_a_cell_larger_than_memory_is_refused_unread() -> None:
    prompts = make_prompts(np.random.default_rng(8), 1, 300, 50)
    payload = encode_cells(make_cells(prompts, KEYS[:1], vocab_size=50, width=5), prompts)

    def widen(header: dict[str, list[dict[str, int]]], _: bytearray) -> None:
        header["cells"][0]["width"] = 1 << 20

    with pytest.raises(BaselineError, match="is too large"):
        decode_cells(_rebuild(payload, widen), prompts)


def test_other_prompts_are_refused() -> None:
    prompts = make_prompts(np.random.default_rng(9), 3, 4, 50)
    payload = encode_cells(make_cells(prompts, vocab_size=50, width=5), prompts)
    with pytest.raises(BaselineError, match="its 3 scored spans are not those of the 2 prompts"):
        decode_cells(payload, prompts[:2])


def _with_rows(cells: dict[CellKey, Cell], **changes: object) -> dict[CellKey, Cell]:
    key, cell = next(iter(cells.items()))
    rows = (dataclasses.replace(cell.rows[0], **changes), *cell.rows[1:])  # type: ignore[arg-type]
    return {**cells, key: dataclasses.replace(cell, rows=rows)}


def test_what_is_no_recording_is_not_written() -> None:
    prompts = make_prompts(np.random.default_rng(10), 2, 4, 50)
    cells = make_cells(prompts, vocab_size=50, width=5)
    row = cells[KEYS[0]].rows[0]
    cases: list[tuple[dict[CellKey, Cell], str]] = [
        ({}, "at least one cell"),
        (_with_rows(cells, chosen_ids=(row.chosen_ids + 1) % 50), "chosen_ids are not the prompt's span"),
        (_with_rows(cells, token_ids=row.token_ids + 50), "outside 0..49"),
        (_with_rows(cells, logprobs=np.full_like(row.logprobs, np.nan)), "non-finite"),
        (_with_rows(cells, vocab_size=60), "one vocabulary size"),
        (_with_rows(cells, token_ids=row.token_ids[:, :3], logprobs=row.logprobs[:, :3]), "different K"),
        ({KEYS[1]: cells[KEYS[0]]}, "cell prefill-bs8 holds 2 of 2 prompts, as prefill-bs1"),
        ({KEYS[0]: dataclasses.replace(cells[KEYS[0]], batches=((0,), (0,)))}, "each of the 2 prompts once"),
    ]
    for bad, message in cases:
        with pytest.raises(ValueError, match=message):
            encode_cells(bad, prompts)


@given(hnp.arrays(np.int32, 20))
def test_zigzag(values: np.ndarray) -> None:
    coded = rowcoding.zigzag(values)
    assert (rowcoding.unzigzag(coded) == values).all()
    assert [int(code) for code in coded] == [2 * int(v) if v >= 0 else -2 * int(v) - 1 for v in values]
