"""A recording on disk: a folder that appears whole or not at all, and that is checked on every reading.

`manifest.json` names the data files and their SHA-256. Data files are named after their content and written
first; replacing the manifest is the one step that makes a new recording visible, so a reader sees the old one
or the new one, also while several processes write, and a full disk leaves the old one as it was. How
log-probabilities become bytes is the codec's business.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pytest_quantguard.baseline.codec import decode_cells, encode_cells
from pytest_quantguard.baseline.manifest import (
    FORMAT_VERSION,
    FileRecord,
    Manifest,
    ModelRecord,
    digest_prompts,
)
from pytest_quantguard.baseline.recording import CellKey, PromptRecord, Recording
from pytest_quantguard.errors import BaselineError
from pytest_quantguard.whole_files import TEMPORARY, replace_file

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20
LFS_MARK = b"version https://git-lfs.github.com/spec/"
READING_TRIES = 5

_NAME = re.compile(r"[a-z]+-[0-9a-f]{16}\.(json|qglp)")
_CAPTURE = "Record one with: quantguard capture CONFIG"
_MEND = (
    "Restore the folder from version control, or record it anew with: quantguard capture CONFIG "
    "(an accepted run: quantguard accept CONFIG)."
)

T = TypeVar("T")


class _StoredPrompt(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: str
    task: str
    prompt_tokens: int = Field(ge=1)
    span_start: int = Field(ge=1)
    token_ids: list[int]


_PROMPTS = TypeAdapter(list[_StoredPrompt])


def write_recording(path: Path, recording: Recording, attachments: Mapping[str, bytes] | None = None) -> None:
    """Store `recording` as the folder `path`, in place of the recording and attachments that were there.

    attachments: as for `write_attachment`, by name; they appear together with the recording, or not at all.
    Raises BaselineError where the folder cannot be written; what was there before is then still whole. Raises
    ValueError for a recording that contradicts itself.
    """
    _refuse_file(path)
    contents = {
        _name("prompts", content := _dump_prompts(recording.prompts), "json"): content,
        _name("data", content := encode_cells(recording.cells, recording.prompts), "qglp"): content,
        **{_attachment_name(name, content): content for name, content in (attachments or {}).items()},
    }
    manifest = recording.manifest.model_copy(
        update={
            "noise_floor": {str(key): dict(values) for key, values in recording.noise_floor.items()},
            "files": {name: _describe(content) for name, content in contents.items()},
        }
    )
    _check_manifest(manifest, recording)
    with _explained(path):
        _write_folder(path, contents, lambda: manifest)


def read_recording(path: Path) -> Recording:
    """Read and check the folder `path`: format version, every file's SHA-256, every shape.

    Raises BaselineError that says what is wrong and how to mend it.
    """
    manifest, files = _read_consistently(
        path, lambda manifest: (manifest, {name: _read_file(path, manifest, name) for name in manifest.files})
    )
    prompts = _load_prompts(path, _only(path, files, "prompts-"))
    try:
        cells = decode_cells(_only(path, files, "data-"), prompts)
    except BaselineError as error:
        raise BaselineError(f"{path}: {error} {_MEND}") from error
    keys = {str(key): key for key in cells}
    unknown = sorted(manifest.noise_floor.keys() - keys.keys())
    if unknown:
        raise BaselineError(
            f"{path / MANIFEST} has a noise floor of {unknown[0]}, which was not recorded. {_MEND}"
        )
    floor = {keys[name]: values for name, values in manifest.noise_floor.items()}
    recording = Recording(manifest, prompts, cells, floor)
    try:
        _check_manifest(manifest, recording)
    except ValueError as error:
        raise BaselineError(f"{path / MANIFEST} does not describe its data: {error}. {_MEND}") from error
    return recording


def read_manifest(path: Path) -> Manifest:
    """The manifest alone, checked in form; cheap. Raises BaselineError."""
    _refuse_file(path)
    file = path / MANIFEST
    if not path.is_dir():
        raise BaselineError(f"There is no recording at {path}. {_CAPTURE}")
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError as error:
        raise BaselineError(
            f"{path} has no {MANIFEST}: it is no recording, or its capture was interrupted. {_CAPTURE}"
        ) from error
    except OSError as error:
        raise BaselineError(f"{file} cannot be read: {error.strerror or error}.") from error
    return parse_manifest(file, raw)


def write_attachment(path: Path, name: str, content: bytes) -> None:
    """Add JSON, or JSON lines, to the recording at `path`, in place of what had this name; checked like all
    else.

    name: lower-case letters, other than "data" and "prompts". A new recording removes its attachments: they
    belong to the old one. Raises BaselineError.
    """
    file_name = _attachment_name(name, content)
    read_manifest(path)

    def updated() -> Manifest:
        manifest = read_manifest(path)
        others = {key: record for key, record in manifest.files.items() if not key.startswith(f"{name}-")}
        return manifest.model_copy(update={"files": {**others, file_name: _describe(content)}})

    with _explained(path):
        _write_folder(path, {file_name: content}, updated)


def read_attachment(path: Path, name: str) -> bytes | None:
    """What `write_attachment` stored under `name`, its digest checked; None where there is none."""

    def read(manifest: Manifest) -> bytes | None:
        names = [key for key in manifest.files if key.startswith(f"{name}-")]
        return _read_file(path, manifest, names[0]) if names else None

    return _read_consistently(path, read)


def accepted_path(baseline: Path, candidate: ModelRecord) -> Path:
    """Where the accepted run of `candidate` lies beside its baseline.

    Models that differ in path, revision, dtype, quantization or KV cache have places of their own; another
    server version or device has not, since drift across them is what one wants to see.
    """
    identity = candidate.model_dump_json(
        include={"model_path", "revision", "dtype", "quantization", "kv_cache_dtype"}
    )
    scheme = candidate.quantization if isinstance(candidate.quantization, str) else "mixed"
    words = [
        candidate.model_path.rstrip("/").rsplit("/", 1)[-1],
        scheme if candidate.quantization else "",
        candidate.kv_cache_dtype or "",
    ]
    label = "-".join(re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-") for word in words if word)
    return baseline / "accepted" / f"{label[:80]}-{_sha256(identity.encode())[:8]}"


# --- reading ---


def _read_consistently(path: Path, read: Callable[[Manifest], T]) -> T:
    """Read files that one and the same manifest names, although a writer may replace them meanwhile."""
    for _ in range(READING_TRIES - 1):
        manifest = read_manifest(path)
        try:
            return read(manifest)
        except FileNotFoundError:
            continue
    try:
        return read(read_manifest(path))
    except FileNotFoundError as error:
        raise BaselineError(
            f"{error.filename} is missing, though {path / MANIFEST} names it. {_MEND}"
        ) from error


def _refuse_file(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise BaselineError(
            f"{path} is a file, but a recording is a folder. "
            "Let the config's `baseline` name a folder, or move the file away."
        )


def parse_manifest(file: Path | str, raw: bytes) -> Manifest:
    """The manifest in `raw`; `file` is what messages call it. Raises BaselineError."""
    if raw.startswith(LFS_MARK):
        raise BaselineError(_explain_lfs(file))
    if len(raw) > MAX_MANIFEST_BYTES:
        raise BaselineError(
            f"{file} is larger than {MAX_MANIFEST_BYTES >> 20} MiB: it is no manifest. {_MEND}"
        )
    try:
        loaded = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BaselineError(f"{file} is not JSON: {error}. {_MEND}") from error
    version = loaded.get("format_version") if isinstance(loaded, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise BaselineError(
            f"{file} has format version {version}; this pytest-quantguard reads up to {FORMAT_VERSION}. "
            "A newer version wrote it: upgrade with pip install -U pytest-quantguard, or capture it anew."
        )
    try:
        return Manifest.model_validate(loaded)
    except ValidationError as error:
        raise BaselineError(f"{file} is not a manifest: {first_problem(error)}. {_MEND}") from error


def first_problem(error: Exception) -> str:
    """What is wrong with stored data, in a line: of a long list the first."""
    text = str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        text = f"{'.'.join(map(str, first['loc'])) or 'the whole file'}: {first['msg']}"
    return " ".join(text.split())[:300]


def _explain_lfs(file: Path | str) -> str:
    return (
        f"{file} is a Git LFS pointer, not the file itself. Fetch it with: git lfs pull "
        "(in GitHub Actions: actions/checkout with `lfs: true`)."
    )


def _read_file(path: Path, manifest: Manifest, name: str) -> bytes:
    """A data file whose size and SHA-256 are the manifest's. Raises FileNotFoundError, BaselineError."""
    file, record = path / name, manifest.files[name]
    try:
        with file.open("rb") as stream:
            present = os.fstat(stream.fileno()).st_size
            content = stream.read(min(present, record.size + 1))  # what is announced may have no room
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BaselineError(f"{file} cannot be read: {error.strerror or error}.") from error
    if content.startswith(LFS_MARK):
        raise BaselineError(_explain_lfs(file))
    if len(content) != record.size:
        found = "more" if len(content) > record.size else f"{len(content)}"
        raise BaselineError(f"{file} is damaged: {record.size} bytes expected, {found} found. {_MEND}")
    if _sha256(content) != record.sha256:
        raise BaselineError(
            f"{file} is damaged: SHA-256 {record.sha256} expected, {_sha256(content)} found. {_MEND}"
        )
    return content


