"""Reads a file of recorded requests: JSON lines with a question and an answer whose length is replayed.

Two forms: {"question": ..., "model_response": ...}, and the one of SGLang's `custom` data set, of which the
first two turns count: {"conversations": [{"content" or "value": question}, {... : answer}, ...]}.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from pytest_quantguard.errors import ConfigError

FORMS = (
    'a line is {"question": "...", "model_response": "..."} or {"conversations": [{"content": "..."}, ...]}'
)


def read_replay(
    path: Path, *, tokenize: Callable[[str], list[int]], limit: int | None = None
) -> list[tuple[list[int], int]]:
    """(token ids of the question, number of tokens of the answer) of each line, at most `limit`.

    Raises ConfigError that names the line for anything that cannot be replayed.
    """
    requests = []
    for number, line in _lines(path):
        question, answer = _parse(line, f"{path}, line {number}")
        ids, length = tokenize(question), len(tokenize(answer))
        if not ids or not length:
            empty = "question" if not ids else "answer"
            raise ConfigError(f"{path}, line {number}: its {empty} has no tokens. Remove the line.")
        requests.append((ids, length))
        if len(requests) == limit:
            break
    if not requests:
        raise ConfigError(f"{path} holds no requests; {FORMS}.")
    return requests


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"There is no file {path} to replay (speed.scenarios, kind replay; a relative path is seen from "
            "the config's folder)."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    return ((number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip())


def _parse(line: bytes, where: str) -> tuple[str, str]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}. {FORMS.capitalize()}.") from error
    question, answer = _fields(record) if isinstance(record, dict) else (None, None)
    if not isinstance(question, str) or not isinstance(answer, str):
        raise ConfigError(f"{where} has no question with an answer: {FORMS}.")
    return question, answer


def _fields(record: dict[str, Any]) -> tuple[Any, Any]:
    if "question" in record:
        return record["question"], record.get("model_response")
    turns = record.get("conversations", record.get("conversation"))
    if not isinstance(turns, list) or len(turns) < 2:
        return None, None
    texts = [turn.get("content", turn.get("value")) if isinstance(turn, dict) else None for turn in turns[:2]]
    return texts[0], texts[1]
