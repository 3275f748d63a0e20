"""Generated answers of one trial: the reference's are recorded or read, the candidate's asked for once.

How they are asked is in `measure/generation.py`; they are judged in `generation_judge.py`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from pytest_quantguard.baseline.answers import ReferenceAnswers, read_answers, write_answers
from pytest_quantguard.baseline.compatibility import two_columns
from pytest_quantguard.config import ServerConfig
from pytest_quantguard.config_generation import GenerationConfig
from pytest_quantguard.errors import BaselineError, ConfigError
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.generation.answer import GeneratedAnswer, Question, digest_questions
from pytest_quantguard.generation.figures import AnswerPair
from pytest_quantguard.generation.metrics import EVERYTHING
from pytest_quantguard.measure.generation import Asking, answer_questions
from pytest_quantguard.measure.identity import describe_server
from pytest_quantguard.measure.reference_answers import (
    candidate_budget,
    find_tokenizer,
    fit_questions,
    make_questions,
    reference_answers,
    settings_of,
)
from pytest_quantguard.measure.resume import open_resume_file
from pytest_quantguard.prompts.prompt import Prompt
from pytest_quantguard.prompts.questions import load_questions
from pytest_quantguard.serving.launch import RunningServer

GENERATION = "generation"
RESUME_FILE = "generation.jsonl"
REFERENCE_RESUME_FILE = "generation-reference-{repeat}.jsonl"


@dataclass(frozen=True, slots=True)
class GenerationMeasurement:
    """The candidate's answers beside the reference's.

    skipped: ids of prompts that the reference's or the candidate's context had no room for. resumed: how many
    answers an interrupted run had left. noise: as the reference's answers hold it.
    """

    pairs: tuple[AnswerPair, ...]
    skipped: tuple[str, ...]
    resumed: int
    seconds: float
    noise: dict[str, dict[str, float]]
    notes: tuple[str, ...]

    def of(self, task: str) -> list[AnswerPair]:
        """The pairs of a task, or all."""
        return [pair for pair in self.pairs if task in (EVERYTHING, pair.prompt.task)]


def measured_generation(trial: Trial) -> GenerationMeasurement:
    """Ask the candidate every question, the first time; raises `QuantguardError` with the cause."""
    return trial.once((GENERATION, "answers"), lambda: _measure(trial))


def known_generation(trial: Trial) -> GenerationMeasurement | None:
    """What has been measured, if it has."""
    return next(iter(trial.known(GENERATION).values()), None)


def record_answers(trial: Trial, server: RunningServer) -> ReferenceAnswers:
    """Ask the running reference every question, as often as the config says. Raises `QuantguardError`."""
    config, prompts = generation_config(trial), generation_prompts(trial)
    reference = trial.config.reference
    assert reference is not None
    said = server.capabilities
    questions = make_questions(prompts, config, server.client, find_tokenizer(config, said))
    asked = fit_questions(questions, config, server.client.context_length)
    passes = range(1, config.repeats + 1)
    files = [trial.options.output / REFERENCE_RESUME_FILE.format(repeat=repeat) for repeat in passes]
    answers = []
    for repeat, path in zip(passes, files, strict=True):
        trial.progress(f"generation: the reference answers, pass {repeat} of {config.repeats}")
        answers.append(_ask(trial, server, reference, asked.questions, path).answers)
    for path in files:  # Only now: an interrupted second pass must not cost the first.
        path.unlink(missing_ok=True)
    return reference_answers(
        config,
        prompts,
        asked.questions,
        answers,
        skipped=asked.skipped,
        model_path=said.model_path,
        server=describe_server(reference, said),
    )


def store_answers(folder: Path, answers: ReferenceAnswers) -> str:
    """Write beside the recording in `folder`; returns a sentence for the user."""
    write_answers(folder, answers)
    return stored_answers(answers)


def stored_answers(answers: ReferenceAnswers) -> str:
    """What was stored, for the user."""
    skipped = f", {len(answers.header.skipped)} skipped as too long" if answers.header.skipped else ""
    return f"{len(answers.answers)} generated answers of the reference stored{skipped}."


def _measure(trial: Trial) -> GenerationMeasurement:
    config, prompts = generation_config(trial), generation_prompts(trial)
    stored = _read_reference(trial, prompts)
    by_id = {prompt.id: prompt for prompt in prompts}
    questions = [
        Question(
            by_id[reference.answer.id],
            reference.input_ids,
            reference.answer.prompt_tokens,
            candidate_budget(config, by_id[reference.answer.id].task, reference.answer),
        )
        for reference in stored.answers
    ]
    server = trial.server()
    server.check_alive()
    asked = fit_questions(questions, config, server.client.context_length)
    resume_path = trial.options.output / RESUME_FILE
    done = _ask(trial, server, trial.config.candidate, asked.questions, resume_path)
    resume_path.unlink(missing_ok=True)
    references = stored.by_id
    pairs = tuple(
        AnswerPair(question.prompt, references[question.prompt.id].answer, answer)
        for question, answer in zip(asked.questions, done.answers, strict=True)
    )
    skipped = tuple(sorted({*stored.header.skipped, *asked.skipped}))
    notes = [*done.notes]
    if skipped:
        notes.append(f"{len(skipped)} generation prompts were skipped: the context has no room for them")
    return GenerationMeasurement(
        pairs, skipped, done.resumed, done.seconds, stored.header.noise, tuple(notes)
    )


def _read_reference(trial: Trial, prompts: Sequence[Prompt]) -> ReferenceAnswers:
    """The reference's answers, to exactly these questions."""
    local = trial.remote_baseline() is None
    command = f"{trial.capture_command} --generation" if local else trial.capture_command
    stored = read_answers(trial.baseline_folder(), command=command)
    settings = settings_of(generation_config(trial))
    if stored.header.questions_digest == digest_questions(prompts, settings):
        _require_all(stored, prompts, f"{trial.config.baseline}", command)
        return stored
    before = stored.header.settings
    rows = [
        (name, str(before.get(name)), str(settings.get(name)))
        for name in sorted({*before, *settings})
        if before.get(name) != settings.get(name)
    ]
    table = (
        two_columns(rows, "expected") if rows else "  the prompts, their order or their gold answers differ"
    )
    raise BaselineError(
        f"The reference's generated answers in {trial.config.baseline} are to other questions:\n{table}\n"
        f"Record them anew with: {command}"
    )


