from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from pytest_quantguard.baseline import store
from pytest_quantguard.baseline.manifest import ModelRecord
from pytest_quantguard.baseline.recording import Recording
from pytest_quantguard.baseline.store import (
    accepted_path,
    read_attachment,
    read_manifest,
    read_recording,
    write_attachment,
    write_recording,
)
from pytest_quantguard.errors import BaselineError

from .samples import KEYS, assert_same_cells, make_recording


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "baselines" / "sample"
    write_recording(path, make_recording())
    return path


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = orjson.loads((path / "manifest.json").read_bytes())
    change(manifest)
    (path / "manifest.json").write_bytes(orjson.dumps(manifest))


def data_file(path: Path) -> Path:
    (file,) = path.glob("data-*")
    return file


def fingerprint(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}


def test_a_recording_comes_back(stored: Path) -> None:
    written, read = make_recording(), read_recording(stored)
    assert_same_cells(dict(written.cells), dict(read.cells))
    assert read.noise_floor == written.noise_floor
    assert read.positions == 30
    for before, after in zip(written.prompts, read.prompts, strict=True):
        assert before.token_ids.tolist() == after.token_ids.tolist()
        assert (before.id, before.task, before.prompt_tokens, before.span_start) == (
            after.id,
            after.task,
            after.prompt_tokens,
            after.span_start,
        )
    assert read.manifest.model_copy(update={"files": {}, "noise_floor": {}}) == written.manifest
    for name, record in read.manifest.files.items():
        assert record.sha256 == hashlib.sha256((stored / name).read_bytes()).hexdigest()


def test_a_new_recording_replaces_the_old_whole(stored: Path) -> None:
    (stored / "README.md").write_text("a user's own note", encoding="utf-8")
    write_attachment(stored, "generation", b"[]")
    new = make_recording(seed=1, count=3)
    write_recording(stored, new)
    assert_same_cells(dict(new.cells), dict(read_recording(stored).cells))
    assert {file.name.split("-")[0] for file in stored.iterdir()} == {
        "README.md",
        "manifest.json",
        "data",
        "prompts",
    }
    assert read_attachment(stored, "generation") is None


def test_the_same_recording_gives_the_same_files(stored: Path, tmp_path: Path) -> None:
    write_recording(tmp_path / "again", make_recording())
    assert fingerprint(stored) == fingerprint(tmp_path / "again")


def test_secrets_are_not_written(tmp_path: Path) -> None:
    recording = make_recording()
    server = recording.manifest.server.model_validate(
        {
            "backend": "sglang",
            "kind": "sglang",
            "arguments": {
                "api_key": "s3cr3t",
                "inner": {"hf_token": "s3cr3t"},
                "tokenizer_path": "x",
                "admin_api_key": None,
            },
        }
    )
    manifest = recording.manifest.model_copy(update={"server": server})
    write_recording(
        tmp_path / "r", Recording(manifest, recording.prompts, recording.cells, recording.noise_floor)
    )
    assert b"s3cr3t" not in (tmp_path / "r" / "manifest.json").read_bytes()
    assert read_manifest(tmp_path / "r").server.arguments == {
        "api_key": "***",
        "inner": {"hf_token": "***"},
        "tokenizer_path": "x",
        "admin_api_key": None,
    }


# --- bad input ---


def expect(path: Path, *parts: str) -> None:
    with pytest.raises(BaselineError) as caught:
        read_recording(path)
    message = str(caught.value)
    assert str(path) in message
    for part in parts:
        assert part in message


def test_no_folder(tmp_path: Path) -> None:
    expect(tmp_path / "none", "There is no recording at", "quantguard capture CONFIG")


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "baseline"
    path.write_text("", encoding="utf-8")
    expect(path, "is a file, but a recording is a folder")
    with pytest.raises(BaselineError, match="is a file, but a recording is a folder"):
        write_recording(path, make_recording())
    assert path.read_text(encoding="utf-8") == ""


def test_an_interrupted_capture(stored: Path) -> None:
    (stored / "manifest.json").unlink()
    expect(stored, "has no manifest.json", "interrupted", "quantguard capture CONFIG")


@pytest.mark.parametrize("name", ["data-", "prompts-"])
def test_a_damaged_file(stored: Path, name: str) -> None:
    (file,) = stored.glob(f"{name}*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    expect(stored, file.name, "is damaged: SHA-256", "Restore the folder from version control")


def test_a_truncated_file(stored: Path) -> None:
    file = data_file(stored)
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:100])
    expect(stored, f"is damaged: {size} bytes expected, 100 found")


def test_a_file_with_something_appended(stored: Path) -> None:
    file = data_file(stored)
    file.write_bytes(file.read_bytes() + b"x")
    expect(stored, "bytes expected, more found")


