"""Stores that refuse, stall, lose, cut or change files at any step: a sentence, and nothing half-done."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pytest_quantguard.baseline import remote as module
from pytest_quantguard.baseline.remote import Fetched, RemoteFolder, fetch, fetch_accepted, push
from pytest_quantguard.baseline.store import read_recording, write_recording
from pytest_quantguard.errors import BaselineError
from tests.baseline.samples import make_recording

URL = "flaky://store/base"
PUSHED = ("makedirs", "pipe_file", "pipe_file", "pipe_file")
"""What a push asks of the store, its looking afterwards aside."""
FETCHED = ("get_file", "get_file", "get_file")


class Flaky(MemoryFileSystem):  # type: ignore[misc]
    """A store in memory, whose n-th operation goes wrong in the way of `fault`."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    step: ClassVar[int] = -1
    done: ClassVar[int] = 0
    fault: ClassVar[Callable[[str, bytes], bytes | None] | None] = None

    def _happens(self, content: bytes) -> bytes:
        """What becomes of `content`; raises what the fault raises."""
        now, Flaky.done = Flaky.done, Flaky.done + 1
        if now != Flaky.step or Flaky.fault is None:
            return content
        changed = Flaky.fault("", content)
        return content if changed is None else changed

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._happens(b"")
        super().makedirs(path, exist_ok=exist_ok)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        super().pipe_file(path, self._happens(value), **options)

    def get_file(self, path: str, local: str, callback: Any = None, **_: Any) -> None:
        content = self._happens(self.cat_file(path))
        callback.relative_update(len(content))
        Path(local).write_bytes(content)

    def info(self, path: str, **options: Any) -> Any:
        return super().info(path.removeprefix("flaky://"), **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("flaky://", "memory://")))


class StrangeError(Exception):
    """What only a store's own library knows."""


def raising(error: BaseException) -> Callable[[str, bytes], bytes | None]:
    def fault(_: str, __: bytes) -> bytes | None:
        raise error

    return fault


RAISED = {
    "permission": PermissionError(errno.EACCES, "Permission denied"),
    "no room": OSError(errno.ENOSPC, "No space left on device"),
    "connection": ConnectionResetError("reset"),
    "gone": FileNotFoundError("the bucket is gone"),
    "nameless": StrangeError(),
    "value": ValueError("bad\nmultipart"),
}
CHANGED: dict[str, Callable[[str, bytes], bytes | None]] = {
    "cut": lambda _, content: content[: len(content) // 2],
    "empty": lambda _, __: b"",
    "longer": lambda _, content: content + b"x",
    "flipped": lambda _, content: content[:-9] + bytes([content[-9] ^ 4]) + content[-8:] if content else b"",
    "other": lambda _, __: b"<html>Sign in</html>",
}


@pytest.fixture(autouse=True)
def _flaky() -> Iterator[None]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.step, Flaky.done, Flaky.fault = -1, 0, None
    yield
    Flaky.store.clear()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "base"
    write_recording(folder, make_recording())
    return folder


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("newer") / "base"
    write_recording(folder, make_recording(seed=1))
    return folder


def say(_: str) -> None:
    """Nobody listens."""


def outcome(work: Callable[[], Any]) -> Any:
    """What it returns, or the sentence it ends with."""
    try:
        return work()
    except BaselineError as error:
        return str(error)


def plan(step: int, fault: Callable[[str, bytes], bytes | None]) -> None:
    Flaky.step, Flaky.done, Flaky.fault = step, 0, fault


def healthy() -> None:
    Flaky.fault = None


@pytest.mark.parametrize("step", range(len(PUSHED)))
@pytest.mark.parametrize("error", RAISED)
def test_push_over_an_older_one(recorded: Path, newer: Path, tmp_path: Path, error: str, step: int) -> None:
    """The reader gets the old one, whole; the next push mends it."""
    remote = RemoteFolder.parse(URL)
    push(recorded, remote, say)
    plan(step, raising(RAISED[error]))
    with pytest.raises(BaselineError, match=r"could not be pushed to .*: \w+.* It is whole in .*") as caught:
        push(newer, remote, say)
    assert "\n" not in str(caught.value)
    healthy()
    old = fetch(remote, tmp_path, say).folder
    assert (old / "manifest.json").read_bytes() == (recorded / "manifest.json").read_bytes()
    read_recording(old)
    push(newer, remote, say)
    assert fetch(remote, tmp_path, say).folder != old


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("change", ["cut", "empty"])
def test_a_push_that_the_store_cuts_is_seen(recorded: Path, newer: Path, change: str, step: int) -> None:
    push(recorded, RemoteFolder.parse(URL), say)
    plan(step, CHANGED[change])
    with pytest.raises(BaselineError, match=r"the store has \d+ of the \d+ bytes of \w+"):
        push(newer, RemoteFolder.parse(URL), say)


def test_who_may_write_need_not_look(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("no listing for you")

    monkeypatch.setattr(Flaky, "info", refuse)
    assert len(push(recorded, RemoteFolder.parse(URL), say)) == 64


@pytest.mark.parametrize("step", range(len(FETCHED)))
@pytest.mark.parametrize("fault", [*RAISED, *CHANGED])
@pytest.mark.parametrize("held", [False, True], ids=["first", "with an older copy"])
def test_fetch(recorded: Path, newer: Path, tmp_path: Path, fault: str, step: int, held: bool) -> None:
    """A whole copy of now, an older one that says so, or a sentence. Nothing damaged is left behind."""
    remote = RemoteFolder.parse(URL)
    if held:
        push(recorded, remote, say)
        old = fetch(remote, tmp_path, say).folder
    push(newer, remote, say)
    plan(step, raising(RAISED[fault]) if fault in RAISED else CHANGED[fault])
    fetched = outcome(lambda: fetch(remote, tmp_path, say))
    if isinstance(fetched, str):
        assert URL in fetched
        assert "\n" not in fetched
    else:
        assert held
        assert fetched.folder == old
        assert fetched.note is not None
        assert fetched.note.startswith("OFFLINE: ")
        read_recording(fetched.folder)
    healthy()
    mended = fetch(remote, tmp_path, say)
    assert mended.note is None
    assert (mended.folder / "manifest.json").read_bytes() == (newer / "manifest.json").read_bytes()
    read_recording(mended.folder)


def test_a_copy_that_was_damaged_here_is_fetched_anew(recorded: Path, tmp_path: Path) -> None:
    digest = push(recorded, RemoteFolder.parse(URL), say)
    for url in (URL, f"{URL}#sha256={digest}"):
        remote = RemoteFolder.parse(url)
        folder = fetch(remote, tmp_path, say).folder
        for file in folder.iterdir():
            whole = file.read_bytes()
            for broken in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), None):
                file.unlink() if broken is None else file.write_bytes(broken)
                assert fetch(remote, tmp_path, say) == Fetched(folder)
                assert file.read_bytes() == whole
    (folder.parent / "latest").write_bytes(b"\xff../../elsewhere")
    plan(0, raising(ConnectionError()))
    with pytest.raises(BaselineError, match="this machine has no copy of that baseline"):
        fetch(RemoteFolder.parse(URL), tmp_path, say)


