"""The questions of a config's `generation` section: built in, or of a JSONL file. Each has a gold answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_quantguard.config_generation import BUILTIN_SIZE, BUILTIN_TOKENS, GenerationConfig, TaskConfig
from pytest_quantguard.errors import ConfigError
from pytest_quantguard.prompts.builtin import task_prompts
from pytest_quantguard.prompts.lengths import TooShortError
from pytest_quantguard.prompts.prompt import Prompt
from pytest_quantguard.prompts.suite import read_prompts
from pytest_quantguard.prompts.words import Language


def load_questions(config: GenerationConfig, *, base_folder: Path) -> tuple[Prompt, ...]:
    """The prompts, task by task; the same on every machine, since built-in lengths are estimates.

    Raises ConfigError: lines without a gold that could be scored, tasks that the file has not, tasks that
    cannot be so short.
    """
    if config.prompts == "builtin":
        return tuple(prompt for task in config.tasks for prompt in _builtin(task, config))
    remedy = "Set `generation.prompts` to a JSONL file or to 'builtin'."
    found = read_prompts(base_folder / config.prompts, need_gold=True, remedy=remedy)
    _check_route(found, config)
    return _selected(found, config.file_tasks, config.prompts)


def _builtin(task: str, config: GenerationConfig) -> tuple[Prompt, ...]:
    asked = config.tasks[task].tokens or BUILTIN_TOKENS
    try:
        return _task(task, config, asked)
    except TooShortError as error:
        least = error.least
    while True:  # The shortest length differs from question to question: find one that is enough for all.
        try:
            _task(task, config, least)
        except TooShortError as error:
            least = error.least
        else:
            raise ConfigError(
                f"generation.tasks.{task}.tokens is {asked}, but some of its questions need {least} tokens. "
                "Set it to at least that, or leave the task out."
            )


def _task(task: str, config: GenerationConfig, tokens: int) -> tuple[Prompt, ...]:
    settings = config.tasks[task]
    languages: Sequence[Language] = settings.languages or ("en",)
    return task_prompts(task, settings.size or BUILTIN_SIZE, tokens, seed=config.seed, languages=languages)


def _selected(
    prompts: tuple[Prompt, ...], tasks: Mapping[str, TaskConfig] | None, file: str
) -> tuple[Prompt, ...]:
    if tasks is None:
        return prompts
    by_task: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    missing = [task for task in tasks if task not in by_task]
    if missing:
        raise ConfigError(
            f"generation.tasks.{missing[0]}: {file} has no prompt of this task; it has "
            f"{', '.join(sorted(by_task))}."
        )
    return tuple(prompt for task, settings in tasks.items() for prompt in by_task[task][: settings.size])


def _check_route(prompts: tuple[Prompt, ...], config: GenerationConfig) -> None:
    ids_only = next((prompt.id for prompt in prompts if prompt.text is None), None)
    if ids_only is not None and config.route == "chat":
        raise ConfigError(
            f"generation.route: chat sends messages, but the prompt {ids_only} of {config.prompts} has token "
            "ids and no text. Use generation.route: native."
        )