def test_a_missing_file(stored: Path) -> None:
    data_file(stored).unlink()
    expect(stored, "data-", "is missing, though", "manifest.json names it")


def test_a_file_that_cannot_be_read(stored: Path) -> None:
    file = data_file(stored)
    file.unlink()
    file.mkdir()
    expect(stored, "data-", "cannot be read: Is a directory")


def test_git_lfs_pointers_are_explained(stored: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456\n"
    file = data_file(stored)
    file.write_bytes(pointer)
    expect(stored, "Git LFS pointer", "git lfs pull", "lfs: true")
    (stored / "manifest.json").write_bytes(pointer)
    expect(stored, "manifest.json is a Git LFS pointer")


def test_a_newer_format(stored: Path) -> None:
    edit_manifest(stored, lambda manifest: manifest.update(format_version=7, brand_new_key=1))
    expect(stored, "format version 7", "reads up to 1", "pip install -U pytest-quantguard")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("suite"), "suite: Field required"),
        (lambda m: m.update(colour="red"), "colour: Extra inputs are not permitted"),
        (lambda m: m["suite"].update(prompt_count=6), "suite.prompt_count is 6, the data has 5"),
        (lambda m: m["suite"].update(width=7), "suite.width is 7, the data has 32"),
        (lambda m: m["suite"].update(batch_sizes=[1]), "suite.phases x suite.batch_sizes"),
        (lambda m: m["suite"].update(prompts_digest="0" * 64), "suite.prompts_digest is 0000"),
        (lambda m: m["model"].update(vocab_size=5), "model.vocab_size is 5, the data has 4000"),
        (lambda m: m["noise_floor"].update({"decode-bs9": {}}), "a noise floor of decode-bs9"),
        (lambda m: m.update(files={}), "names 0 files prompts-*, expected one"),
        (lambda m: m.update(format_version="one"), "format_version: Input should be 1"),
        (lambda m: m.update(kind="draft"), "kind: Input should be 'baseline' or 'accepted'"),
    ],
)
def test_manifests_that_do_not_fit(
    stored: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit_manifest(stored, change)
    expect(stored, "manifest.json", message)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1]", b"null"])
def test_a_manifest_that_is_none(stored: Path, content: bytes) -> None:
    (stored / "manifest.json").write_bytes(content)
    expect(stored, "manifest.json is not")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ".hidden", "x\u0000y", ""])
def test_file_names_that_lead_out_of_the_folder(stored: Path, name: str) -> None:
    (stored.parent / "secret").write_text("private", encoding="utf-8")
    record = {"sha256": hashlib.sha256(b"private").hexdigest(), "size": 7}
    edit_manifest(stored, lambda manifest: manifest["files"].update({name: record}))
    expect(stored, "is not a manifest: files")


