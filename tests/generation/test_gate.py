"""The whole way: the reference's answers are stored, the candidate's asked, judged and reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import pytest_quantguard.gate.hooks  # noqa: F401 - once here, not anew in every run inside this process
from pytest_quantguard.baseline.answers import ReferenceAnswer, read_answers, write_answers
from pytest_quantguard.errors import BaselineError, ConfigError, QuantguardError, ServerDiedError
from pytest_quantguard.results import read_result
from tests.generation.gate import Project, make_project
from tests.generation.scripted import Reply, Script, serve


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """Without stored answers."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("BUILD_NUMBER", raising=False)
    pytester.makeini(
        "[pytest]\naddopts = -p no:cacheprovider -p no:hypothesispytest -p no:anyio --assert=plain\n"
    )
    with ExitStack() as stack:
        sides = [(script, stack.enter_context(serve(script))) for script in (Script(), Script())]
        yield make_project(pytester.path, *sides)


@pytest.fixture
def captured(project: Project) -> Project:
    project.capture()
    return project


def failed(found: dict[str, object]) -> list[str]:
    return [name for name, result in found.items() if result.outcome == "failed"]  # type: ignore[attr-defined]


def test_answers_are_stored_with_the_ids_that_were_sent(project: Project) -> None:
    said = project.capture()
    assert said == "10 generated answers of the reference stored."
    stored = read_answers(project.folder / "baseline", command="x")
    first = stored.answers[0]
    assert first.input_ids == tuple(b"q0: gold=red ?")
    assert (first.answer.text, first.answer.ending) == ("It is red.", "stop")
    assert stored.header.noise["all"]["text_agreement"] == 1.0
    assert len(project.reference.asked) == 20, "twice, to know the reference's own noise"
    text = (next((project.folder / "baseline").glob("generation-*.json"))).read_text(encoding="utf-8")
    assert str(project.folder) not in text, "no path of this machine"


def test_a_good_candidate_holds(captured: Project) -> None:
    found = captured.judge(score={"min": 1.0}, text_agreement={"min": 1.0}, loss_p={"min": 0.01})
    assert failed(found) == []
    assert found["generation[relative_score]"].value == 1.0
    assert found["generation[relative_score]"].message.startswith("relative_score 1 is within")
    assert {text.split(":")[0] for text in captured.candidate.asked} == {f"q{n}" for n in range(10)}


def test_the_candidate_is_asked_once_for_all_checks(captured: Project) -> None:
    captured.judge()
    assert len(captured.candidate.asked) == 10


def test_lost_answers_fail_score_and_test(captured: Project) -> None:
    captured.candidate.reply = lambda text: Reply("It is mud.") if text[1] in "012345678" else None
    found = captured.judge(
        loss_p={"min": 0.01}, tasks={"qa": {"score": {"min": 0.5}}, "lcx": {"score": {"min": 0.2}}}
    )
    assert failed(found) == ["generation[relative_score]", "generation[loss_p]", "generation[qa-score]"]
    assert found["generation[loss_p]"].value == pytest.approx(2 / 2**9)
    message = found["generation[relative_score]"].message
    assert "relative_score is 0.1; at least 0.95 is" in message
    assert "9 lost, 0 won (exact McNemar p = 0.00391)" in " ".join(message.split())
    assert "prompt q0: lost" in message
    assert "reference  'It is red.'" in message
    assert "candidate  'It is mud.'" in message
    assert "generation.relative_score in" in message
    assert "generation.tasks.qa.score in" in found["generation[qa-score]"].message


def test_runaways_are_cut_off_and_counted(captured: Project) -> None:
    captured.candidate.reply = lambda _: Reply("It is red. and then " * 100)
    found = captured.judge(relative_score=None, loops=None)
    assert failed(found) == ["generation[runaways]", "generation[length_ratio]"]
    assert found["generation[runaways]"].value == 1.0
    limits = {body["sampling_params"][0]["max_new_tokens"] for body in captured.candidate.bodies}
    assert limits == {128}, "four times the reference's ten tokens, but at least 128"
    assert "runaway" in found["generation[runaways]"].message
    assert "[length after 128 tokens]" in found["generation[runaways]"].message


def test_late_answers_are_ended_and_counted(captured: Project) -> None:
    captured.candidate.reply = lambda text: Reply("hm", hangs=True) if text.startswith("q3") else None
    found = captured.judge(deadline=0.05, relative_score=None)
    assert failed(found) == ["generation[runaways]"]
    assert found["generation[runaways]"].value == pytest.approx(0.1)
    assert "[deadline after" in found["generation[runaways]"].message


