"""Baselines at URLs, over file://, memory:// and an HTTP server on this machine."""

from __future__ import annotations

import functools
import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import fsspec
import pytest

from pytest_quantguard.baseline.remote import RemoteFolder, check_pushable, fetch, fetch_accepted, push
from pytest_quantguard.baseline.store import read_recording, write_recording
from pytest_quantguard.errors import BaselineError
from tests.baseline.samples import make_recording


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stored recording."""
    folder = tmp_path_factory.mktemp("recorded") / "base"
    write_recording(folder, make_recording())
    return folder


@pytest.fixture
def said() -> list[str]:
    """What was told to the user."""
    return []


@pytest.fixture
def memory() -> Iterator[str]:
    """A URL in memory, emptied afterwards."""
    yield "memory://store/base"
    fsspec.filesystem("memory").store.clear()


class _Handler(http.server.SimpleHTTPRequestHandler):
    requests: ClassVar[list[str]]
    status: int | None = None

    def do_GET(self) -> None:
        self.requests.append(self.path)
        if self.status is not None:
            self.send_error(self.status)
        else:
            super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def web(recorded: Path) -> Iterator[tuple[str, type[_Handler]]]:
    """An HTTP server over the recording: its URL, and its handler, which counts requests."""

    class Handler(_Handler):
        requests: ClassVar[list[str]] = []

    serve = functools.partial(Handler, directory=str(recorded.parent))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/base", Handler
    server.shutdown()
    thread.join()
    server.server_close()


def digest_of(folder: Path) -> str:
    return hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()


def same_files(one: Path, other: Path) -> bool:
    def files(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    return files(one) == files(other)


def test_push_then_fetch_gives_the_same_bytes(
    recorded: Path, memory: str, tmp_path: Path, said: list[str]
) -> None:
    assert push(recorded, RemoteFolder.parse(memory), said.append) == digest_of(recorded)
    fetched = fetch(RemoteFolder.parse(memory), tmp_path, said.append)
    assert fetched.note is None
    assert same_files(fetched.folder, recorded)
    assert fetched.folder.name == digest_of(recorded)
    read_recording(fetched.folder)


def test_file_url(recorded: Path, tmp_path: Path, said: list[str]) -> None:
    fetched = fetch(RemoteFolder.parse(recorded.as_uri()), tmp_path, said.append)
    assert same_files(fetched.folder, recorded)


def test_http_downloads_once(
    web: tuple[str, type[_Handler]], recorded: Path, tmp_path: Path, said: list[str]
) -> None:
    url, handler = web
    first = fetch(RemoteFolder.parse(url), tmp_path, said.append)
    assert same_files(first.folder, recorded)
    asked = len(handler.requests)
    assert fetch(RemoteFolder.parse(url), tmp_path, said.append) == first
    assert handler.requests[asked:] == ["/base/manifest.json"], "only the manifest is asked again"
    assert said[-1] == f"the copy of {url} is current"


def test_offline_uses_the_copy_and_says_so(
    web: tuple[str, type[_Handler]], tmp_path: Path, said: list[str]
) -> None:
    url, handler = web
    online = fetch(RemoteFolder.parse(url), tmp_path, said.append)
    handler.status = 503
    offline = fetch(RemoteFolder.parse(url), tmp_path, said.append)
    assert offline.folder == online.folder
    assert offline.note is not None
    assert offline.note.startswith(f"OFFLINE: {url} cannot be reached (ClientResponseError: 503")
    assert said[-1] == offline.note


def test_offline_without_a_copy(tmp_path: Path, said: list[str]) -> None:
    with pytest.raises(BaselineError, match=r"127.0.0.1:9/base cannot be reached .* no copy of that"):
        fetch(RemoteFolder.parse("http://127.0.0.1:9/base"), tmp_path, said.append)


@pytest.mark.parametrize("status", [401, 403])
def test_no_access_is_not_offline(
    web: tuple[str, type[_Handler]], tmp_path: Path, said: list[str], status: int
) -> None:
    url, handler = web
    fetch(RemoteFolder.parse(url), tmp_path, said.append)
    handler.status = status
    with pytest.raises(BaselineError, match=r"may not be read.*Give access in the way of the store"):
        fetch(RemoteFolder.parse(url), tmp_path, said.append)


def test_no_access_as_hugging_face_says_it(
    memory: str, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class RefusalError(Exception):
        response = SimpleNamespace(status_code=403)

    def refuse(*_: object, **__: object) -> None:
        raise RefusalError("gated")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "get_file", refuse)
    with pytest.raises(BaselineError, match=r"may not be read: RefusalError: gated. Give access"):
        fetch(RemoteFolder.parse(memory), tmp_path, said.append)


def test_nothing_there(web: tuple[str, type[_Handler]], memory: str, tmp_path: Path, said: list[str]) -> None:
    for url in (f"{web[0]}-other", memory):
        with pytest.raises(BaselineError, match=r"There is no file .*manifest.json.*capture CONFIG --push"):
            fetch(RemoteFolder.parse(url), tmp_path, said.append)


def test_pinned_copy_needs_no_network(
    web: tuple[str, type[_Handler]], recorded: Path, tmp_path: Path, said: list[str]
) -> None:
    url, handler = web
    pinned = RemoteFolder.parse(f"{url}#sha256={digest_of(recorded)}")
    first = fetch(pinned, tmp_path, said.append)
    asked = len(handler.requests)
    assert fetch(pinned, tmp_path, said.append) == first
    assert len(handler.requests) == asked


def test_replaced_baseline_breaks_its_pin(
    web: tuple[str, type[_Handler]], tmp_path: Path, said: list[str]
) -> None:
    with pytest.raises(BaselineError, match=r"but the config pins 0000.*Somebody replaced the baseline"):
        fetch(RemoteFolder.parse(f"{web[0]}#sha256={'0' * 64}"), tmp_path, said.append)


def test_damaged_file(recorded: Path, memory: str, tmp_path: Path, said: list[str]) -> None:
    push(recorded, RemoteFolder.parse(memory), said.append)
    system = fsspec.filesystem("memory")
    data = next(name for name in system.ls("/store/base", detail=False) if "data-" in name)
    content = system.cat_file(data)
    system.pipe_file(data, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BaselineError, match=r"is damaged or was replaced meanwhile"):
        fetch(RemoteFolder.parse(memory), tmp_path, said.append)
    system.pipe_file(data, content + b"x" * 10)
    with pytest.raises(BaselineError, match=r"is larger than the"):
        fetch(RemoteFolder.parse(memory), tmp_path, said.append)
    assert not list(tmp_path.rglob("manifest.json")), "a copy without its data does not count as one"


def test_lfs_pointer(memory: str, tmp_path: Path, said: list[str]) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    fsspec.filesystem("memory").pipe_file("/store/base/manifest.json", pointer)
    with pytest.raises(BaselineError, match=r"is a Git LFS pointer.*this URL serves the repository without"):
        fetch(RemoteFolder.parse(memory), tmp_path, said.append)


def test_manifest_cannot_name_a_file_elsewhere(
    recorded: Path, memory: str, tmp_path: Path, said: list[str]
) -> None:
    manifest = (recorded / "manifest.json").read_bytes().replace(b"data-", b"../../x")
    fsspec.filesystem("memory").pipe_file("/store/base/manifest.json", manifest)
    with pytest.raises(BaselineError, match=r"is not a manifest: files"):
        fetch(RemoteFolder.parse(memory), tmp_path, said.append)


def test_accepted_run_follows_the_store(recorded: Path, memory: str, tmp_path: Path, said: list[str]) -> None:
    remote, folder = RemoteFolder.parse(memory).child("accepted/x-1"), tmp_path / "accepted"
    write_recording(folder, make_recording())
    assert fetch_accepted(remote, folder, said.append) is None
    assert not folder.exists(), "what the store does not have is not judged against"
    push(recorded, remote, said.append)
    assert fetch_accepted(remote, folder, said.append) is None
    assert same_files(folder, recorded)


def test_accepted_run_offline(tmp_path: Path, said: list[str]) -> None:
    remote = RemoteFolder.parse("http://127.0.0.1:9/base").child("accepted/x-1")
    note = fetch_accepted(remote, tmp_path / "none", said.append)
    assert note is not None
    assert "cannot be reached" in note
    assert "there is no copy here" in note
    assert said == [note]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://host/base?sig=secret", r"https://host/base: .*cannot end in '\?...'"),
        ("https://host/base#main", "after '#' only sha256="),
        ("https://host/base#sha256=12", "after '#' only sha256="),
    ],
)
def test_urls_that_cannot_be_folders(url: str, message: str) -> None:
    with pytest.raises(BaselineError, match=message) as caught:
        RemoteFolder.parse(url)
    assert "secret" not in str(caught.value)


def test_unknown_scheme(tmp_path: Path, said: list[str]) -> None:
    with pytest.raises(BaselineError, match=r"Protocol not known: nosuch.*Known to fsspec: hf, s3"):
        fetch(RemoteFolder.parse("nosuch://x/y"), tmp_path, said.append)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: list[str]) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(BaselineError, match=r"needs fsspec. Run: pip install 'pytest-quantguard\[remote\]'"):
        fetch(RemoteFolder.parse("https://host/base"), tmp_path, said.append)


def test_what_cannot_be_pushed_to() -> None:
    with pytest.raises(BaselineError, match=r"over https:// files can be read only"):
        check_pushable(RemoteFolder.parse("https://host/base"))
    with pytest.raises(BaselineError, match=r"is pinned by '#sha256='"):
        check_pushable(RemoteFolder.parse(f"memory://base#sha256={'0' * 64}"))


def test_push_that_fails_leaves_the_recording(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, memory: str, said: list[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("quota exceeded")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "pipe_file", refuse)
    with pytest.raises(BaselineError, match=r"quota exceeded. It is whole in .*base"):
        push(recorded, RemoteFolder.parse(memory), said.append)
    read_recording(recorded)
