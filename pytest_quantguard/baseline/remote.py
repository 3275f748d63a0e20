"""Recordings that live at a URL: fetched into the cache, checked, used offline if need be, and pushed.

Any URL that fsspec understands (hf://, s3://, gs://, https://, file://, ...). A recording is small files
named by one manifest, so a copy is whole when its manifest is there; what is in it is checked by `store.py`
as if it had been local all along. Optional: `pip install 'pytest-quantguard[remote]'`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar
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
from pytest_quantguard.whole_files import replace_file

INSTALL = "pip install 'pytest-quantguard[remote]'"
LATEST = "latest"
READ_ONLY = ("http", "https")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANSWER_SECONDS = 60.0
"""How long a store may take for a file, whatever its own library waits; for a large one as long as
SLOWEST_RATE takes in addition."""
SLOWEST_RATE = 100_000
"""Bytes a second."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Progress = Callable[[str], None]
T = TypeVar("T")


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
    with _explained_copy(remote, home):
        try:
            if remote.pin is not None and _digest_of(home / remote.pin / MANIFEST) == remote.pin:
                raw = (home / remote.pin / MANIFEST).read_bytes()
            else:
                raw = _read(remote, MANIFEST, MAX_MANIFEST_BYTES, ANSWER_SECONDS)
            digest = hashlib.sha256(raw).hexdigest()
            if remote.pin not in (None, digest):
                raise BaselineError(
                    f"{remote.file(MANIFEST)} has SHA-256 {digest}, but the config pins {remote.pin}. "
                    "Somebody replaced the baseline: look at it, then change the pin behind '#sha256=' of "
                    "`baseline`."
                )
            _complete(remote, home / digest, raw, progress)
        except FileNotFoundError as error:
            raise BaselineError(
                f"There is no file {remote.file(MANIFEST)}. Record the baseline and upload it with: "
                "quantguard capture CONFIG --push"
            ) from error
        except _UnreachableError as error:
            return _cached(home, remote, error, progress)
        replace_file(home / LATEST, digest.encode())
        return Fetched(home / digest)


def fetch_accepted(remote: RemoteFolder, folder: Path, progress: Progress) -> str | None:
    """Make the local `folder` what the accepted run at `remote` is now; a note where that is not known.

    Where there is none, the local one is removed.
    """
    try:
        with _explained_copy(remote, folder):
            raw = _read(remote, MANIFEST, MAX_MANIFEST_BYTES, ANSWER_SECONDS)
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
        _in_time(lambda: system.makedirs(path, exist_ok=True), ANSWER_SECONDS)
        for name in (*manifest.files, MANIFEST):
            content = (folder / name).read_bytes()
            _upload(system, f"{path}/{name}", content)
            progress(f"pushed {remote.file(name)} ({_megabytes(len(content))})")
    except Exception as error:  # fsspec's stores raise whatever their own libraries raise
        raise BaselineError(
            f"The recording could not be pushed to {remote.url}: {_reason(error)}. It is whole in {folder}: "
            "mend the access and repeat the command, or upload that folder with the store's own tool."
        ) from error
    return hashlib.sha256(content).hexdigest()


def _upload(system: Any, path: str, content: bytes) -> None:
    """Write a file, and look whether all of it is there, where the store says; raises whatever it raises."""
    _in_time(lambda: system.pipe_file(path, content), _patience(len(content)))
    size: int | None = None
    with contextlib.suppress(Exception):  # who may write need not be allowed to look
        system.invalidate_cache()
        size = _in_time(lambda: system.info(path).get("size"), ANSWER_SECONDS)
    if isinstance(size, int) and size != len(content):
        raise OSError(f"the store has {size} of the {len(content)} bytes of {path.rsplit('/', 1)[-1]}")


class _UnreachableError(Exception):
    """The store did not answer; what it has is not known."""