def _only(path: Path, files: Mapping[str, bytes], prefix: str) -> bytes:
    matching = [content for name, content in files.items() if name.startswith(prefix)]
    if len(matching) != 1:
        raise BaselineError(f"{path / MANIFEST} names {len(matching)} files {prefix}*, expected one. {_MEND}")
    return matching[0]


def _load_prompts(path: Path, raw: bytes) -> tuple[PromptRecord, ...]:
    try:
        return tuple(
            PromptRecord(
                id=prompt.id,
                task=prompt.task,
                token_ids=np.array(prompt.token_ids, dtype=np.int32),
                prompt_tokens=prompt.prompt_tokens,
                span_start=prompt.span_start,
            )
            for prompt in _PROMPTS.validate_json(raw)
        )
    except (ValidationError, OverflowError) as error:
        raise BaselineError(
            f"The prompts of {path} are not in this package's format: {first_problem(error)}. {_MEND}"
        ) from error


def _check_manifest(manifest: Manifest, recording: Recording) -> None:
    """Raise ValueError where the manifest says something else than the data."""
    prompts, cells, suite = recording.prompts, recording.cells, manifest.suite
    for prompt in prompts:
        length = len(prompt.token_ids)
        if not 1 <= prompt.span_start < length or not 1 <= prompt.prompt_tokens <= length:
            raise ValueError(f"prompt {prompt.id}: its span or length lies outside its {length} tokens")
    rows = [rows for cell in cells.values() for rows in cell.rows]
    ids = [prompt.token_ids.tolist() for prompt in prompts]
    stated: dict[str, tuple[object, object]] = {
        "suite.prompt_count": (suite.prompt_count, len(prompts)),
        "suite.prompts_digest": (
            suite.prompts_digest,
            digest_prompts(ids, [prompt.prompt_tokens for prompt in prompts]),
        ),
        "suite.width": (suite.width, min(row.width for row in rows)),
        "model.vocab_size": (manifest.model.vocab_size, rows[0].vocab_size),
        "suite.phases x suite.batch_sizes": (
            sorted({str(CellKey(phase, size)) for phase in suite.phases for size in suite.batch_sizes}),
            sorted(map(str, cells)),
        ),
    }
    for key, (expected, found) in stated.items():
        if expected != found:
            raise ValueError(f"{key} is {expected}, the data has {found}")