def _require_all(stored: ReferenceAnswers, prompts: Sequence[Prompt], where: str, command: str) -> None:
    """Raise BaselineError where a prompt has no answer, or an answer no prompt: fewer would be judged."""
    asked = {prompt.id for prompt in prompts}
    known = {*stored.by_id, *stored.header.skipped}
    for wrong, what in (
        (asked - known, "lack an answer to"),
        (known - asked, "hold an answer to an unknown"),
    ):
        if wrong:
            raise BaselineError(
                f"The reference's generated answers in {where} {what} prompt {min(wrong)}. "
                f"Record them anew with: {command}"
            )


@dataclass(frozen=True, slots=True)
class _Asked:
    answers: tuple[GeneratedAnswer, ...]
    resumed: int
    seconds: float
    notes: tuple[str, ...]


def _ask(
    trial: Trial,
    server: RunningServer,
    asked_of: ServerConfig,
    questions: Sequence[Question],
    resume_path: Path,
) -> _Asked:
    config = generation_config(trial)
    asking = Asking(
        config.route, config.concurrency, config.deadline, config.system, config.template_variables
    )
    fingerprint = _fingerprint(questions, asking, describe_server(asked_of, server.capabilities).model_dump())
    with open_resume_file(resume_path, fingerprint, take_over=config.resume) as file:
        start = time.monotonic()
        resumed = len(file.known)
        answers = answer_questions(
            server.client, questions, asking, known=file.known, keep=file.keep, progress=trial.progress
        )
    return _Asked(answers, resumed, time.monotonic() - start, tuple(file.notes))


def _fingerprint(questions: Sequence[Question], asking: Asking, server: dict[str, Any]) -> str:
    """SHA-256 (hex) of what an answer depends on: another one must not take it over."""
    asked = [
        [question.prompt.id, question.prompt.text, question.input_ids, question.max_new_tokens]
        for question in questions
    ]
    content = [asked, asdict(asking), server]
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()


def generation_prompts(trial: Trial) -> tuple[Prompt, ...]:
    """The questions of the config, without asking any server. Raises ConfigError."""
    return trial.once(
        "generation prompts",
        lambda: load_questions(generation_config(trial), base_folder=trial.config_path.parent),
    )


def generation_config(trial: Trial) -> GenerationConfig:
    """The section; raises ConfigError where there is none."""
    if trial.config.generation is None:
        raise ConfigError(f"{trial.config_path}: there is no `generation` section.")
    return trial.config.generation
