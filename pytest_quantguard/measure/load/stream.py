"""Reads one streamed /generate answer: when tokens came, how many, and how it ended.

Works on bytes, so that chunks may split events or characters anywhere. Only the token counter of an event is
looked at while the answer streams; the last event alone is decoded, so that the client stays cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from pytest_quantguard.stats.figures import RequestTiming

COUNTER = b'"completion_tokens":'
"""Cannot occur inside a JSON string: quotes are escaped there."""
ERROR = b'"error"'
DONE = b"[DONE]"
MAX_EVENT_BYTES = 1 << 24
"""An event holds the whole answer so far; what is longer than this is no answer but a stream without end."""


class StreamError(Exception):
    """Why an answer does not count."""


class StreamReader:
    """Takes the chunks of one answer; events that arrive together count as one arrival."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, int]] = []
        self._rest = b""
        self._last = b""
        self._done = False

    def feed(self, chunk: bytes, now: float) -> None:
        """A chunk that arrived at `now`, in seconds. Raises StreamError where the server reports an error."""
        data = self._rest + chunk if self._rest else chunk
        if b"\r" in data:  # JSON escapes it: only line ends have it.
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise StreamError(f"more than {MAX_EVENT_BYTES >> 20} MiB came without the end of an event")
        tokens = 0
        for event in events:
            at = event.rfind(COUNTER)
            if at >= 0:
                tokens = _integer_at(event, at + len(COUNTER))
                self._last = event
            elif DONE in event:
                self._done = True
            elif ERROR in event:
                raise StreamError(_error_of(event))
        if tokens > (self.arrivals[-1][1] if self.arrivals else 0):
            self.arrivals.append((now, tokens))

    def finish(self, *, sent: float, input_tokens: int, output_tokens: int) -> RequestTiming:
        """The timing of a whole answer to a request of so many tokens in and out.

        Raises StreamError where it stopped half-way or has another number of tokens.
        """
        received = self.arrivals[-1][1] if self.arrivals else 0
        if not self._done:
            raise StreamError(f"the stream ended early, after {received} of {output_tokens} tokens")
        meta = _meta_of(self._last) if received else {}
        if received != output_tokens:
            reason = meta.get("finish_reason")
            raise StreamError(f"{received} of {output_tokens} tokens came, finish_reason {reason}")
        if meta.get("prompt_tokens", input_tokens) != input_tokens:
            raise StreamError(
                f"the server counts {meta['prompt_tokens']} prompt tokens, {input_tokens} were sent"
            )
        cached = meta.get("cached_tokens") or 0
        if not isinstance(cached, int) or cached < 0:
            raise StreamError(f"cached_tokens of the last event is no count: {str(cached)[:100]}")
        return RequestTiming(
            sent=sent,
            arrivals=tuple(self.arrivals),
            ended=self.arrivals[-1][0],
            input_tokens=input_tokens,
            output_tokens=received,
            cached_tokens=cached,
        )


def _integer_at(event: bytes, start: int) -> int:
    """The number that begins at `start`, up to the next comma or brace."""
    digits = event[start : start + 20].split(b",", 1)[0].split(b"}", 1)[0].strip()
    if not digits.isdigit():
        raise StreamError(f"an event without a token count: {event[:200].decode(errors='replace')}")
    return int(digits)


def _meta_of(event: bytes) -> Mapping[str, Any]:
    try:
        loaded = orjson.loads(event.strip().removeprefix(b"data:"))
        meta = loaded["meta_info"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise StreamError(f"the last event is no answer: {event[:200].decode(errors='replace')}") from error
    if not isinstance(meta, dict):
        raise StreamError(f"the last event has no meta_info: {event[:200].decode(errors='replace')}")
    return meta


def _error_of(event: bytes) -> str:
    try:
        error = orjson.loads(event.strip().removeprefix(b"data:"))["error"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return f"an event that reports an error: {event[:300].decode(errors='replace')}"
    message = error.get("message") if isinstance(error, dict) else error
    return f"the server reported: {str(message)[:300]}"
