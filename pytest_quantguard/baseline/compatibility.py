"""Does a stored recording belong to this config, and was it made in this environment?

The first is required, and a difference is refused with the command that mends it; the second is only
reported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_quantguard.baseline.manifest import Manifest
from pytest_quantguard.baseline.recording import Recording
from pytest_quantguard.config import Phase
from pytest_quantguard.errors import BaselineError

Difference = tuple[str, str, str]
"""What differs, as stored, as expected or found now; written for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a config asks of a recording. None: not asked.

    batch_sizes and phases may be fewer than what was recorded; everything else must be equal.
    """

    model_path: str | None = None
    revision: str | None = None
    dtype: str | None = None
    tokenizer_digest: str | None = None
    vocab_size: int | None = None
    prompts: str | None = None
    suite_digest: str | None = None
    prompts_digest: str | None = None
    score_tokens: int | None = None
    top_logprobs: int | None = None
    batch_sizes: Collection[int] | None = None
    phases: Collection[Phase] | None = None


def check_compatible(recording: Recording, expected: Expectation, *, path: Path | str, command: str) -> None:
    """Raise BaselineError with a two-column table of what differs, and the `command` that records it anew."""
    rows = differences(recording, expected)
    if rows:
        kind = "baseline" if recording.manifest.kind == "baseline" else "accepted run"
        raise BaselineError(
            f"The {kind} at {path} belongs to another config:\n{two_columns(rows, 'expected')}\n"
            f"Record it anew with: {command}\nor point the config to the recording that belongs to it."
        )


def differences(recording: Recording, expected: Expectation) -> list[Difference]:
    """Everything that differs between a recording and what a config expects."""
    model, suite = recording.manifest.model, recording.manifest.suite
    pairs: dict[str, tuple[object, object]] = {
        "model_path": (model.model_path, expected.model_path),
        "revision": (model.revision, expected.revision),
        "dtype": (model.dtype, expected.dtype),
        "tokenizer_digest": (model.tokenizer_digest, expected.tokenizer_digest),
        "vocab_size": (model.vocab_size, expected.vocab_size),
        "prompts": (suite.prompts, expected.prompts),
        "suite_digest": (suite.suite_digest, expected.suite_digest),
        "prompts_digest": (suite.prompts_digest, expected.prompts_digest),
        "score_tokens": (suite.score_tokens, expected.score_tokens),
        "top_logprobs": (suite.top_logprobs, expected.top_logprobs),
    }
    rows = [
        (name, _show(stored), _show(wanted))
        for name, (stored, wanted) in pairs.items()
        if wanted is not None and stored != wanted
    ]
    if expected.batch_sizes is not None and not set(expected.batch_sizes) <= set(suite.batch_sizes):
        rows.append(("batch_sizes", _show(suite.batch_sizes), _show(expected.batch_sizes)))
    if expected.phases is not None and not set(expected.phases) <= set(suite.phases):
        rows.append(("phases", _show(suite.phases), _show(expected.phases)))
    return rows


def environment_differences(stored: Manifest, now: Manifest) -> list[Difference]:
    """What differs in server, device and environment between two recordings; changes of model or suite are
    not here.

    An accepted run of another environment can still be compared, but not bit by bit.
    """
    before = _flatten({"server": stored.server.model_dump(), "environment": stored.environment})
    after = _flatten({"server": now.server.model_dump(), "environment": now.environment})
    return [
        (key, _show(before.get(key)), _show(after.get(key)))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def two_columns(rows: list[Difference], right: str) -> str:
    """A plain-text table: what, stored, and `right`."""
    lines = [("", "stored", right), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(2)]
    return "\n".join(
        f"  {key:{widths[0]}}  {left:{widths[1]}}  {value}".rstrip() for key, left, value in lines
    )


def _flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _show(value: object) -> str:
    if value is None:
        return "not stated"
    if isinstance(value, str):
        is_digest = len(value) == 64 and set(value) <= set("0123456789abcdef")
        return f"{value[:16]}..." if is_digest else value
    if isinstance(value, Collection):
        return ", ".join(map(str, value)) or "none"
    return str(value)
