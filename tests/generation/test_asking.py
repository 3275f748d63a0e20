"""Many questions at a time to a scripted server: order, budgets, deadlines, failures."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from pytest_quantguard.errors import InvalidAnswerError, RequestRejectedError, ServerDiedError
from pytest_quantguard.generation.answer import GeneratedAnswer, Question
from pytest_quantguard.measure import generation
from pytest_quantguard.measure.generation import Asking, answer_questions
from pytest_quantguard.measure.waiting import duration
from pytest_quantguard.prompts.prompt import Prompt
from pytest_quantguard.serving.client import Client
from tests.generation.scripted import Reply, Script

COLOURS = "red green blue black white pink grey brown gold teal".split()  # noqa: SIM905


def questions(count: int = 10, limit: int = 64, *, chat: bool = False) -> list[Question]:
    found = []
    for number, colour in enumerate(COLOURS[:count]):
        text = f"q{number}: gold={colour} ?"
        ids = None if chat else tuple(text.encode())
        found.append(Question(Prompt(f"q{number}", "qa", text, gold=(colour,)), ids, len(text), limit))
    return found


def ask(client: Client, asked: list[Question], asking: Asking | None = None) -> tuple[GeneratedAnswer, ...]:
    return answer_questions(client, asked, asking or Asking(), known={}, keep=lambda _: None)


def test_answers_come_in_order_however_many_at_a_time(client: Client, script: Script) -> None:
    barrier = threading.Barrier(5)

    def wait_for_five(_: str) -> None:
        barrier.wait(20)  # passes only when five questions are with the server at the same time

    script.reply = wait_for_five
    answers = ask(client, questions(), Asking(concurrency=5))
    assert [answer.text for answer in answers] == [f"It is {colour}." for colour in COLOURS]
    assert [answer.id for answer in answers] == [f"q{number}" for number in range(10)]
    assert script.most_at_once == 5
    first = answers[0]
    assert first.output_ids == tuple(b"It is red.")
    assert (first.ending, first.completion_tokens) == ("stop", 10)


def test_one_at_a_time(client: Client, script: Script) -> None:
    ask(client, questions(4), Asking(concurrency=1))
    assert script.most_at_once == 1
    assert [text[:2] for text in script.asked] == ["q0", "q1", "q2", "q3"]


def test_requests_are_greedy_and_may_end(client: Client, script: Script) -> None:
    ask(client, questions(1, limit=17))
    (body,) = script.bodies
    assert body["sampling_params"] == [{"temperature": 0, "max_new_tokens": 17, "ignore_eos": False}]
    assert len(body["rid"]) == 1


def test_a_token_budget_cuts_off(client: Client, script: Script) -> None:
    script.reply = lambda _: Reply("and so on " * 50)
    (answer,) = ask(client, questions(1, limit=20))
    assert (answer.ending, answer.completion_tokens) == ("length", 20)
    assert answer.ran_on


def test_a_deadline_ends_the_request_and_keeps_what_was_written(
    client: Client, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock stands still until the two questions that do not hang are answered."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(generation, "time", clock)
    script.reply = lambda text: Reply("so far", hangs=True) if "q1" in text else None
    kept: list[str] = []

    def keep(answer: GeneratedAnswer) -> None:
        kept.append(answer.id)
        if len(kept) == 2:
            clock.now = 0.1

    asking = Asking(concurrency=2, deadline=0.05)
    answers = answer_questions(client, questions(3), asking, known={}, keep=keep)
    assert kept == ["q0", "q2", "q1"]
    assert [answer.ending for answer in answers] == ["stop", "deadline", "stop"]
    assert answers[1].text == "so far"
    assert len(script.aborted) == 1


def test_a_server_that_does_not_know_abort_loses_the_connection(
    client: Client, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(script, "abort", lambda _: None)
    script.reply = lambda _: Reply("lost", hangs=True)
    (answer,) = ask(client, questions(1), Asking(deadline=0.05))
    assert (answer.text, answer.ending) == ("", "deadline")


def test_an_abort_that_nobody_asked_for_is_an_error(client: Client, script: Script) -> None:
    script.reply = lambda _: Reply("half", finish="abort")
    with pytest.raises(InvalidAnswerError, match=r"prompt q0: the server aborted the request by itself"):
        ask(client, questions(1))


def test_a_refusal_names_the_prompt(client: Client, script: Script) -> None:
    script.reply = lambda text: Reply("no such thing", status=400) if "q2" in text else None
    with pytest.raises(RequestRejectedError, match=r"generation: prompt q2: .*400: no such thing"):
        ask(client, questions(5), Asking(concurrency=2))


def test_a_dying_server_ends_everything(client: Client, script: Script) -> None:
    script.reply = lambda text: Reply("", drops=True) if "q1" in text else None
    with pytest.raises(ServerDiedError, match="dropped the connection"):
        ask(client, questions(4), Asking(concurrency=1))


def test_what_runs_is_ended_when_another_fails(client: Client, script: Script) -> None:
    together = threading.Barrier(2)

    def reply(text: str) -> Reply | None:
        together.wait(20)
        return Reply("bad", status=400) if "q0" in text else Reply("on and on", hangs=True)

    script.reply = reply
    with pytest.raises(RequestRejectedError):
        ask(client, questions(2), Asking(concurrency=2, deadline=60))
    assert len(script.aborted) == 1


def test_an_interrupt_ends_what_runs_and_keeps_what_is_done(client: Client, script: Script) -> None:
    together = threading.Barrier(2)

    def reply(text: str) -> Reply | None:
        together.wait(20)
        return Reply("on", hangs=True) if "q1" in text else None

    script.reply = reply
    kept: list[str] = []

    def keep(answer: GeneratedAnswer) -> None:
        kept.append(answer.id)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_questions(client, questions(2), Asking(concurrency=2), known={}, keep=keep)
    assert kept == ["q0"]
    assert len(script.aborted) == 1


def test_known_answers_are_not_asked_again(client: Client, script: Script) -> None:
    known = {answer.id: answer for answer in ask(client, questions(2))}
    script.asked.clear()
    lines: list[str] = []
    kept: list[str] = []
    answers = answer_questions(
        client,
        questions(4),
        Asking(concurrency=1),
        known=known,
        keep=lambda answer: kept.append(answer.id),
        progress=lines.append,
    )
    assert [answer.id for answer in answers] == ["q0", "q1", "q2", "q3"]
    assert len(script.asked) == 2
    assert kept == ["q2", "q3"]
    assert lines[0].startswith("generation: 3 of 4 answers, ")
    assert "left" in lines[0]
    assert lines[1].startswith("generation: 4 of 4 answers, ")


def test_the_chat_route_sends_messages(client: Client, script: Script) -> None:
    asking = Asking(route="chat", system="Be brief.", template_variables={"enable_thinking": False})
    (answer,) = ask(client, questions(1, chat=True), asking)
    assert (answer.text, answer.output_ids, answer.prompt_tokens) == ("It is red.", None, 7)
    (body,) = script.bodies
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "q0: gold=red ?"},
    ]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert (body["temperature"], body["max_tokens"]) == (0, 64)


def test_a_chat_without_text_is_an_empty_answer(client: Client, script: Script) -> None:
    script.reply = lambda _: Reply("")
    (answer,) = ask(client, questions(1, chat=True), Asking(route="chat"))
    assert (answer.text, answer.completion_tokens) == ("", 0)


def test_a_chat_deadline(client: Client, script: Script) -> None:
    script.reply = lambda _: Reply("so far", hangs=True)
    (answer,) = ask(client, questions(1, chat=True), Asking(route="chat", deadline=0.05))
    assert (answer.text, answer.ending) == ("so far", "deadline")


def test_a_server_that_refuses_what_was_ended_before_its_turn(client: Client, script: Script) -> None:
    script.reply = lambda _: Reply("no counts", hangs=True, status=500)
    (answer,) = ask(client, questions(1, chat=True), Asking(route="chat", deadline=0.05))
    assert (answer.text, answer.ending) == ("", "deadline")


def test_strange_characters_arrive_as_they_are(client: Client, script: Script) -> None:
    text = "a\x00\x1b[31mb\u202eשלום\u200d👩‍👩‍👧 \ufffd\r\n"
    script.reply = lambda _: Reply(text)
    (answer,) = ask(client, questions(1))
    assert answer.text == text
    assert GeneratedAnswer.model_validate_json(answer.model_dump_json()) == answer


@pytest.mark.parametrize(("seconds", "text"), [(40, "40 s"), (200, "3 min"), (9000, "2.5 h")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_long_wait_is_spoken_of(client: Client, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "BEAT_SECONDS", 0.0)
    monkeypatch.setattr(generation, "TICK_SECONDS", 0.001)
    heard, lines = threading.Event(), []

    def progress(line: str) -> None:
        lines.append(line)
        if "waiting for 2" in line:
            heard.set()

    def wait(_: str) -> None:
        assert heard.wait(20)

    script.reply = wait
    answer_questions(
        client, questions(2), Asking(concurrency=2), known={}, keep=lambda _: None, progress=progress
    )
    assert "generation: 0 of 2 answers, waiting for 2, the oldest asked 0 s ago" in lines
