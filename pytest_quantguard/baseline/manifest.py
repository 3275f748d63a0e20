"""The description of a recording: who answered, what was asked, and which files hold the answers.

It is the file `manifest.json` of a stored recording, readable in a diff. No secret belongs in it: server arguments
come here masked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from pytest_quantguard.config import Phase

FORMAT_VERSION = 1

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""A plain name inside the recording's folder: no separators, no leading dot."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelRecord(_Record):
    """The model that answered; None where it is not known."""

    model_path: str
    revision: str | None = None
    dtype: str | None = None
    quantization: str | dict[str, str] | None = None
    kv_cache_dtype: str | None = None
    vocab_size: int = Field(ge=1)
    tokenizer_digest: Digest | None = None


class SuiteRecord(_Record):
    """What was asked.

    suite_digest: of the suite as written (texts and ids, before tokenization): `PromptSuite.digest`.
    prompts_digest: of the token ids that were sent: `digest_prompts`.
    top_logprobs: K as asked; `width` is what the server gave, and what is stored.
    """

    prompts: str
    suite_digest: Digest
    prompts_digest: Digest
    prompt_count: int = Field(ge=1)
    score_tokens: int = Field(ge=1)
    top_logprobs: int = Field(ge=2)
    width: int = Field(ge=1)
    batch_sizes: list[int]
    phases: list[Phase]
    decode_mode: str | None = None


class ServerRecord(_Record):
    """The server that answered. `arguments` is what it said of itself, or its command's flags, without secrets."""

    backend: str
    kind: str
    version: str | None = None
    arguments: dict[str, Any] = {}
    capabilities: dict[str, Any] = {}
    device: str | None = None
    faults: list[str] = []


class FileRecord(_Record):
    """A data file beside the manifest."""

    sha256: Digest
    size: int = Field(ge=0)


class Manifest(_Record):
    """Everything about a recording but its prompts and log-probabilities.

    files and noise_floor belong to the stored form: `write_recording` fills them in, `read_recording` checks them.
    created: UTC, ISO 8601. environment: names and versions of what the capture ran on, free in form.
    baseline_digest: for an accepted run, the `prompts_digest` of the baseline that it is compared through.
    """

    format_version: Literal[1] = FORMAT_VERSION
    kind: Literal["baseline", "accepted"]
    name: str
    created: str
    package_version: str
    model: ModelRecord
    suite: SuiteRecord
    server: ServerRecord
    repeats: int = Field(ge=1)
    environment: dict[str, Any] = {}
    noise_floor: dict[str, dict[str, float]] = {}
    files: dict[FileName, FileRecord] = {}


def digest_prompts(token_ids: Sequence[Sequence[int]], prompt_tokens: Sequence[int]) -> str:
    """SHA-256 (hex) of prompts as they are sent: the ids of the prompts proper, without continuations."""
    return hashlib.sha256(
        orjson.dumps(
            [list(map(int, ids[:count])) for ids, count in zip(token_ids, prompt_tokens, strict=True)]
        )
    ).hexdigest()


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys; for comparisons that are read by people."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