def _cached(home: Path, remote: RemoteFolder, error: _UnreachableError, progress: Progress) -> Fetched:
    """The copy that was fetched last."""
    latest = home / LATEST
    held = latest.read_text(errors="replace", encoding="utf-8").strip() if latest.is_file() else ""
    if remote.pin is not None or not re.fullmatch(r"[0-9a-f]{64}", held):
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
    lacking = [name for name, record in manifest.files.items() if _digest_of(folder / name) != record.sha256]
    if not lacking and _digest_of(folder / MANIFEST) == hashlib.sha256(raw).hexdigest():
        progress(f"the copy of {remote.url} is current")
        return
    for name in lacking:
        record = manifest.files[name]
        try:
            content = _read(remote, name, record.size, _patience(record.size))
        except FileNotFoundError as error:
            raise BaselineError(
                f"There is no file {remote.file(name)}, though the manifest beside it names it: it was lost, "
                "or the recording is being replaced. Push the recording again."
            ) from error
        if len(content) != record.size or hashlib.sha256(content).hexdigest() != record.sha256:
            raise BaselineError(
                f"{remote.file(name)} is damaged or was replaced meanwhile: {record.size} bytes with "
                f"SHA-256 {record.sha256} expected, {len(content)} bytes found. Push the recording again."
            )
        replace_file(folder / name, content)
        progress(f"fetched {remote.file(name)} ({_megabytes(len(content))})")
    replace_file(folder / MANIFEST, raw)


def _read(remote: RemoteFolder, name: str, limit: int, seconds: float) -> bytes:
    """A remote file of at most `limit` bytes.

    Raises FileNotFoundError, BaselineError, _UnreachableError.
    """
    system, path = _file_system(remote)
    over = threading.Event()
    try:
        return _in_time(lambda: _download(system, path, remote.file(name), name, limit, over), seconds)
    except (FileNotFoundError, BaselineError):
        raise
    except Exception as error:  # fsspec's stores raise whatever their own libraries raise
        raise _explained(remote.file(name), error) from error
    finally:
        over.set()


def _download(system: Any, path: str, url: str, name: str, limit: int, over: threading.Event) -> bytes:
    """The file, through one on disk, so that fsspec tells how far it is. over: nobody waits for it now."""
    from fsspec.callbacks import Callback

    too_large = BaselineError(f"{url} is larger than the {limit} bytes that are expected.")

    class Limit(Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            super().relative_update(inc)
            if over.is_set():
                raise TimeoutError
            if self.value > limit:
                raise too_large

    with tempfile.TemporaryDirectory(prefix="quantguard-", ignore_cleanup_errors=True) as scratch:
        local = Path(scratch, "file")
        system.get_file(f"{path}/{name}", str(local), callback=Limit())
        if not local.is_file():
            return b""
        with local.open("rb") as stream:
            content = stream.read(limit + 1)
    if len(content) > limit:
        raise too_large
    return content


def _in_time(work: Callable[[], T], seconds: float) -> T:
    """What `work` returns or raises; TimeoutError where it takes longer, and it is then left to itself.

    A thread, since the libraries of the stores wait as long as they like and cannot be told to stop.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="quantguard-store").start()
    try:
        return future.result(seconds)
    except Exception:
        if future.done():
            raise
        raise TimeoutError(f"it was not finished within {seconds:.0f} s") from None


def _patience(size: int) -> float:
    """Seconds for a file of so many bytes."""
    return ANSWER_SECONDS + size / SLOWEST_RATE


@contextlib.contextmanager
def _explained_copy(remote: RemoteFolder, folder: Path) -> Iterator[None]:
    """A copy that this machine has no room for, or no permission, is the user's to mend."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BaselineError(
            f"{remote.url} could not be copied to {folder}: {error.strerror or error}. Make room there, or "
            "set QUANTGUARD_CACHE to another folder."
        ) from error


def _digest_of(file: Path) -> str | None:
    """SHA-256; None where there is no such file."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except FileNotFoundError:
        return None


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
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return BaselineError(
            f"{url} could not be fetched: {error.strerror}. Make room in {tempfile.gettempdir()}, or set "
            "TMPDIR to another folder."
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
        from aiohttp import ClientTimeout

        local = urlsplit(remote.url).hostname in LOOPBACK
        patience = ClientTimeout(total=None, sock_connect=ANSWER_SECONDS, sock_read=ANSWER_SECONDS)
        options = {
            "client_kwargs": {"trust_env": not local, "timeout": patience},
            "skip_instance_cache": True,
        }
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


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
