"""The description of a recording: who answered, what was asked, and which files hold the answers.

It is the file `manifest.json` of a stored recording, readable in a diff. No secret belongs in it: server
arguments whose names say so are masked here once more.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from pytest_quantguard.config import Phase

FORMAT_VERSION: Literal[1] = 1
MASK = "***"
MAX_FILE_BYTES = 1 << 34
"""Files are read whole; no recording comes near this."""

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256, in hexadecimal digits."""
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""A plain name inside the recording's folder: no separators, no leading dot."""

_SECRET = re.compile(
    r"api[-_]?key|password|secret|credential|(auth|access|bearer|hf)[-_]?token", re.IGNORECASE
)


def mask_secrets(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which the values of keys that name a secret are replaced, at any depth."""
    return {
        key: MASK
        if _SECRET.search(key) and value
        else mask_secrets(value)
        if isinstance(value, dict)
        else value
        for key, value in arguments.items()
    }


Arguments = Annotated[dict[str, Any], AfterValidator(mask_secrets)]


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

    suite_digest: of the suite as written, before tokenization: `PromptSuite.digest`.
    prompts_digest: of the token ids that were scored: `digest_prompts`.
    top_logprobs: K as asked. width: the smallest K that a cell holds; less where the server capped it.
    """

    prompts: str
    suite_digest: Digest
    prompts_digest: Digest
    prompt_count: int = Field(ge=1)
    score_tokens: int = Field(ge=1)
    top_logprobs: int = Field(ge=1)
    width: int = Field(ge=1)
    batch_sizes: list[int]
    phases: list[Phase]
    decode_mode: str | None = None


class ServerRecord(_Record):
    """The server that answered. arguments: what it said of itself, or its command's flags."""

    backend: str
    kind: str
    version: str | None = None
    arguments: Arguments = {}
    capabilities: Arguments = {}
    device: str | None = None
    faults: list[str] = []


class FileRecord(_Record):
    """A data file beside the manifest."""

    sha256: Digest
    size: int = Field(ge=0, le=MAX_FILE_BYTES)


class Manifest(_Record):
    """Everything about a recording but its prompts and log-probabilities.

    created: UTC, ISO 8601. environment: names and versions of what the capture ran on, free in form.
    noise_floor and files belong to the stored form: `write_recording` fills them in, `read_recording` checks
    them.
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
    environment: Arguments = {}
    noise_floor: dict[str, dict[str, float]] = {}
    files: dict[FileName, FileRecord] = {}


def digest_prompts(token_ids: Sequence[Sequence[int]], prompt_tokens: Sequence[int]) -> str:
    """SHA-256 (hex) of what is scored: each prompt's ids with its continuation, and where the one becomes the
    other.

    token_ids, prompt_tokens: those of the `PromptRecord`s, in order.
    """
    content = [[int(count), list(map(int, ids))] for ids, count in zip(token_ids, prompt_tokens, strict=True)]
    return hashlib.sha256(orjson.dumps(content)).hexdigest()
