"""Asks the reference the generation questions: texts become token ids here, and its answers become the file
that candidates are held against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pytest_quantguard.baseline.answers import AnswersHeader, ReferenceAnswer, ReferenceAnswers
from pytest_quantguard.baseline.manifest import ServerRecord
from pytest_quantguard.config_generation import LEAST_BUDGET, GenerationConfig
from pytest_quantguard.errors import ConfigError, RequestRejectedError
from pytest_quantguard.generation.answer import GeneratedAnswer, Question, digest_questions
from pytest_quantguard.generation.figures import AnswerPair, figures_of
from pytest_quantguard.generation.metrics import EVERYTHING, GENERATION_METRICS
from pytest_quantguard.measure.asking import shorten
from pytest_quantguard.prompts.prompt import Prompt
from pytest_quantguard.prompts.tokenizer import ChatTokenizer
from pytest_quantguard.serving.answers import Capabilities
from pytest_quantguard.serving.client import Client
from pytest_quantguard.serving.probe import checkpoint_files


def settings_of(config: GenerationConfig) -> dict[str, Any]:
    """What of the config bears on the reference's answers, beside the prompts: plain data, for a digest and a
    table of differences.
    """
    limits = {
        task: settings.max_new_tokens for task, settings in config.tasks.items() if settings.max_new_tokens
    }
    return {
        "route": config.route,
        "chat_template": config.chat_template,
        "system": config.system,
        "template_variables": config.template_variables,
        "max_new_tokens": config.max_new_tokens,
        "tasks.max_new_tokens": limits,
    }


def token_limit(config: GenerationConfig, task: str) -> int:
    """The longest answer to a question of a task."""
    settings = config.tasks.get(task)
    return (settings.max_new_tokens if settings else None) or config.max_new_tokens


def candidate_budget(config: GenerationConfig, task: str, reference: GeneratedAnswer) -> int:
    """How many tokens the candidate's answer may have: `budget_factor` times the reference's, within limits;
    where the reference itself was cut off, as many as it had.
    """
    limit = token_limit(config, task)
    if config.budget_factor is None or reference.ran_on:
        return limit
    return min(limit, max(LEAST_BUDGET, round(config.budget_factor * reference.completion_tokens)))


@dataclass(frozen=True, slots=True)
class Asked:
    """Questions that fit the context, and the ids of prompts that do not."""

    questions: tuple[Question, ...]
    skipped: tuple[str, ...]


def fit_questions(
    questions: Sequence[Question], config: GenerationConfig, context_length: int | None
) -> Asked:
    """Leave out the questions whose ids and longest answer exceed the context. Raises ConfigError where the
    config wants no prompt left out, or where none is left.
    """
    long = [
        question
        for question in questions
        if context_length is not None and question.prompt_tokens + question.max_new_tokens > context_length
    ]
    if long and config.too_long == "error":
        named = [f"{question.prompt.id} ({question.prompt_tokens} tokens)" for question in long]
        raise ConfigError(
            f"{len(long)} generation prompts and their answers exceed the server's context of "
            f"{context_length} tokens: {shorten(named)}. Lower generation.tasks.*.tokens or max_new_tokens, "
            "start the server with a longer context, or set generation.too_long: skip."
        )
    skipped = {question.prompt.id for question in long}
    left = tuple(question for question in questions if question.prompt.id not in skipped)
    if not left:
        raise ConfigError(
            f"None of the {len(questions)} generation prompts fits the server's context of {context_length} "
            "tokens together with its answer. Lower generation.tasks.*.tokens or generation.max_new_tokens."
        )
    return Asked(left, tuple(sorted(skipped)))


def make_questions(
    prompts: Sequence[Prompt], config: GenerationConfig, client: Client, tokenizer_folder: Path | None
) -> tuple[Question, ...]:
    """The prompts as the reference is asked them.

    tokenizer_folder: of `generation.tokenizer` or the reference's model. Raises ConfigError where a template
    is wanted and there is no tokenizer, or another one than the server's.
    """
    if config.route == "chat":
        # The template's own tokens are not known here; a server that has no room for them says so.
        lengths = [len(client.tokenize(prompt.text or "")) for prompt in prompts]
        return tuple(
            Question(prompt, None, length, token_limit(config, prompt.task))
            for prompt, length in zip(prompts, lengths, strict=True)
        )
    encode = _encoder(prompts, config, client, tokenizer_folder)
    return tuple(
        Question(prompt, ids, len(ids), token_limit(config, prompt.task))
        for prompt in prompts
        for ids in [prompt.token_ids or encode(prompt.text or "")]
    )


def _encoder(
    prompts: Sequence[Prompt], config: GenerationConfig, client: Client, tokenizer_folder: Path | None
) -> Callable[[str], tuple[int, ...]]:
    if not config.chat_template:
        return lambda text: tuple(client.tokenize(text))
    if tokenizer_folder is None:
        raise ConfigError(
            "The chat template is applied here, and the reference's model folder with its tokenizer.json is "
            "not on this machine. Name a folder that has it in generation.tokenizer, or let the server apply "
            "the template: generation.route: chat."
        )
    tokenizer = ChatTokenizer(tokenizer_folder)
    _check_same_tokenizer(tokenizer, client, prompts)
    return lambda text: encode_question(tokenizer, text, config)


def encode_question(tokenizer: ChatTokenizer, text: str, config: GenerationConfig) -> tuple[int, ...]:
    """Token ids of the conversation that asks a question. Raises ConfigError as the template does."""
    system = [{"role": "system", "content": config.system}] if config.system is not None else []
    messages = [*system, {"role": "user", "content": text}]
    return tokenizer.encode_chat(messages, **config.template_variables)


def find_tokenizer(config: GenerationConfig, said: Capabilities) -> Path | None:
    """The folder of the tokenizer: the config's, or the served model's if it is on this machine."""
    if config.tokenizer is not None:
        return config.tokenizer
    own = said.server_args.get("quantguard_emulator")
    folder = own.get("model_folder") if isinstance(own, Mapping) else None
    paths = [folder] if isinstance(folder, str) else [said.server_args.get("tokenizer_path"), said.model_path]
    for path in paths:
        files = checkpoint_files(path, said.server_args.get("revision"), ("tokenizer.json",))
        if files:
            return files[0].parent
    return None


def _check_same_tokenizer(tokenizer: ChatTokenizer, client: Client, prompts: Sequence[Prompt]) -> None:
    """Ids of another tokenizer would ask nonsense, and be answered."""
    text = next((prompt.text for prompt in prompts if prompt.text is not None), None)
    if text is None:
        return
    try:
        theirs = client.tokenize(text, add_special_tokens=False)
    except RequestRejectedError:
        return  # The server has no such route; then there is nothing to hold against.
    ours = tokenizer.encode_plain(text)
    if list(ours) != theirs:
        place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        where = f"first at token {place}" if place is not None else f"{len(ours)} tokens and {len(theirs)}"
        raise ConfigError(
            f"The tokenizer of {tokenizer.folder} is not the server's: the same text has other token ids "
            f"({where}). Let generation.tokenizer name the folder of the model that is served."
        )


def reference_answers(
    config: GenerationConfig,
    prompts: Sequence[Prompt],
    questions: Sequence[Question],
    answers: Sequence[Sequence[GeneratedAnswer]],
    *,
    skipped: Sequence[str],
    model_path: str | None,
    server: ServerRecord,
) -> ReferenceAnswers:
    """What is stored. answers: those of each repetition, in the order of `questions`; the first is kept, the
    others give the noise.
    """
    settings = settings_of(config)
    first = answers[0]
    pairs = [
        AnswerPair(question.prompt, one, other)
        for repetition in answers[1:]
        for question, one, other in zip(questions, first, repetition, strict=True)
    ]
    return ReferenceAnswers(
        header=AnswersHeader(
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            model_path=model_path,
            server=server.model_dump(),
            route=config.route,
            questions_digest=digest_questions(prompts, settings),
            settings=settings,
            skipped=tuple(skipped),
            noise=noise_of(pairs) if pairs else {},
        ),
        answers=tuple(
            ReferenceAnswer(input_ids=question.input_ids, answer=answer)
            for question, answer in zip(questions, first, strict=True)
        ),
    )


def noise_of(pairs: Sequence[AnswerPair]) -> dict[str, dict[str, float]]:
    """By task, and for all together: the metrics of the reference against itself, the worse of both
    directions.
    """
    turned = [AnswerPair(pair.prompt, pair.candidate, pair.reference) for pair in pairs]
    found: dict[str, dict[str, float]] = {}
    for task in [EVERYTHING, *dict.fromkeys(pair.prompt.task for pair in pairs)]:
        ways = [
            figures_of([pair for pair in way if task in (EVERYTHING, pair.prompt.task)]).metrics
            for way in (pairs, turned)
        ]
        found[task] = {
            name: _worse(name, *(way[name].value for way in ways if name in way)) for name in ways[0]
        }
    return found


def _worse(metric: str, *values: float) -> float:
    """The worst of the values of a metric."""
    return min(values) if GENERATION_METRICS[metric].better == "higher" else max(values)