@pytest.mark.parametrize("step", range(len(FETCHED)))
def test_a_store_that_stalls(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Its own library may wait for minutes; we do not."""
    over = threading.Event()

    def stall(_: str, __: bytes) -> bytes | None:
        over.wait(60)
        return None

    push(recorded, RemoteFolder.parse(URL), say)
    plan(step, stall)
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.05 if step == 0 else 60.0)
    monkeypatch.setattr(module, "_patience", lambda _: 0.05)
    try:
        with pytest.raises(BaselineError, match=r"cannot be reached .*not finished within 0 s.*no copy"):
            fetch(RemoteFolder.parse(URL), tmp_path, say)
        if step:
            plan(step, stall)
            with pytest.raises(BaselineError, match=r"could not be pushed .*not finished within 0 s"):
                push(recorded, RemoteFolder.parse(URL), say)
    finally:
        over.set()


def test_an_accepted_run_that_lost_its_data_is_not_none(recorded: Path, tmp_path: Path) -> None:
    """Only where the store has no manifest there is no accepted run."""
    accepted = RemoteFolder.parse(URL).child("accepted/x-1")
    push(recorded, accepted, say)
    folder = tmp_path / "accepted"
    assert fetch_accepted(accepted, folder, say) is None
    name = next(path.name for path in recorded.iterdir() if path.name.startswith("data-"))
    fsspec.filesystem("flaky").rm(f"/store/base/accepted/x-1/{name}")
    shutil.rmtree(folder)
    with pytest.raises(BaselineError, match=r"There is no file .*data-.*, though the manifest"):
        fetch_accepted(accepted, folder, say)


@pytest.mark.parametrize("seed", range(15))
def test_any_manifest(recorded: Path, tmp_path: Path, seed: int) -> None:
    """Bytes of the manifest changed at random: a sentence, or a copy that reads."""
    push(recorded, RemoteFolder.parse(URL), say)
    draw = random.Random(seed)
    raw = bytearray((recorded / "manifest.json").read_bytes())
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(raw))
        raw[at : at + draw.randint(0, 3)] = draw.choice(
            [b"", b'"', b"9" * 30, b"-1", b"null", b"../", b"\xff", b"[" * 2000, bytes([raw[at] ^ 1])]
        )
    fsspec.filesystem("flaky").pipe_file("/store/base/manifest.json", bytes(raw))
    said = outcome(lambda: fetch(RemoteFolder.parse(URL), tmp_path / "cache", say))
    if isinstance(said, Fetched):
        said = outcome(lambda: read_recording(said.folder))
    assert not isinstance(said, str) or len(said) < 700
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}


@pytest.mark.parametrize("name", ["manifest.json", "latest"])
def test_no_room_here_is_said(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    push(recorded, RemoteFolder.parse(URL), say)
    replace = Path.replace

    def full(self: Path, target: Path) -> Path:
        if target.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(
        BaselineError, match=r"No space left on device. Make room there, or set QUANTGUARD_CACHE"
    ):
        fetch(RemoteFolder.parse(URL), tmp_path, say)
    assert not list(tmp_path.rglob(".tmp-*"))
