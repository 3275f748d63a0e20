"""A recording on disk: a folder that appears whole or not at all, and that is checked on every reading.

`manifest.json` names the data files and their SHA-256. Data files are named after their content and written first;
replacing the manifest is the one step that makes a new recording visible, so a reader sees the old one or the new
one, also while several processes write, and a full disk leaves the old one as it was. How log-probabilities become
bytes is the codec's business.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pytest_quantguard.baseline.codec import decode_cells, encode_cells
from pytest_quantguard.baseline.manifest import FORMAT_VERSION, FileRecord, Manifest, digest_prompts
from pytest_quantguard.baseline.recording import CellKey, PromptRecord, Recording
from pytest_quantguard.errors import BaselineError

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20
MAX_DATA_BYTES = 8 << 30
LFS_MARK = b"version https://git-lfs.github.com/spec/"
_OURS = re.compile(r"(data-[0-9a-f]{16}\.qglp|prompts-[0-9a-f]{16}\.json|\.tmp-[A-Za-z0-9_]+)")


class _StoredPrompt(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: str
    task: str
    prompt_tokens: int = Field(ge=1)
    span_start: int = Field(ge=1)
    token_ids: list[int]


_PROMPTS = TypeAdapter(list[_StoredPrompt])


def write_recording(path: Path, recording: Recording) -> None:
    """Store `recording` as the folder `path`, in place of what was there.

    Raises BaselineError where the folder cannot be written; what was there before is then still whole.
    """
    _refuse_file(path)
    contents = {
        "prompts-{}.json": _dump_prompts(recording.prompts),
        "data-{}.qglp": encode_cells(recording.cells, recording.prompts),
    }
    named = {name.format(_sha256(content)[:16]): content for name, content in contents.items()}
    manifest = recording.manifest.model_copy(
        update={
            "noise_floor": {str(key): dict(values) for key, values in recording.noise_floor.items()},
            "files": {
                name: FileRecord(sha256=_sha256(content), size=len(content))
                for name, content in named.items()
            },
        }
    )
    _check_manifest(manifest, recording)
    try:
        _write_folder(path, named, manifest)
    except OSError as error:
        raise BaselineError(
            f"The recording could not be written to {path}: {error.strerror or error}. "
            "What was stored there before is unchanged. Free space or permissions there, then capture again."
        ) from error


def read_recording(path: Path) -> Recording:
    """Read and check the folder `path`: format version, every file's SHA-256, every shape.

    Raises BaselineError that says what is wrong and how to mend it.
    """
    manifest = read_manifest(path)
    try:
        files = _read_files(path, manifest)
    except FileNotFoundError:
        # A writer may have replaced the recording since the manifest was read.
        manifest = read_manifest(path)
        try:
            files = _read_files(path, manifest)
        except FileNotFoundError as error:
            raise BaselineError(
                f"{error.filename} is missing, though {path / MANIFEST} names it. {_MEND}"
            ) from error
    prompts = _load_prompts(path, _only(path, files, "prompts-"))
    try:
        cells = decode_cells(_only(path, files, "data-"), prompts)
    except BaselineError as error:
        raise BaselineError(f"{path}: {error} {_MEND}") from error
    names = {str(key): key for key in cells}
    unknown = sorted(manifest.noise_floor.keys() - names.keys())
    if unknown:
        raise BaselineError(
            f"{path / MANIFEST} has a noise floor of {unknown[0]}, which was not recorded. {_MEND}"
        )
    floor = {names[name]: values for name, values in manifest.noise_floor.items()}
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
        if file.stat().st_size > MAX_MANIFEST_BYTES:
            raise BaselineError(
                f"{file} is larger than {MAX_MANIFEST_BYTES >> 20} MiB: it is no manifest. {_MEND}"
            )
        raw = file.read_bytes()
    except FileNotFoundError as error:
        raise BaselineError(
            f"{path} is a folder without {MANIFEST}: no recording, or one whose capture was interrupted. {_CAPTURE}"
        ) from error
    except OSError as error:
        raise BaselineError(f"{file} cannot be read: {error.strerror or error}.") from error
    return _parse_manifest(file, raw)


_CAPTURE = "Record one with: quantguard capture CONFIG (or pytest --quantguard-config=CONFIG --quantguard-update-baseline)."
_MEND = (
    "Restore the folder from version control, or record it anew with: quantguard capture CONFIG "
    "(for an accepted run: quantguard accept CONFIG)."
)


# --- reading ---------------------------------------------------------------------------------------------------


def _refuse_file(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise BaselineError(
            f"{path} is a file, but a recording is a folder. Point the config's `baseline` to a folder, or move the file away."
        )


def _parse_manifest(file: Path, raw: bytes) -> Manifest:
    if raw.startswith(LFS_MARK):
        raise BaselineError(_explain_lfs(file))
    try:
        loaded = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BaselineError(f"{file} is not JSON: {error}. {_MEND}") from error
    version = loaded.get("format_version") if isinstance(loaded, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise BaselineError(
            f"{file} has format version {version}; this pytest-quantguard reads up to {FORMAT_VERSION}. "
            "It was written by a newer version: upgrade with pip install -U pytest-quantguard, or capture it anew."
        )
    try:
        return Manifest.model_validate(loaded)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise BaselineError(f"{file} is not a manifest: {where}: {first['msg']}. {_MEND}") from error


def _explain_lfs(file: Path) -> str:
    return (
        f"{file} is a Git LFS pointer, not the data itself. Fetch it with: git lfs pull "
        "(in GitHub Actions: actions/checkout with `lfs: true`)."
    )


def _read_files(path: Path, manifest: Manifest) -> dict[str, bytes]:
    contents = {}
    for name, record in manifest.files.items():
        file = path / name
        size = file.stat().st_size
        if size != record.size or size > MAX_DATA_BYTES:
            with file.open("rb") as stream:
                if stream.read(len(LFS_MARK)) == LFS_MARK:
                    raise BaselineError(_explain_lfs(file))
            raise BaselineError(f"{file} is damaged: {record.size} bytes expected, {size} found. {_MEND}")
        content = file.read_bytes()
        found = _sha256(content)
        if found != record.sha256:
            raise BaselineError(
                f"{file} is damaged: SHA-256 {record.sha256} expected, {found} found. {_MEND}"
            )
        contents[name] = content
    return contents


def _only(path: Path, files: dict[str, bytes], prefix: str) -> bytes:
    matching = [content for name, content in files.items() if name.startswith(prefix)]
    if len(matching) != 1:
        raise BaselineError(f"{path / MANIFEST} names {len(matching)} files {prefix}*, expected one. {_MEND}")
    return matching[0]


def _load_prompts(path: Path, raw: bytes) -> tuple[PromptRecord, ...]:
    try:
        stored = _PROMPTS.validate_json(raw)
        return tuple(
            PromptRecord(
                prompt.id,
                prompt.task,
                np.array(prompt.token_ids, dtype=np.int32),
                prompt.prompt_tokens,
                prompt.span_start,
            )
            for prompt in stored
        )
    except (ValidationError, OverflowError) as error:
        raise BaselineError(
            f"The prompts of {path} are not in this package's format: {error}. {_MEND}"
        ) from error


def _check_manifest(manifest: Manifest, recording: Recording) -> None:
    """Raise ValueError where the manifest says something else than the data."""
    prompts, suite = recording.prompts, manifest.suite
    for prompt in prompts:
        if not 1 <= prompt.span_start < len(prompt.token_ids) or not 1 <= prompt.prompt_tokens <= len(
            prompt.token_ids
        ):
            raise ValueError(
                f"prompt {prompt.id}: its span or length lies outside its {len(prompt.token_ids)} tokens"
            )
    digest = digest_prompts(
        [prompt.token_ids.tolist() for prompt in prompts], [p.prompt_tokens for p in prompts]
    )
    rows = next(iter(recording.cells.values())).rows[0]
    wanted = {CellKey(phase, size) for phase in suite.phases for size in suite.batch_sizes}
    stated = {
        "suite.prompt_count": (suite.prompt_count, len(prompts)),
        "suite.prompts_digest": (suite.prompts_digest, digest),
        "suite.width": (suite.width, rows.width),
        "model.vocab_size": (manifest.model.vocab_size, rows.vocab_size),
        "suite.phases x suite.batch_sizes": (
            sorted(map(str, wanted)),
            sorted(map(str, recording.cells)),
        ),
    }
    for key, (expected, found) in stated.items():
        if expected != found:
            raise ValueError(f"{key} is {expected}, the data has {found}")


# --- writing ---------------------------------------------------------------------------------------------------


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


def _write_folder(path: Path, named: dict[str, bytes], manifest: Manifest) -> None:
    created = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(path) as alone:
            for name, content in named.items():
                _write_file(path / name, content)
            _write_file(path / MANIFEST, _dump_manifest(manifest))
            if alone:
                _remove_stale(path, manifest)
    except OSError:
        if created:
            _undo(path, named)
        raise


def _undo(path: Path, named: dict[str, bytes]) -> None:
    """Take back a new folder that could not be completed; one that another process completed meanwhile stays."""
    if (path / MANIFEST).exists():
        return
    with contextlib.suppress(OSError):
        for name in named:
            (path / name).unlink(missing_ok=True)
        path.rmdir()


def _dump_manifest(manifest: Manifest) -> bytes:
    return orjson.dumps(
        manifest.model_dump(mode="json"), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    )


def _write_file(file: Path, content: bytes) -> None:
    """Write under a temporary name, to the disk, then rename."""
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """One writer at a time. Yields False on file systems without locks, where stale files are then left alone."""
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


def _remove_stale(path: Path, manifest: Manifest) -> None:
    """Remove files of earlier recordings, and those of writers that died; only files that we named ourselves."""
    for file in path.iterdir():
        if _OURS.fullmatch(file.name) and file.name not in manifest.files:
            file.unlink(missing_ok=True)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