def test_empty_looping_and_echoing_answers(captured: Project) -> None:
    strange = {"q1": Reply(""), "q2": Reply("no " * 40), "q4": Reply("\u202e\u200b")}
    captured.candidate.reply = lambda text: strange.get(text[:2])
    found = captured.judge(relative_score=None, length_ratio=None)
    assert failed(found) == ["generation[empty_answers]", "generation[loops]"]
    assert found["generation[empty_answers]"].value == pytest.approx(0.2)


def test_what_the_reference_does_itself_is_no_fault(project: Project) -> None:
    project.reference.reply = project.candidate.reply = lambda text: (
        Reply("") if text.startswith("q1") else None
    )
    project.capture()
    assert failed(project.judge()) == []


def test_a_bound_tighter_than_the_references_own_noise_is_refused(project: Project) -> None:
    seen: list[str] = []

    def wavering(text: str) -> Reply | None:
        seen.append(text)
        return Reply("It is mud.") if text.startswith("q1") and seen.count(text) > 1 else None

    project.reference.reply = wavering
    project.capture()
    with pytest.raises(
        ConfigError, match=r"tighter than the reference's own noise floor 0\.9.*text_agreement"
    ):
        project.judge(text_agreement={"min": 1.0}, relative_score=None)


def test_a_share_of_nothing_is_not_judged(project: Project) -> None:
    project.reference.reply = lambda _: Reply("mud")
    project.capture()
    with pytest.raises(
        ConfigError, match=r"relative_score of all tasks was not judged: the reference scores 0"
    ):
        project.judge()


def test_without_answers_the_command_is_named(project: Project) -> None:
    with pytest.raises(
        BaselineError, match=r"holds no answers .*quantguard capture .*gate\.yaml --generation"
    ):
        project.judge()


def test_answers_to_other_questions_are_refused_with_a_table(captured: Project) -> None:
    with pytest.raises(BaselineError, match=r"max_new_tokens +200 +64\n"):
        captured.judge(max_new_tokens=64)
    lines = (captured.folder / "q.jsonl").read_text(encoding="utf-8").splitlines()
    (captured.folder / "q.jsonl").write_text("\n".join(reversed(lines)) + "\n", encoding="utf-8")
    with pytest.raises(BaselineError, match=r"the prompts, their order or their gold answers differ"):
        captured.judge()


def test_answers_that_are_not_all_there_are_refused(captured: Project) -> None:
    """Fewer questions would be asked, and the gate would pass on what is left."""
    baseline = captured.folder / "baseline"
    stored = read_answers(baseline, command="x")
    first, *rest = stored.answers
    unknown = ReferenceAnswer(
        input_ids=first.input_ids, answer=first.answer.model_copy(update={"id": "elsewhere"})
    )
    for answers, message in (
        (rest, "lack an answer to prompt q0"),
        ([], "lack an answer to prompt q0"),
        ([unknown, first, *rest], "hold an answer to an unknown prompt elsewhere"),
    ):
        write_answers(baseline, stored.model_copy(update={"answers": tuple(answers)}))
        with pytest.raises(BaselineError, match=rf"{message}.* Record them anew with: quantguard capture"):
            captured.judge()
    assert captured.candidate.asked == []


def test_no_baseline_is_told_before_a_server_is_asked(project: Project) -> None:
    project.config["baseline"] = "nowhere"
    with pytest.raises(BaselineError, match="There is no recording at"):
        project.capture()
    assert project.reference.asked == []


def test_prompts_beyond_the_context_are_skipped_and_counted(captured: Project) -> None:
    line = {"id": "long", "task": "qa", "question": "x" * 4000 + " gold=red ?", "gold": "red"}
    with (captured.folder / "q.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")
    assert captured.capture() == "10 generated answers of the reference stored, 1 skipped as too long."
    assert failed(captured.judge()) == []
    with pytest.raises(
        ConfigError, match=r"1 generation prompts and their answers exceed .* 4096 tokens: long \(4011"
    ):
        captured.capture(too_long="error")


def test_a_candidate_with_a_shorter_context_skips_too(captured: Project) -> None:
    captured.candidate.context_length = 100
    with pytest.raises(ConfigError, match="None of the 10 generation prompts fits"):
        captured.judge()


def test_an_interrupted_run_asks_only_what_is_missing(captured: Project) -> None:
    captured.candidate.reply = lambda text: Reply("", drops=True) if text.startswith("q7") else None
    with pytest.raises(ServerDiedError):
        captured.judge(concurrency=1)
    assert len((captured.folder / "out" / "generation.jsonl").read_text(encoding="utf-8").splitlines()) == 8
    captured.candidate.asked.clear()
    captured.candidate.reply = lambda _: None
    captured.judge(concurrency=1)
    assert [text[:2] for text in captured.candidate.asked] == ["q7", "q8", "q9"]
    assert not (captured.folder / "out" / "generation.jsonl").exists()


