"""Carries requests from the HTTP server's event loop to the engine's thread, and their results back.

Here live the things that need both text and time: stop strings, when the first token came, and what happens
to a sequence whose client went away. Nothing of HTTP, nothing of answers' layout.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from pytest_quantguard.emulator.encoding import Timing
from pytest_quantguard.emulator.engine import Engine
from pytest_quantguard.emulator.metrics import Metrics
from pytest_quantguard.emulator.protocol import GenerateCall, GenerateItem, HttpError, rejected
from pytest_quantguard.emulator.sequences import LogprobRows, Sequence, SequenceResult
from pytest_quantguard.emulator.tokenizer import TextTokenizer
from pytest_quantguard.errors import QuantguardError, RequestRejectedError


@dataclass(frozen=True, slots=True)
class Outcome:
    """The state of one sequence of a call, final when the result has a finish reason."""

    index: int
    item: GenerateItem
    result: SequenceResult
    text: str
    timing: Timing


class Dispatcher:
    """Runs calls on one engine; used from one event loop."""

    def __init__(self, engine: Engine, tokenizer: TextTokenizer | None, metrics: Metrics) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.metrics = metrics
        self._active: set[str] = set()

    async def run(self, call: GenerateCall, received: float) -> list[Outcome]:
        """The final outcome of every sequence, in the call's order."""
        outcomes: dict[int, Outcome] = {}
        async with contextlib.aclosing(self.updates(call, received, every_token=False)) as updates:
            async for outcome in updates:
                outcomes[outcome.index] = outcome
        return [outcomes[i] for i in range(len(call.items))]

    async def updates(
        self, call: GenerateCall, received: float, *, every_token: bool
    ) -> AsyncGenerator[Outcome, None]:
        """Outcomes as they come: after every token, or only final ones; in any order of sequences.

        Raises HttpError for what the engine refuses or fails at. Closing it early (the client went away)
        aborts what still runs.
        """
        following = Following(call, received, every_token, asyncio.get_running_loop())
        running = {item.request.rid for item in call.items}
        repeated = sorted(running & self._active)
        if repeated:
            raise rejected(f"Duplicate request ID detected: {repeated[0]}")
        try:
            self.engine.submit_batch([item.request for item in call.items], following.on_progress)
        except QuantguardError as error:
            raise answered(error) from error
        following.dispatched()
        self._active |= running
        try:
            ended_by_text: dict[int, tuple[int, str]] = {}
            while running:
                index, update = await following.queue.get()
                if isinstance(update, Exception):
                    raise answered(update) from update
                item = call.items[index]
                final = update.finish_reason is not None
                if final:
                    if index in ended_by_text:
                        update = cut(update, *ended_by_text[index])
                    running.discard(item.request.rid)
                    following.timings[index].finished = time.time()
                    self.metrics.finished(update)
                elif index in ended_by_text:
                    continue
                else:
                    matched = self.stop_string(item, update)
                    if matched is not None:
                        ended_by_text[index] = (len(update.output_ids), matched)
                        self.engine.abort(item.request.rid)
                        continue
                if final or every_token:
                    yield Outcome(index, item, update, self.text(item, update), following.timings[index])
        finally:
            self._active -= {item.request.rid for item in call.items}
            for rid in running:
                self.engine.abort(rid)
            self.metrics.abandoned(len(running))

    def abort(self, rid: str) -> None:
        """Abort the active sequences whose id begins with `rid`; the empty string means all."""
        for active in [name for name in self._active if name.startswith(rid)]:
            self.engine.abort(active)

    def stop_string(self, item: GenerateItem, result: SequenceResult) -> str | None:
        """The first of the item's stop strings that its text now holds."""
        if not item.sampling.stop or self.tokenizer is None:
            return None
        text = self.decode(item, result.output_ids)
        return next((stop for stop in item.sampling.stop if stop in text), None)

    def text(self, item: GenerateItem, result: SequenceResult) -> str:
        """The text of an answer, without what stopped it unless `no_stop_trim`."""
        matched = (result.finish_reason or {}).get("matched")
        keep = item.sampling.no_stop_trim
        if isinstance(matched, int) and not keep:
            return self.decode(item, result.output_ids[:-1])
        text = self.decode(item, result.output_ids)
        if isinstance(matched, str):
            return text[: text.index(matched) + (len(matched) if keep else 0)]
        return text

    def decode(self, item: GenerateItem, ids: tuple[int, ...]) -> str:
        """Text of generated tokens; empty where the model has no tokenizer."""
        if self.tokenizer is None:
            return ""
        skip = item.sampling.skip_special_tokens
        return self.tokenizer.decode_output(item.request.input_ids, ids, skip_special_tokens=skip)


def answered(error: Exception) -> HttpError:
    """An error of the engine as an answer: 400 if the request is at fault, 500 if the model is."""
    if isinstance(error, RequestRejectedError):
        return rejected(str(error))
    return rejected(f"{type(error).__name__}: {error}", status=500)


def cut(result: SequenceResult, steps: int, matched: str) -> SequenceResult:
    """The result as it stood after `steps` tokens, when a stop string appeared."""
    rows = result.output
    if rows is not None:
        rows = LogprobRows(
            token_ids=rows.token_ids[:steps],
            logprobs=rows.logprobs[:steps],
            top_ids=rows.top_ids[:steps],
            top_logprobs=rows.top_logprobs[:steps],
            selected_logprobs=rows.selected_logprobs[:steps],
            null_prefix=rows.null_prefix,
        )
    return replace(
        result,
        output_ids=result.output_ids[:steps],
        output=rows,
        finish_reason={"type": "stop", "matched": matched},
    )


class Following:
    """Receives the engine's callbacks of one call, on its thread, and queues them for the event loop."""

    def __init__(
        self, call: GenerateCall, received: float, every_token: bool, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.queue: asyncio.Queue[tuple[int, SequenceResult | Exception]] = asyncio.Queue()
        self.timings = [Timing(received=received, dispatched=received) for _ in call.items]
        self._loop = loop
        self._indices = {item.request.rid: index for index, item in enumerate(call.items)}
        self._stepwise = [every_token or bool(item.sampling.stop) for item in call.items]

    def dispatched(self) -> None:
        """All sequences are in the engine's hands."""
        for timing in self.timings:
            timing.dispatched = time.time()

    def on_progress(self, sequence: Sequence) -> None:
        """A sequence has a new token, or has ended."""
        index = self._indices[sequence.request.rid]
        if self.timings[index].first_token is None:
            self.timings[index].first_token = time.time()
        if not (sequence.done or self._stepwise[index]):
            return
        update: SequenceResult | Exception
        try:
            update = sequence.partial()
        except Exception as error:  # whatever ended the sequence is raised again on the event loop
            update = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped, nobody waits
            self._loop.call_soon_threadsafe(self.queue.put_nowait, (index, update))
