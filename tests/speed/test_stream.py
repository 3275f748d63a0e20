"""Reading a streamed answer from bytes that are cut anywhere."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_quantguard.measure.load.stream import StreamError, StreamReader
from pytest_quantguard.stats.figures import RequestTiming
from tests.speed.streaming import DONE, event

BODY = {"input_ids": [1, 2, 3]}
HOSTILE = 'Größe 🙂 "completion_tokens":99, "error" [DONE] data: \n\n\r\n'


def finish(reader: StreamReader, tokens: int = 4) -> RequestTiming:
    return reader.finish(sent=0.0, input_tokens=3, output_tokens=tokens)


@given(cuts=st.lists(st.integers(0, 5000), max_size=40), line_end=st.sampled_from([b"\n", b"\r\n"]))
def test_cuts_anywhere_give_the_same_counts(cuts: list[int], line_end: bytes) -> None:
    """Also inside a character of several bytes, and with text that looks like the protocol."""
    whole = b"".join(event(number, 4, BODY, text=HOSTILE) for number in range(1, 5)) + DONE
    whole = whole.replace(b"\n\n", line_end * 2)
    reader = StreamReader()
    places = sorted({min(cut, len(whole)) for cut in cuts} | {0, len(whole)})
    for at, (start, end) in enumerate(pairwise(places)):
        reader.feed(whole[start:end], float(at))
    timing = finish(reader)
    assert timing.arrivals[-1][1] == timing.output_tokens == 4
    assert [tokens for _, tokens in timing.arrivals] == sorted({tokens for _, tokens in timing.arrivals})


def test_times_are_those_of_the_chunk_that_completes_an_event() -> None:
    reader = StreamReader()
    first, second = event(1, 2, BODY), event(2, 2, BODY)
    reader.feed(first[:10], 1.0)
    reader.feed(first[10:] + second[:5], 2.0)
    reader.feed(second[5:] + DONE, 5.0)
    timing = finish(reader, 2)
    assert timing.arrivals == ((2.0, 1), (5.0, 2))
    assert (timing.ttft, timing.e2e_latency, timing.tpot, timing.itl) == (2.0, 5.0, 3.0, [3.0])


def test_a_chunk_of_several_tokens_counts_as_equal_gaps() -> None:
    reader = StreamReader()
    reader.feed(event(2, 6, BODY), 1.0)
    reader.feed(event(4, 6, BODY) + event(6, 6, BODY) + DONE, 3.0)
    timing = finish(reader, 6)
    assert timing.itl == [0.5, 0.5, 0.5, 0.5]
    assert timing.tpot == pytest.approx(2 / 5)


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([event(4, 4, BODY)], "the stream ended early, after 4 of 4 tokens"),
        ([], "the stream ended early, after 0 of 4 tokens"),
        ([event(3, 3, BODY), DONE], "3 of 4 tokens came"),
        ([event(5, 5, BODY), DONE], "5 of 4 tokens came"),
        ([b'data: {"meta_info": {"completion_tokens": 4}} x\n\n', DONE], "the last event is no answer"),
        ([b'data: [{"completion_tokens": 4}]\n\n', DONE], "the last event is no answer"),
        *[
            (
                [b'data: {"meta_info": {"completion_tokens":4, "cached_tokens": %b}}\n\n' % cached, DONE],
                "no count",
            )
            for cached in (b'"abc"', b"[1]", b'{"a": 1}', b"-5", b"1e300", b"1.5")
        ],
    ],
)
def test_answers_that_are_not_whole(chunks: list[bytes], said: str) -> None:
    reader = StreamReader()
    for chunk in chunks:
        reader.feed(chunk, 0.0)
    with pytest.raises(StreamError, match=said):
        finish(reader)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'data: {"error": {"message": "boom"}}\n\n', "the server reported: boom"),
        (b'data: {"error": "boom"}\n\n', "the server reported: boom"),
        (b'data: "error" and more\n\n', "an event that reports an error"),
        (b'data: {"completion_tokens":null}\n\n', "an event without a token count"),
    ],
)
def test_events_that_report_errors(text: bytes, said: str) -> None:
    with pytest.raises(StreamError, match=said):
        StreamReader().feed(text, 0.0)


def test_the_recorded_stream_of_a_real_server() -> None:
    """Every token is one event; cut as a socket might cut it."""
    recorded = (Path(__file__).parents[1] / "data" / "sglang" / "stream.txt").read_bytes()
    reader = StreamReader()
    for at in range(0, len(recorded), 777):
        reader.feed(recorded[at : at + 777], at / 777)
    timing = reader.finish(sent=-1.0, input_tokens=26, output_tokens=8)
    assert [tokens for _, tokens in timing.arrivals] == list(range(1, 9))
    assert timing.cached_tokens == 24


@pytest.mark.parametrize("unit", [b"x", b"data: "])
def test_an_event_without_end_is_given_up(unit: bytes) -> None:
    """Its bytes are kept, so they must be bounded."""
    reader = StreamReader()
    reader.feed(unit * (1 << 20), 0.0)
    with pytest.raises(StreamError, match="MiB came without the end of an event"):
        reader.feed(unit * (1 << 24), 0.0)
