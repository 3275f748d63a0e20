"""The file in which a run keeps its finished answers, so that an interrupted one goes on where it was.

JSON lines: a header for each run that wrote, and an answer a line, each flushed when it is there. One process
writes at a time. Its owner removes the file when everything is answered: a later run asks anew.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import IO

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from pytest_quantguard.errors import QuantguardError
from pytest_quantguard.generation.answer import GeneratedAnswer

OLDEST = timedelta(hours=24)
"""Older answers are asked again: a server may be another one without saying so."""


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid")

    run: str
    """Fingerprint of everything that bears on the answers."""
    process: int
    started: AwareDatetime


class ResumeFile:
    """Answers of this run, and those that an interrupted run of the same kind left.

    known: by prompt id. notes: what was taken over or could not be.
    """

    def __init__(self, stream: IO[bytes], path: Path, fingerprint: str, notes: list[str]) -> None:
        self._stream, self._path = stream, path
        self.known: dict[str, GeneratedAnswer] = {}
        self.notes = notes
        self._take_over(fingerprint)
        header = _Header(run=fingerprint, process=os.getpid(), started=datetime.now(timezone.utc))
        self._write(header)

    def keep(self, answer: GeneratedAnswer) -> None:
        """Add an answer; raises QuantguardError where the disk refuses."""
        self._write(answer)

    def _take_over(self, fingerprint: str) -> None:
        """Read what is usable, and cut the rest off the end."""
        self._stream.seek(0)
        header: _Header | None = None
        damaged = 0
        whole = 0
        for line in self._stream:
            if not line.endswith(b"\n"):
                break  # Its writer was ended while it wrote.
            whole += len(line)
            try:
                header = _Header.model_validate_json(line)
                continue
            except ValidationError:
                pass
            try:
                answer = GeneratedAnswer.model_validate_json(line)
            except ValidationError:
                damaged += 1
                continue
            if header is not None and _fits(header, fingerprint):
                self.known[answer.id] = answer
        self._stream.seek(whole if self.known else 0)
        self._stream.truncate()
        if damaged:
            self.notes.append(f"{self._path.name}: {damaged} lines could not be read and are asked again")
        if self.known and header is not None:
            when = f"{header.started:%Y-%m-%d %H:%M} UTC"
            self.notes.append(
                f"{len(self.known)} generated answers were taken over from the interrupted run of {when} "
                "(generation.resume: false asks anew)"
            )

    def _write(self, record: BaseModel) -> None:
        with explained(self._path):
            try:
                self._stream.write(record.model_dump_json().encode() + b"\n")
                self._stream.flush()
            except OSError:
                with suppress(OSError):
                    self._stream.close()  # Later it would try the same again, where nobody explains it.
                raise


@contextmanager
def open_resume_file(path: Path, fingerprint: str, *, take_over: bool) -> Iterator[ResumeFile]:
    """Open or create the file, for this process alone.

    fingerprint: answers of a run with another one are dropped; take_over False drops all. Raises
    QuantguardError where another process is writing it, or where it cannot be written.
    """
    notes: list[str] = []
    with _locked(path, notes) as stream:
        if not take_over:
            stream.truncate(0)
        yield ResumeFile(stream, path, fingerprint, notes)


@contextmanager
def _locked(path: Path, notes: list[str]) -> Iterator[IO[bytes]]:
    while True:
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            stream = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
        with stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise QuantguardError(_explain_busy(stream, path)) from None
                notes.append(
                    f"{path}: no locks on this file system: one run at a time in this folder, please"
                )
            if os.fstat(stream.fileno()).st_nlink == 0:
                continue  # Its owner finished and removed it between our opening and our lock.
            yield stream
            return


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """An OSError becomes a sentence."""
    try:
        yield
    except OSError as error:
        raise QuantguardError(
            f"Generated answers could not be kept in {path}: {error.strerror or error}. Make room or give "
            "permission there, or choose another folder with --quantguard-output=DIR."
        ) from error


def _fits(header: _Header, fingerprint: str) -> bool:
    return header.run == fingerprint and datetime.now(timezone.utc) - header.started < OLDEST


def _explain_busy(stream: IO[bytes], path: Path) -> str:
    who = ""
    for line in stream:
        try:
            who = f" (process {_Header.model_validate_json(line).process})"
        except ValidationError:
            continue
    return (
        f"Another run{who} is writing its generated answers to {path}. Wait until it is done, or give this "
        "one a folder of its own with --quantguard-output=DIR."
    )
