"""One way to write a file: whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pytest_quantguard.whole_files import replace_file


def test_a_file_is_made_with_its_folder_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    for content in (b"old", b"", b"new"):
        replace_file(path, content)
        assert path.read_bytes() == content
    assert path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(path.parent) == ["file.json"]  # noqa: PTH208 - names only


@pytest.mark.parametrize("ending", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_what_fails_half_way_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: BaseException, step: str
) -> None:
    path = tmp_path / "file.json"
    replace_file(path, b"old")

    def fail(*_: object) -> None:
        raise ending

    if step == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(type(ending)):
        replace_file(path, b"new", durable=True)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file.json"]  # noqa: PTH208 - names only


def test_only_what_must_outlive_a_power_failure_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    replace_file(tmp_path / "report.html", b"x")
    assert synced == []
    replace_file(tmp_path / "manifest.json", b"x", durable=True)
    assert len(synced) == 1
