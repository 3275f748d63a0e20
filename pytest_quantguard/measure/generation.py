"""Asks questions many at a time and waits for whole answers, none longer than its budget of tokens and time.

An answer that is late is ended on the server, so that a model that no longer stops costs minutes and not
hours; what it had written by then is kept. Nothing is judged here.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from pytest_quantguard.errors import InvalidAnswerError, QuantguardError, RequestRejectedError, ServerError
from pytest_quantguard.generation.answer import Ending, GeneratedAnswer, Question, Route
from pytest_quantguard.measure.waiting import BEAT_SECONDS, Progress, duration
from pytest_quantguard.serving.answers import ChatRequest, GenerateRequest
from pytest_quantguard.serving.client import Client
from pytest_quantguard.serving.transport import NoAnswerInTimeError

GRACE_SECONDS = 15.0
"""How long after its deadline an ended request may take to come back; then its connection is closed, which
ends it on servers and routers that do not know /abort_request."""
TICK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Asking:
    """How questions are asked.

    concurrency: how many at the same time. deadline: seconds an answer may take. messages are made of
    `system`, if given, and the question; template_variables go to the server's template. Both concern the
    chat route only: on the native one the ids hold everything.
    """

    route: Route = "native"
    concurrency: int = 8
    deadline: float = 300.0
    system: str | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)


def answer_questions(
    client: Client,
    questions: Sequence[Question],
    asking: Asking,
    *,
    known: Mapping[str, GeneratedAnswer],
    keep: Callable[[GeneratedAnswer], None],
    progress: Progress | None = None,
) -> tuple[GeneratedAnswer, ...]:
    """The answer to each question, in order.

    known: answers that need not be asked for, by prompt id. keep: is called with each new answer as soon as
    it is there, in the caller's thread. Raises the ServerErrors, naming the prompt; requests that still run
    are ended then.
    """
    found = {
        question.prompt.id: known[question.prompt.id] for question in questions if question.prompt.id in known
    }
    asked = [question for question in questions if question.prompt.id not in found]
    tell = _ProgressLine(len(questions), len(found), progress)
    with _Workers(client, asked, asking) as workers:
        for answer in workers.answers(tell.waiting):
            keep(answer)
            found[answer.id] = answer
            tell(answer)
    return tuple(found[question.prompt.id] for question in questions)


@dataclass(slots=True)
class _Flight:
    """A request that is under way."""

    started: float
    ended_by_us: bool = False


class _Workers:
    """Threads that each ask one question after the other over a connection of their own."""

    def __init__(self, client: Client, questions: Sequence[Question], asking: Asking) -> None:
        self._client, self._asking = client, asking
        self._expected = len(questions)
        self._waiting: queue.SimpleQueue[Question] = queue.SimpleQueue()
        for question in questions:
            self._waiting.put(question)
        self._done: queue.SimpleQueue[GeneratedAnswer | BaseException] = queue.SimpleQueue()
        self._flights: dict[str, _Flight] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, name=f"generation-{number}", daemon=True)
            for number in range(min(asking.concurrency, len(questions)))
        ]
        self._control = client.sibling(request_timeout=GRACE_SECONDS)

    def __enter__(self) -> _Workers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        if error is not None:
            self._end([rid for rid, _ in self._under_way()])
        for thread in self._threads:
            thread.join(GRACE_SECONDS if error is None else 1.0)
        self._control.close()

    def answers(self, waiting: Callable[[int, float], None]) -> Iterator[GeneratedAnswer]:
        """Each answer as it comes. Raises what a thread raised.

        waiting: hears, as long as none comes, how many are under way and how old the oldest request is.
        """
        for _ in range(self._expected):
            beat = time.monotonic() + BEAT_SECONDS
            while True:
                self._end_late()
                try:
                    done = self._done.get(timeout=TICK_SECONDS)
                    break
                except queue.Empty:
                    now = time.monotonic()
                if now >= beat:
                    beat = now + BEAT_SECONDS
                    starts = [flight.started for _, flight in self._under_way()]
                    waiting(len(starts), now - min(starts, default=now))
            if isinstance(done, BaseException):
                raise done
            yield done

    def _end_late(self) -> None:
        """End the requests that are beyond their deadline."""
        now = time.monotonic()
        late = [
            rid
            for rid, flight in self._under_way()
            if not flight.ended_by_us and now - flight.started > self._asking.deadline
        ]
        self._end(late)

    def _end(self, rids: Sequence[str]) -> None:
        for rid in rids:
            with self._lock:
                if rid not in self._flights:
                    continue
                self._flights[rid].ended_by_us = True
            try:
                self._control.abort(rid)
            except ServerError:
                # A router may not know the route, a server may be dying: the thread that waits for the answer
                # gives up by itself after the grace, and says what it met.
                continue

    def _under_way(self) -> list[tuple[str, _Flight]]:
        with self._lock:
            return list(self._flights.items())

    def _work(self) -> None:
        """Runs in a thread; whatever it meets becomes an entry of `_done`."""
        patience = self._asking.deadline + GRACE_SECONDS
        with self._client.sibling(request_timeout=patience) as client:
            while not self._stopping.is_set():
                try:
                    question = self._waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    self._done.put(self._ask(client, question))
                except BaseException as error:
                    self._done.put(error)
                    return

    def _ask(self, client: Client, question: Question) -> GeneratedAnswer:
        rid, flight = f"quantguard-{uuid.uuid4().hex}", _Flight(time.monotonic())
        with self._lock:
            self._flights[rid] = flight
        try:
            answer = self._send(client, question, rid)
        except NoAnswerInTimeError:
            answer, flight.ended_by_us = _nothing(question), True
        except QuantguardError as error:
            # SGLang refuses a chat that is ended before its turn: it has no token counts then.
            if not (flight.ended_by_us and isinstance(error, RequestRejectedError | InvalidAnswerError)):
                raise _naming(question.prompt.id, error) from error
            answer = _nothing(question)
        finally:
            with self._lock:
                del self._flights[rid]
        seconds = time.monotonic() - flight.started
        return GeneratedAnswer(
            id=question.prompt.id,
            text=answer.text,
            output_ids=answer.output_ids,
            ending=_ending(answer.finish_reason, flight, question.prompt.id),
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            seconds=round(seconds, 3),
        )

    def _send(self, client: Client, question: Question, rid: str) -> _Answered:
        asking = self._asking
        if asking.route == "chat":
            system = [{"role": "system", "content": asking.system}] if asking.system is not None else []
            user = {"role": "user", "content": question.prompt.text or ""}
            chat = client.chat(
                ChatRequest((*system, user), question.max_new_tokens, rid, asking.template_variables)
            )
            return _Answered(chat.text, None, chat.finish_reason, chat.prompt_tokens, chat.completion_tokens)
        assert question.input_ids is not None
        request = GenerateRequest(
            input_ids=question.input_ids,
            max_new_tokens=question.max_new_tokens,
            ignore_eos=False,
            rid=rid,
        )
        (answer,) = client.generate([request])
        return _Answered(
            answer.text,
            answer.output_ids,
            answer.finish_reason,
            answer.prompt_tokens,
            answer.completion_tokens,
        )


@dataclass(frozen=True, slots=True)
class _Answered:
    """What both routes have in common."""

    text: str
    output_ids: tuple[int, ...] | None
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


def _nothing(question: Question) -> _Answered:
    """What there is of an answer that was ended before anything came."""
    return _Answered("", None, "abort", question.prompt_tokens, 0)


def _ending(finish_reason: str, flight: _Flight, prompt_id: str) -> Ending:
    if finish_reason == "abort":
        if not flight.ended_by_us:
            raise InvalidAnswerError(
                f"generation: prompt {prompt_id}: the server aborted the request by itself"
            )
        return "deadline"
    return "length" if finish_reason == "length" else "stop"


def _naming(prompt_id: str, error: QuantguardError) -> QuantguardError:
    """The same kind of error, with the prompt's name."""
    message = f"generation: prompt {prompt_id}: {error}"
    if isinstance(error, InvalidAnswerError):
        return InvalidAnswerError(message)
    if isinstance(error, RequestRejectedError):
        return RequestRejectedError(message)
    return error


class _ProgressLine:
    """Says how many answers there are and how long the others will take."""

    def __init__(self, total: int, known: int, progress: Progress | None) -> None:
        self._total, self._known, self._progress = total, known, progress
        self._started = time.monotonic()
        self._count = self._tokens = self._cut = 0

    def waiting(self, under_way: int, oldest: float) -> None:
        """No answer has come for a while."""
        if self._progress is not None:
            self._progress(
                f"generation: {self._known + self._count} of {self._total} answers, waiting for {under_way}, "
                f"the oldest asked {duration(oldest)} ago"
            )

    def __call__(self, answer: GeneratedAnswer) -> None:
        self._count += 1
        self._tokens += answer.completion_tokens
        self._cut += answer.ran_on
        if self._progress is None:
            return
        seconds = max(time.monotonic() - self._started, 1e-3)
        left = self._total - self._known - self._count
        ahead = f"about {duration(left * seconds / self._count)} left" if left else f"in {duration(seconds)}"
        cut = f", {self._cut} cut off" if self._cut else ""
        self._progress(
            f"generation: {self._known + self._count} of {self._total} answers{cut}, "
            f"{self._tokens / seconds:.0f} tokens/s, {ahead}"
        )
