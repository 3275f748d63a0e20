"""Does a stored recording belong to this config? If not, what differs, and which command mends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from pytest_quantguard.baseline.recording import Recording
from pytest_quantguard.config import Phase
from pytest_quantguard.errors import BaselineError


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
    batch_sizes: Sequence[int] | None = None
    phases: Sequence[Phase] | None = None


def check_compatible(recording: Recording, expected: Expectation, *, path: Path, command: str) -> None:
    """Raise BaselineError with a two-column table of what differs, and `command`, which would record it anew."""
    rows = differences(recording, expected)
    if not rows:
        return
    kind = "baseline" if recording.manifest.kind == "baseline" else "accepted run"
    table = _two_columns([("", "stored", "expected"), *rows])
    raise BaselineError(
        f"The {kind} at {path} belongs to another config:\n{table}\nRecord it anew with: {command}\n"
        "or point the config to the recording that belongs to it."
    )


def differences(recording: Recording, expected: Expectation) -> list[tuple[str, str, str]]:
    """(key, stored, expected) of everything that differs."""
    manifest = recording.manifest
    stored = {
        "model_path": manifest.model.model_path,
        "revision": manifest.model.revision,
        "dtype": manifest.model.dtype,
        "tokenizer_digest": manifest.model.tokenizer_digest,
        "vocab_size": manifest.model.vocab_size,
        "prompts": manifest.suite.prompts,
        "suite_digest": manifest.suite.suite_digest,
        "prompts_digest": manifest.suite.prompts_digest,
        "score_tokens": manifest.suite.score_tokens,
        "top_logprobs": manifest.suite.top_logprobs,
        "batch_sizes": manifest.suite.batch_sizes,
        "phases": manifest.suite.phases,
    }
    rows = []
    for name in (field.name for field in fields(Expectation)):
        wanted, found = getattr(expected, name), stored[name]
        if wanted is None:
            continue
        same = set(wanted) <= set(found) if name in ("batch_sizes", "phases") else wanted == found
        if not same:
            rows.append((name, _show(found), _show(wanted)))
    return rows


def _show(value: object) -> str:
    if isinstance(value, str):
        return value[:16] + "..." if len(value) == 64 else value
    if isinstance(value, Sequence):
        return ", ".join(str(item) for item in value)
    return "not stated" if value is None else str(value)


def _two_columns(rows: list[tuple[str, str, str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