# --- writing ---


def _dump_prompts(prompts: Sequence[PromptRecord]) -> bytes:
    """JSON, one prompt a line, so that version control can show a change."""
    lines = [
        orjson.dumps(
            {
                "id": prompt.id,
                "task": prompt.task,
                "prompt_tokens": prompt.prompt_tokens,
                "span_start": prompt.span_start,
                "token_ids": prompt.token_ids.tolist(),
            }
        )
        for prompt in prompts
    ]
    return b"[\n" + b",\n".join(lines) + b"\n]\n"


def _name(kind: str, content: bytes, suffix: str) -> str:
    return f"{kind}-{_sha256(content)[:16]}.{suffix}"


def _attachment_name(name: str, content: bytes) -> str:
    file_name = _name(name, content, "json")
    if not _NAME.fullmatch(file_name) or name in ("data", "prompts"):
        raise ValueError(f"{name!r} cannot be the name of an attachment")
    return file_name


def _describe(content: bytes) -> FileRecord:
    return FileRecord(sha256=_sha256(content), size=len(content))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BaselineError(
            f"The recording could not be written to {path}: {error.strerror or error}. What was stored there "
            "before is unchanged. Make room or give permission there, then repeat the command."
        ) from error


def _write_folder(path: Path, contents: Mapping[str, bytes], manifest: Callable[[], Manifest]) -> None:
    """Write data files, then the manifest, then remove what the manifest does not name.

    manifest: called when no other writer is at work.
    """
    created = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(path) as alone:
            try:
                for name, content in contents.items():
                    replace_file(path / name, content, durable=True)
                replace_file(path / MANIFEST, _dump_manifest(manifest()), durable=True)
            finally:
                if alone:
                    _remove_stale(path)
    except BaseException:
        if created:
            _undo(path, contents)
        raise


def _undo(path: Path, contents: Mapping[str, bytes]) -> None:
    """Take back a new folder that could not be completed, unless another process completed it meanwhile."""
    if (path / MANIFEST).exists():
        return
    with contextlib.suppress(OSError):
        for name in contents:
            (path / name).unlink(missing_ok=True)
        path.rmdir()


def _dump_manifest(manifest: Manifest) -> bytes:
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(manifest.model_dump(mode="json"), option=options)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """One writer at a time. Yields False on a file system without locks: stale files are then left alone."""
    folder = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            alone = True
        except OSError:
            alone = False
        yield alone
    finally:
        os.close(folder)


def _remove_stale(path: Path) -> None:
    """Remove files of earlier recordings and of writers that died, or that just failed for want of room: all
    that the manifest does not name, and only names that we give ourselves.
    """
    try:
        named = read_manifest(path).files
    except BaselineError:
        return  # Nobody knows what belongs to it.
    for file in path.iterdir():
        ours = _NAME.fullmatch(file.name) or file.name.startswith(TEMPORARY)
        if ours and file.name not in named:
            file.unlink(missing_ok=True)
