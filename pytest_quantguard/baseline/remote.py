"""Recordings that live at a URL: fetched into the cache, checked, used offline if need be, and pushed.

Any URL that fsspec understands (hf://, s3://, gs://, https://, file://, ...). A recording is small files
named by one manifest, so a copy is whole when its manifest is there; what is in it is checked by `store.py`
as if it had been local all along. Optional: `pip install 'pytest-quantguard[remote]'`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pytest_quantguard.baseline.manifest import Manifest
from pytest_quantguard.baseline.store import (
    LFS_MARK,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    parse_manifest,
    read_manifest,
)
from pytest_quantguard.errors import BaselineError

INSTALL = "pip install 'pytest-quantguard[remote]'"
LATEST = "latest"
READ_ONLY = ("http", "https")
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RemoteFolder:
    """A folder at a URL, and the SHA-256 that its manifest must have, if the URL says so (`#sha256=...`)."""

    url: str
    pin: str | None = None

    @classmethod
    def parse(cls, url: str) -> RemoteFolder:
        """Raises BaselineError for a URL under which there can be no files."""
        folder, _, fragment = url.partition("#")
        pin = re.fullmatch(r"sha256=([0-9a-f]{64})", fragment)
        if fragment and pin is None:
            raise BaselineError(
                f"{url}: after '#' only sha256=<64 hexadecimal digits> of the manifest may stand."
            )
        if "?" in folder:
            raise BaselineError(
                f"{folder.partition('?')[0]}: a baseline is a folder of files, so its URL cannot end in "
                "'?...'. "
                "Give credentials in the way of the store (environment variables, fsspec's configuration)."
            )
        return cls(folder.rstrip("/"), pin[1] if pin else None)

    def file(self, name: str) -> str:
        """The URL of a file in it."""
        return f"{self.url}/{name}"

    def child(self, name: str) -> RemoteFolder:
        """A folder in it."""
        return RemoteFolder(self.file(name))

    @property
    def label(self) -> str:
        """A file name for it, the same on every machine."""
        last = re.sub(r"[^A-Za-z0-9._-]+", "-", self.url.rsplit("/", 1)[-1])[:60]
        return f"{last}-{hashlib.sha256(self.url.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Fetched:
    """The local copy of a remote recording, and what a reader of results must know of it."""

    folder: Path
    note: str | None = None


def fetch(remote: RemoteFolder, cache: Path, progress: Progress) -> Fetched:
    """The local copy of the recording at `remote`, downloaded into `cache` unless it is there already.

    Copies lie at cache/<url>/<digest of the manifest>. A pinned one that is there needs no network. Where the
    store cannot be reached, the copy fetched last is used, and `note` says so. Raises BaselineError: nothing
    there, no access, another digest than the pinned one, no copy either, a missing package.
    """
    home = cache / remote.label
    if remote.pin is not None and (home / remote.pin / MANIFEST).is_file():
        return Fetched(home / remote.pin)
    try:
        raw = _read(remote, MANIFEST, MAX_MANIFEST_BYTES)
    except _UnreachableError as error:
        return _cached(home, remote, error, progress)
    digest = hashlib.sha256(raw).hexdigest()
    if remote.pin not in (None, digest):
        raise BaselineError(
            f"{remote.file(MANIFEST)} has SHA-256 {digest}, but the config pins {remote.pin}. Somebody "
            "replaced the "
            "baseline: look at it, then change the pin behind '#sha256=' of `baseline`."
        )
    folder = home / digest
    try:
        _complete(remote, folder, raw, progress)
    except _UnreachableError as error:
        return _cached(home, remote, error, progress)
    _write(home / LATEST, digest.encode())
    return Fetched(folder)


def fetch_accepted(remote: RemoteFolder, folder: Path, progress: Progress) -> str | None:
    """Make the local `folder` what the accepted run at `remote` is now; a note where that is not known.

    Where there is none, the local one is removed.
    """
    try:
        raw = _read(remote, MANIFEST, MAX_MANIFEST_BYTES)
        _complete(remote, folder, raw, progress)
    except FileNotFoundError:
        shutil.rmtree(folder, ignore_errors=True)
    except _UnreachableError as error:
        held = (
            "the copy of this machine is used" if (folder / MANIFEST).is_file() else "there is no copy here"
        )
        note = f"the accepted run at {remote.url} cannot be reached ({error}); {held}"
        progress(note)
        return note
    return None


def check_pushable(remote: RemoteFolder) -> None:
    """Raise BaselineError where nothing can be written there, before much work is done for it."""
    scheme = urlsplit(remote.url).scheme
    if scheme in READ_ONLY:
        raise BaselineError(
            f"{remote.url}: over {scheme}:// files can be read only. Push through the store itself (s3://, "
            "gs://, "
            "hf://, ssh://), or capture into a folder and upload that."
        )
    if remote.pin is not None:
        raise BaselineError(
            f"{remote.url} is pinned by '#sha256=' in the config; what is pushed has another digest. Remove "
            "the pin, "
            "push, then pin what the command prints."
        )
    _file_system(remote)


def push(folder: Path, remote: RemoteFolder, progress: Progress) -> str:
    """Upload the recording in `folder`, its manifest last; returns the manifest's SHA-256.

    Files of an older recording stay at the URL: a reader may be using them. Raises BaselineError.
    """
    manifest = read_manifest(folder)
    system, path = _file_system(remote)
    content = b""
    try:
        system.makedirs(path, exist_ok=True)
        for name in (*manifest.files, MANIFEST):
            content = (folder / name).read_bytes()
            system.pipe_file(f"{path}/{name}", content)
            progress(f"pushed {remote.file(name)} ({_megabytes(len(content))})")
    except Exception as error:  # fsspec's stores raise whatever their own libraries raise
        raise BaselineError(
            f"The recording could not be pushed to {remote.url}: {_reason(error)}. It is whole in {folder}: "
            "mend the "
            "access and repeat the command, or upload that folder with the store's own tool."
        ) from error
    return hashlib.sha256(content).hexdigest()


class _UnreachableError(Exception):
    """The store did not answer; what it has is not known."""


def _cached(home: Path, remote: RemoteFolder, error: _UnreachableError, progress: Progress) -> Fetched:
    """The copy that was fetched last."""
    latest = home / LATEST
    if remote.pin is not None or not latest.is_file():
        raise BaselineError(
            f"{remote.url} cannot be reached ({error}), and this machine has no copy of "
            f"{'the pinned' if remote.pin else 'that'} baseline. Check the network and the access."
        ) from error
    when = datetime.fromtimestamp(latest.stat().st_mtime, timezone.utc)
    note = (
        f"OFFLINE: {remote.url} cannot be reached ({error}); the baseline is the copy that was fetched on "
        f"{when:%Y-%m-%d %H:%M} UTC"
    )
    progress(note)
    return Fetched(home / latest.read_text(encoding="utf-8").strip(), note)


def _complete(remote: RemoteFolder, folder: Path, raw: bytes, progress: Progress) -> None:
    """Download what `folder` lacks of the recording that the manifest `raw` names; the manifest comes
    last.
    """
    if raw.startswith(LFS_MARK):
        raise BaselineError(
            f"{remote.file(MANIFEST)} is a Git LFS pointer, not the file itself: this URL serves the "
            "repository "
            "without its large files. Use a URL that serves them (hf:// does), or check out with git lfs."
        )
    manifest: Manifest = parse_manifest(remote.file(MANIFEST), raw)
    try:
        if (folder / MANIFEST).is_file() and (folder / MANIFEST).read_bytes() == raw:
            progress(f"the copy of {remote.url} is current")
            return
        for name, record in manifest.files.items():
            content = _read(remote, name, record.size)
            if len(content) != record.size or hashlib.sha256(content).hexdigest() != record.sha256:
                raise BaselineError(
                    f"{remote.file(name)} is damaged or was replaced meanwhile: {record.size} bytes with "
                    "SHA-256 "
                    f"{record.sha256} expected, {len(content)} bytes found. Push the recording again."
                )
            _write(folder / name, content)
            progress(f"fetched {remote.file(name)} ({_megabytes(len(content))})")
        _write(folder / MANIFEST, raw)
    except OSError as error:
        raise BaselineError(
            f"{remote.url} could not be copied to {folder}: {error.strerror or error}. Make room there, or "
            "set "
            "QUANTGUARD_CACHE to another folder."
        ) from error


def _read(remote: RemoteFolder, name: str, limit: int) -> bytes:
    """A remote file of at most `limit` bytes.

    Raises FileNotFoundError for a missing accepted run, BaselineError, _UnreachableError.
    """
    from fsspec.callbacks import Callback

    system, path = _file_system(remote)
    too_large = BaselineError(f"{remote.file(name)} is larger than the {limit} bytes that are expected.")

    class Limit(Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            super().relative_update(inc)
            if self.value > limit:
                raise too_large

    with tempfile.TemporaryDirectory(prefix="quantguard-") as scratch:
        local = Path(scratch, "file")
        try:
            system.get_file(f"{path}/{name}", str(local), callback=Limit())
        except FileNotFoundError as error:
            if "/accepted/" in remote.url:
                raise
            raise BaselineError(
                f"There is no file {remote.file(name)}. Record the baseline and upload it with: "
                "quantguard capture CONFIG --push"
            ) from error
        except BaselineError:
            raise
        except Exception as error:  # fsspec's stores raise whatever their own libraries raise
            raise _explained(remote.file(name), error) from error
        content = local.read_bytes() if local.is_file() else b""
    if len(content) > limit:
        raise too_large
    return content


def _explained(url: str, error: Exception) -> Exception:
    """No access is the user's to mend; anything else may pass."""
    response = getattr(error, "response", None)
    status = getattr(error, "status", getattr(response, "status_code", None))
    if isinstance(error, PermissionError) or status in (401, 403):
        return BaselineError(
            f"{url} may not be read: {_reason(error)}. Give access in the way of the store (HF_TOKEN, "
            "AWS_PROFILE, "
            "GOOGLE_APPLICATION_CREDENTIALS, ...)."
        )
    return _UnreachableError(_reason(error))


def _file_system(remote: RemoteFolder) -> tuple[Any, str]:
    """fsspec's file system for the URL, and the path in it."""
    scheme = urlsplit(remote.url).scheme
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise BaselineError(f"{remote.url}: a baseline at a URL needs fsspec. Run: {INSTALL}") from None
    options: dict[str, Any] = {}
    if scheme in READ_ONLY:
        local = urlsplit(remote.url).hostname in LOOPBACK
        options = {"client_kwargs": {"trust_env": not local}, "skip_instance_cache": True}
    try:
        system, path = url_to_fs(remote.url, **options)
    except ImportError as error:
        raise BaselineError(
            f"{remote.url}: {_reason(error)}. ({scheme}:// needs it; {INSTALL} has hf and https.)"
        ) from None
    except ValueError as error:
        raise BaselineError(
            f"{remote.url}: {_reason(error)}. Known to fsspec: hf, s3, gs, az, https, file, ..."
        ) from None
    return system, str(path).rstrip("/")


def _write(path: Path, content: bytes) -> None:
    """Atomically: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
