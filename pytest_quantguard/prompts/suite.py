"""A prompt suite: what a gate asks, from a JSONL file or built in.

Texts become token ids at capture, with the reference server's own tokenizer; from then on only ids are used.
The text of the built-in prompts is made in `builtin.py`.
"""

from __future__ import annotations

import codecs
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from pytest_quantguard.config import SuiteConfig
from pytest_quantguard.errors import ConfigError
from pytest_quantguard.prompts.builtin import builtin_prompts
from pytest_quantguard.prompts.prompt import Prompt
from pytest_quantguard.prompts.scoring import check_gold

MAX_REPORTED_LINES = 10


@dataclass(frozen=True, slots=True)
class PromptSuite:
    """Prompts in the order in which they are asked.

    name: "builtin" or the file's path as the config writes it.
    digest: SHA-256 (hex) of all ids, tasks, texts and token ids in order; it changes if anything asked
    changes.
    """

    name: str
    prompts: tuple[Prompt, ...]
    digest: str

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    @property
    def tasks(self) -> Mapping[str, int]:
        """Number of prompts of each task."""
        return Counter(prompt.task for prompt in self.prompts)


def load_suite(config: SuiteConfig, *, base_folder: Path) -> PromptSuite:
    """The suite that `config` names; a relative path starts at `base_folder`, the config file's folder.

    Raises ConfigError: a missing or empty file, or lines that are no prompts, each with its number.
    """
    if config.prompts == "builtin":
        prompts = builtin_prompts(
            size=config.size, max_prompt_tokens=config.max_prompt_tokens, mix=config.mix, seed=config.seed
        )
    else:
        remedy = "Set `suite.prompts` to a JSONL file or to 'builtin'."
        prompts = read_prompts(base_folder / config.prompts, remedy=remedy)
    return PromptSuite(config.prompts, prompts, digest_suite(prompts))


def digest_suite(prompts: tuple[Prompt, ...]) -> str:
    """SHA-256 (hex) of a suite's content."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(orjson.dumps([prompt.id, prompt.task, prompt.text, prompt.token_ids]))
        digest.update(b"\n")
    return digest.hexdigest()


def read_prompts(
    path: Path, *, need_gold: bool = False, remedy: str = "Give a JSONL file of prompts."
) -> tuple[Prompt, ...]:
    """Prompts of a JSONL file: objects with `text`, `prompt` or `question`, or with `token_ids`; and, if
    wished, `id`, `task` and `gold`.

    need_gold: every line must have a `gold` that its task can score. remedy: for a file that cannot be read.
    Raises ConfigError naming every bad line (the first ten).
    """
    try:
        raw = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise ConfigError(
            f"The prompt file {path} cannot be read: {error.strerror or error}. {remedy}"
        ) from error
    prompts: list[Prompt] = []
    problems: list[str] = []
    lines_of: dict[str, int] = {}
    for number, line in enumerate(raw.splitlines(), start=1):
        try:
            prompt = _parse_line(line, number)
            if prompt.gold or need_gold:
                check_gold(prompt.task, prompt.gold)
            if prompt.id in lines_of:
                raise ValueError(f"the id {prompt.id!r} is that of line {lines_of[prompt.id]}")
        except ValueError as error:
            problems.append(f"  line {number}: {error}")
            continue
        lines_of[prompt.id] = number
        prompts.append(prompt)
    if problems:
        more = len(problems) - MAX_REPORTED_LINES
        listed = "\n".join(problems[:MAX_REPORTED_LINES]) + (f"\n  and {more} more" if more > 0 else "")
        raise ConfigError(f"{path} has lines that are no prompts:\n{listed}\n{_FORMAT}")
    if not prompts:
        raise ConfigError(f"{path} holds no prompts. {_FORMAT}")
    return tuple(prompts)


_FORMAT = (
    'Each line is a JSON object such as {"id": "a1", "task": "qa", "text": "..."} or {"token_ids": [1, 2]}; '
    "`id` and `task` may be left out."
)


def _parse_line(line: bytes, number: int) -> Prompt:
    if not line.strip():
        raise ValueError("empty")
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"no JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError("not an object")
    text = _parse_text(record)
    token_ids = _parse_token_ids(record)
    if (text is None) == (token_ids is None):
        raise ValueError("needs either a text (`text`, `prompt` or `question`) or `token_ids`")
    return Prompt(
        id=str(record.get("id", f"line-{number}")),
        task=str(record.get("task", "unnamed")),
        text=text,
        token_ids=token_ids,
        gold=_parse_gold(record),
    )


def _parse_text(record: Mapping[str, Any]) -> str | None:
    names = [name for name in ("text", "prompt", "question") if record.get(name) is not None]
    if len(names) > 1:
        raise ValueError(f"has {' and '.join(f'`{name}`' for name in names)}: one text is enough")
    if not names:
        return None
    text = record[names[0]]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"`{names[0]}` must be a text that is not blank")
    return text


def _parse_token_ids(record: Mapping[str, Any]) -> tuple[int, ...] | None:
    ids = record.get("token_ids")
    if ids is None:
        return None
    if (
        not isinstance(ids, list)
        or not ids
        or any(type(token) is not int or not 0 <= token < 2**31 for token in ids)
    ):
        raise ValueError("`token_ids` must be a list of token numbers that is not empty")
    return tuple(ids)


def _parse_gold(record: Mapping[str, Any]) -> tuple[str, ...]:
    gold = record.get("gold")
    if gold is None:
        return ()
    answers = gold if isinstance(gold, list) else [gold]
    if not answers or any(
        not isinstance(answer, str | int | float) or str(answer).strip() == "" for answer in answers
    ):
        raise ValueError("`gold` must be an answer or a list of answers, none of them empty")
    return tuple(str(answer) for answer in answers)