def test_prompts_that_do_not_fit(stored: Path) -> None:
    def replace_prompts(content: bytes) -> None:
        def change(manifest: dict[str, Any]) -> None:
            files = {name: record for name, record in manifest["files"].items() if "prompts" not in name}
            files["prompts-x"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
            manifest["files"] = files

        (stored / "prompts-x").write_bytes(content)
        edit_manifest(stored, change)

    (file,) = stored.glob("prompts-*")
    prompts = orjson.loads(file.read_bytes())
    replace_prompts(b'[{"id": 5}]')
    expect(stored, "The prompts of", "not in this package's format")
    replace_prompts(orjson.dumps([{**prompt, "token_ids": [2**40]} for prompt in prompts]))
    expect(stored, "The prompts of", "not in this package's format")
    replace_prompts(orjson.dumps([{**prompt, "span_start": prompt["span_start"] + 1} for prompt in prompts]))
    expect(stored, "scored spans")
    replace_prompts(orjson.dumps([{**prompt, "prompt_tokens": 10**6} for prompt in prompts]))
    expect(stored, "prompt p0: its span or length lies outside its")


# --- writing under trouble ---


@pytest.mark.parametrize("failing_call", [1, 2, 3, 4])
def test_a_full_disk_leaves_the_old_recording(
    stored: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    """With what is attached to it, and without what was written of the new one."""
    write_attachment(stored, "generation", b"[1]")
    before = fingerprint(stored)
    calls = 0

    def full(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls == failing_call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(BaselineError, match=r"No space left on device.*is unchanged"):
        write_recording(stored, make_recording(seed=1), {"generation": b"[2]"})
    assert fingerprint(stored) == before
    assert read_attachment(stored, "generation") == b"[1]"
    assert_same_cells(dict(make_recording().cells), dict(read_recording(stored).cells))


def test_attachments_come_with_the_recording(stored: Path) -> None:
    write_attachment(stored, "speed", b"[1]")
    write_recording(stored, make_recording(seed=1), {"generation": b"[2]"})
    assert read_attachment(stored, "generation") == b"[2]"
    assert read_attachment(stored, "speed") is None
    assert len(list(stored.iterdir())) == 4
    for name in ("data", "prompts", "Upper", "../x", ""):
        with pytest.raises(ValueError, match="cannot be the name of an attachment"):
            write_recording(stored, make_recording(), {name: b"[]"})


def test_a_full_disk_leaves_no_half_new_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(BaselineError, match="No space left on device"):
        write_recording(tmp_path / "new", make_recording())
    assert not (tmp_path / "new").exists()


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(BaselineError, match=r"could not be written to .*file/new: Not a directory"):
        write_recording(tmp_path / "file" / "new", make_recording())


def test_leftovers_of_a_killed_writer_are_removed(stored: Path) -> None:
    (stored / ".tmp-abc").write_text("half", encoding="utf-8")
    (stored / "data-0123456789abcdef.qglp").write_text("old", encoding="utf-8")
    write_recording(stored, make_recording())
    assert len(list(stored.iterdir())) == 3


def _write_often(path: Path, seed: int, times: int) -> None:
    recording = make_recording(seed=seed)
    for _ in range(times):
        write_recording(path, recording)


def test_writers_and_readers_at_once(stored: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_often, args=(stored, seed, 8)) for seed in (0, 1, 2)]
    for writer in writers:
        writer.start()
    valid = {read_prompt_digest(make_recording(seed=seed)) for seed in (0, 1, 2)}
    reads = 0
    while any(writer.is_alive() for writer in writers):
        assert read_prompt_digest(read_recording(stored)) in valid
        reads += 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert reads > 0
    assert len(list(stored.iterdir())) == 3
    assert read_prompt_digest(read_recording(stored)) in valid


def read_prompt_digest(recording: Recording) -> str:
    return recording.manifest.suite.prompts_digest


def test_without_locks_nothing_of_others_is_removed(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(store.fcntl, "flock", refuse)
    before = set(stored.iterdir())
    write_recording(stored, make_recording(seed=1))
    assert before <= set(stored.iterdir())
    read_recording(stored)


# --- attachments and accepted runs ---


def test_attachments(stored: Path) -> None:
    assert read_attachment(stored, "generation") is None
    write_attachment(stored, "generation", b'{"answers": []}')
    write_attachment(stored, "generation", b'{"answers": [1]}')
    assert read_attachment(stored, "generation") == b'{"answers": [1]}'
    assert_same_cells(dict(make_recording().cells), dict(read_recording(stored).cells))
    (file,) = stored.glob("generation-*")
    file.write_bytes(b'{"answers": [2]}')
    with pytest.raises(BaselineError, match="is damaged"):
        read_attachment(stored, "generation")
    expect(stored, "is damaged")


@pytest.mark.parametrize("name", ["data", "prompts", "../x", "Upper", ""])
def test_attachments_have_plain_names(stored: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name of an attachment"):
        write_attachment(stored, name, b"{}")


def test_an_attachment_needs_a_recording(tmp_path: Path) -> None:
    with pytest.raises(BaselineError, match="There is no recording at"):
        write_attachment(tmp_path / "none", "generation", b"{}")


def test_accepted_runs_are_kept_apart_by_what_was_quantized(stored: Path) -> None:
    def place(**changes: Any) -> Path:
        model = {
            "model_path": "org/Qwen3-8B",
            "quantization": "nvfp4",
            "kv_cache_dtype": "fp8_e4m3",
            "vocab_size": 9,
        }
        return accepted_path(stored, ModelRecord(**{**model, **changes}))

    assert place().parent == stored / "accepted"
    assert place().name.startswith("qwen3-8b-nvfp4-fp8-e4m3-")
    assert place() == place()
    others = [
        place(model_path="other/Qwen3-8B"),
        place(quantization="fp8"),
        place(kv_cache_dtype="auto"),
        place(quantization={"*": "nvfp4", "lm_head": "bf16"}),
        place(quantization=None),
        place(revision="abc"),
        place(model_path="../../etc"),
    ]
    assert len({place(), *others}) == len(others) + 1
    assert all(other.parent == stored / "accepted" for other in others)
    write_recording(place(), make_recording())
    write_recording(stored, make_recording(seed=1))
    assert read_recording(place()).positions == 30


def test_a_recording_can_be_moved(stored: Path, tmp_path: Path) -> None:
    shutil.move(stored, tmp_path / "moved")
    assert_same_cells(dict(make_recording().cells), dict(read_recording(tmp_path / "moved").cells))


def test_cells_are_those_asked_for(stored: Path) -> None:
    assert list(read_recording(stored).cells) == list(KEYS)
