"""Between the event loop and the engine: errors, aborted work, stop strings, with a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from pytest_quantguard.emulator.dispatch import Dispatcher, Outcome
from pytest_quantguard.emulator.engine import Engine
from pytest_quantguard.emulator.metrics import Metrics
from pytest_quantguard.emulator.protocol import GenerateCall, HttpError, Limits, parse_generate
from pytest_quantguard.emulator.sequences import LogprobRows, Sequence, SequenceRequest, SequenceResult
from pytest_quantguard.emulator.tokenizer import TextTokenizer
from pytest_quantguard.errors import RequestRejectedError, ServerError

LIMITS = Limits(vocab_size=128, context_length=64, encode=None)


class Letters:
    """A tokenizer whose token ids are ASCII codes."""

    def decode_output(self, _prompt: Any, ids: Any, *, skip_special_tokens: bool) -> str:
        del skip_special_tokens
        return "".join(map(chr, ids))


class ScriptedEngine:
    """Answers each request with the tokens of `text`, or with an error, from another thread."""

    def __init__(
        self, text: str = "", error: Exception | None = None, refuse: Exception | None = None
    ) -> None:
        self.text, self.error, self.refuse = text, error, refuse
        self.aborted: list[str] = []

    def submit_batch(self, requests: list[SequenceRequest], on_progress: Callable[[Sequence], None]) -> None:
        if self.refuse is not None:
            raise self.refuse
        loop = asyncio.get_running_loop()
        for request in requests:
            loop.run_in_executor(None, self.play, Sequence(request, on_progress))

    def play(self, sequence: Sequence) -> None:
        """All tokens; each is published, as the engine's thread does."""
        if self.error is not None:
            sequence.fail(self.error)
            return
        for count in range(1, len(self.text) + 1):
            final = count == len(self.text)
            result = self.result(
                sequence.request, count, {"type": "length", "length": count} if final else None
            )
            sequence.publish(count, lambda result=result: result, final=final)

    def result(self, request: SequenceRequest, count: int, reason: dict[str, Any] | None) -> SequenceResult:
        ids = tuple(map(ord, self.text[:count]))
        rows = np.arange(count, dtype=np.float32)
        logprobs = LogprobRows(
            np.array(ids, np.int32), -rows, np.zeros((count, 1), np.int32), -rows[:, None], -rows[:, None], 0
        )
        return SequenceResult(request.rid, len(request.input_ids), 0, ids, reason, None, logprobs)

    def abort(self, rid: str) -> bool:
        self.aborted.append(rid)
        return True


def call(**fields: Any) -> GenerateCall:
    return parse_generate({"input_ids": [[1], [2]], "rid": ["a", "b"], **fields}, LIMITS)


def dispatcher(engine: ScriptedEngine) -> Dispatcher:
    return Dispatcher(cast(Engine, engine), cast(TextTokenizer, Letters()), Metrics("toy"))


def run(engine: ScriptedEngine, wanted: GenerateCall) -> list[Outcome]:
    return asyncio.run(dispatcher(engine).run(wanted, 0.0))


def test_results_come_in_the_calls_order_with_their_text() -> None:
    outcomes = run(ScriptedEngine("hello"), call())
    assert [outcome.result.rid for outcome in outcomes] == ["a", "b"]
    assert [outcome.text for outcome in outcomes] == ["hello", "hello"]
    assert all(outcome.timing.first_token and outcome.timing.finished for outcome in outcomes)


def test_an_error_of_the_model_is_a_500_that_names_it() -> None:
    with pytest.raises(HttpError, match="ArithmeticError: boom") as caught:
        run(ScriptedEngine(error=ArithmeticError("boom")), call())
    assert caught.value.status == 500


@pytest.mark.parametrize(
    ("refusal", "status"),
    [(RequestRejectedError("too much"), 400), (ServerError("the engine has stopped"), 500)],
)
def test_what_the_engine_refuses_is_answered(refusal: Exception, status: int) -> None:
    engine = ScriptedEngine(refuse=refusal)
    with pytest.raises(HttpError, match=str(refusal)) as caught:
        run(engine, call())
    assert caught.value.status == status
    assert engine.aborted == []


def test_a_stop_string_cuts_text_tokens_and_rows() -> None:
    engine = ScriptedEngine("one, two, three")
    first, _ = run(engine, call(sampling_params=[{"stop": [", t", "zzz"]}, {}], return_logprob=True))
    assert (first.text, first.result.finish_reason) == ("one", {"type": "stop", "matched": ", t"})
    assert first.result.output_ids == tuple(map(ord, "one, t"))
    assert first.result.output is not None
    assert len(first.result.output.logprobs) == len(first.result.output.top_ids) == 6
    assert engine.aborted == ["a"]


def test_an_answer_that_is_complete_keeps_a_stop_string_in_its_last_token() -> None:
    """As SGLang, which looks at the length first."""
    first, _ = run(ScriptedEngine("ab"), call(sampling_params={"stop": "b"}))
    assert (first.text, first.result.finish_reason) == ("ab", {"type": "length", "length": 2})


def test_closing_early_aborts_what_still_runs() -> None:
    engine = ScriptedEngine("abc")
    metrics = Metrics("toy")

    async def first_update() -> Outcome:
        updates = Dispatcher(cast(Engine, engine), cast(TextTokenizer, Letters()), metrics).updates(
            call(), 0.0, every_token=True
        )
        async with contextlib.aclosing(updates):
            return await anext(updates)

    assert asyncio.run(first_update()).text == "a"
    assert sorted(engine.aborted) == ["a", "b"]
    assert 'num_aborted_requests_total{model_name="toy"} 2.0' in metrics.render({})


def test_abort_takes_a_prefix_of_the_id() -> None:
    engine = ScriptedEngine("abcdef")

    async def scenario() -> None:
        running = dispatcher(engine)
        updates = running.updates(call(rid="job"), 0.0, every_token=True)
        async with contextlib.aclosing(updates):
            await anext(updates)
            running.abort("other")
            assert engine.aborted == []
            running.abort("job_1")
            assert engine.aborted == ["job_1"]
            running.abort("")
            assert sorted(engine.aborted) == ["job_0", "job_1", "job_1"]

    asyncio.run(scenario())


def test_an_id_that_is_in_use_is_refused() -> None:
    async def scenario() -> None:
        running = dispatcher(ScriptedEngine("abcdef"))
        updates = running.updates(call(), 0.0, every_token=True)
        async with contextlib.aclosing(updates):
            await anext(updates)
            with pytest.raises(HttpError, match="Duplicate request ID detected: a"):
                await running.run(call(rid=["a", "c"]), 0.0)

    asyncio.run(scenario())