def test_an_interrupted_second_pass_does_not_cost_the_first(project: Project) -> None:
    project.reference.reply = lambda text: (
        Reply("", drops=True) if text.startswith("q7") and project.reference.asked.count(text) > 1 else None
    )
    with pytest.raises(ServerDiedError):
        project.capture(concurrency=1)
    assert len(project.reference.asked) == 18
    project.reference.asked.clear()
    project.reference.reply = lambda _: None
    project.capture(concurrency=1)
    assert [text[:2] for text in project.reference.asked] == ["q7", "q8", "q9"]
    assert list((project.folder / "out").glob("generation*")) == []


def test_another_server_is_asked_everything_anew(captured: Project) -> None:
    captured.candidate.reply = lambda text: Reply("", drops=True) if text.startswith("q7") else None
    with pytest.raises(ServerDiedError):
        captured.judge(concurrency=1)
    captured.candidate.asked.clear()
    captured.candidate.reply, captured.candidate.quantization = (lambda _: None), "fp8"
    captured.judge(concurrency=1)
    assert len(captured.candidate.asked) == 10


def test_the_chat_route_needs_no_tokenizer(project: Project) -> None:
    project.capture(route="chat", chat_template=True)
    assert read_answers(project.folder / "baseline", command="x").answers[0].input_ids is None
    project.candidate.reply = lambda text: Reply("It is rea.") if text.startswith("q0") else None
    found = project.judge(
        route="chat", chat_template=True, relative_score={"min": 0.5}, text_agreement={"min": 1}
    )
    assert failed(found) == ["generation[text_agreement]"]


def test_a_template_without_a_tokenizer_says_what_to_do(project: Project) -> None:
    with pytest.raises(
        ConfigError, match=r"not on this machine.*generation\.tokenizer.*generation\.route: chat"
    ):
        project.capture(chat_template=True)


# --- through pytest ---


def run(pytester: pytest.Pytester, *words: str) -> pytest.RunResult:
    return pytester.runpytest("--quantguard-config=gate.yaml", *words)


@pytest.mark.usefixtures("captured")
def test_generation_is_slow_and_only_that(pytester: pytest.Pytester) -> None:
    result = run(pytester, "-m", "slow", "--collect-only", "-q")
    names = [line for line in result.outlines if "::" in line]
    assert names
    assert all("::generation[" in name for name in names)
    others = run(pytester, "-m", "not slow", "--collect-only", "-q")
    assert not any("::generation[" in line for line in others.outlines)


def test_flips_are_in_terminal_and_result(captured: Project, pytester: pytest.Pytester) -> None:
    hostile = "It is mud. \x1b[31m<script>alert(1)</script> \u202eשלום 👩‍👩‍👧"
    captured.candidate.reply = lambda text: Reply(hostile) if text.startswith("q0") else None
    result = run(pytester, "-m", "slow")
    outcomes = result.parseoutcomes()
    assert (outcomes["failed"], outcomes["passed"]) == (2, 4)
    text = "\n".join(result.outlines)
    assert "\x1b[31m<script>" not in text
    assert "\u202e" not in text
    written = read_result(pytester.path / ".quantguard" / "scripted").generation
    assert written is not None
    assert (written.overall.lost, written.overall.won, written.overall.prompts) == (1, 0, 10)
    assert set(written.tasks) == {"qa", "lcx"}
    (flip,) = written.answers
    assert (flip.id, flip.signs, flip.candidate.text) == ("q0", ["lost"], hostile)
    assert (flip.reference.score, flip.candidate.score) == (1.0, 0.0)
    assert flip.first_divergence == 6


def test_a_dead_server_is_an_error_and_never_a_pass(captured: Project, pytester: pytest.Pytester) -> None:
    captured.candidate.reply = lambda _: Reply("", drops=True)
    result = run(pytester, "-m", "slow")
    outcomes = result.parseoutcomes()
    assert outcomes["errors"] >= 1
    assert not {"passed", "failed"} & set(outcomes)
    assert result.ret != 0
    assert "Traceback" not in "\n".join(result.outlines)


def test_two_runs_in_one_folder(captured: Project) -> None:
    from pytest_quantguard.measure.resume import open_resume_file

    with (
        open_resume_file(captured.folder / "out" / "generation.jsonl", "f" * 64, take_over=True),
        pytest.raises(QuantguardError, match="Another run"),
    ):
        captured.judge()
    assert captured.candidate.asked == []
