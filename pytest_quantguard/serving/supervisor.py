"""A small process between pytest and a server: whatever becomes of pytest, the server's tree is stopped.

    python -m pytest_quantguard.serving.supervisor

Its standard input is the lifeline. The first line is the order (JSON: command, env, cwd, log, grace); when
the input ends, because pytest closed it or is gone (`kill -9` too), the tree is stopped. Its standard
output tells, as lines of JSON, what happened: {"started": pid}, {"failed": reason}, {"exited": code},
{"stopped": [pids]}.

It is the subreaper of everything below it (Linux), so that a server's orphaned children come to it and not to
process 1, where nobody would find them. It imports nothing of the server or of pytest.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

import psutil

POLL_SECONDS = 0.2
AFTER_EXIT_GRACE = 2.0
"""Seconds that the children of a server which has ended get to end too."""
MASK = "***"
PIECE_BYTES = 1 << 20
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class Tree:
    """All processes that descend from one, seen now or at any time before (they may have been orphaned)."""

    def __init__(self, root: psutil.Process) -> None:
        self._root = root
        self._seen: dict[int, psutil.Process] = {}

    def observe(self) -> list[psutil.Process]:
        """Remember the descendants of now; return all that were ever seen and still live."""
        with contextlib.suppress(psutil.Error):
            for process in self._root.children(recursive=True):
                self._seen.setdefault(process.pid, process)
        for pid in [pid for pid, process in self._seen.items() if not _alive(process)]:
            del self._seen[pid]
        return list(self._seen.values())

    def stop(self, main: int | None, grace: float, reap: Callable[[], object]) -> list[int]:
        """Ask `main` to end; once it has, or after `grace` seconds, ask the others; kill what is left.

        Returns the killed pids. reap: called often, to collect ended children.
        """
        if main is not None:
            _signal([process for process in self.observe() if process.pid == main], signal.SIGTERM)
            self._wait(grace, reap, lambda living: all(process.pid != main for process in living))
        _signal(self.observe(), signal.SIGTERM)
        self._wait(AFTER_EXIT_GRACE, reap, lambda living: not living)
        return self._kill(reap)

    def _wait(
        self, seconds: float, reap: Callable[[], object], done: Callable[[list[psutil.Process]], bool]
    ) -> None:
        deadline = time.monotonic() + seconds
        while not done(self.observe()) and time.monotonic() < deadline:
            reap()
            time.sleep(0.02)

    def _kill(self, reap: Callable[[], object]) -> list[int]:
        killed: dict[int, None] = {}
        for _ in range(500):  # a dying process may still have forked
            living = self.observe()
            if not living:
                break
            _signal(living, signal.SIGKILL)
            killed |= dict.fromkeys(process.pid for process in living)
            reap()
            time.sleep(0.02)
        return list(killed)


def main() -> int:
    """Run one order to its end."""
    order = sys.stdin.buffer.readline()
    if not order.strip():
        return 0  # pytest was gone before it had said what to do
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C is pytest's; it decides when the server ends
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    return Supervisor(json.loads(order)).run()


class Supervisor:
    """Starts the server, watches it and the lifeline, stops the tree."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._parent = os.getppid()
        self._tree = Tree(psutil.Process())
        self._exit_code: int | None = None
        self._asked_to_stop = False

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            self._main = self._spawn()
        except OSError as error:
            _tell({"failed": f"{error.strerror}: {error.filename or self._order['command'][0]}"})
            return 1
        _tell({"started": self._main})
        while not self._asked_to_stop and self._exit_code is None and not self._lifeline_ended():
            self._tree.observe()
            self._reap()
        if self._exit_code is not None:
            _tell({"exited": self._exit_code})
            killed = self._tree.stop(None, AFTER_EXIT_GRACE, self._reap)
        else:
            killed = self._tree.stop(self._main, float(self._order["grace"]), self._reap)
        self._reap()
        mask_file(self._order["log"], self._order["secrets"])
        _tell({"stopped": killed})
        return 0

    def _spawn(self) -> int:
        with open(self._order["log"], "ab", buffering=0) as log:  # noqa: PTH123 (unbuffered, appended)
            process = subprocess.Popen(
                self._order["command"],
                env=self._order["env"],
                cwd=self._order["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # this process has one thread
            )
        process.returncode = 0  # its status is collected by _reap, not by Popen
        return process.pid

    def _lifeline_ended(self) -> bool:
        readable, _, _ = select.select([sys.stdin.buffer], [], [], POLL_SECONDS)
        if readable and not os.read(sys.stdin.fileno(), 1):
            return True
        # A forked child of pytest may hold the other end of the pipe open; the parent's death shows here too.
        return os.getppid() != self._parent

    def _reap(self) -> None:
        """Collect every child that ended: the server's main process and the orphans that came to us."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._main:
                self._exit_code = os.waitstatus_to_exitcode(status)

    def _on_sigterm(self, *_: object) -> None:
        self._asked_to_stop = True


def mask_file(path: str, secrets: Iterable[str]) -> None:
    """Replace every secret in a file that nobody writes any more; none of it where it is gone.

    In place and piece by piece: a log may be larger than the memory, or have filled the disk.
    """
    words = sorted({secret.encode() for secret in secrets if secret}, key=len, reverse=True)
    if not words:
        return
    pattern = re.compile(b"|".join(map(re.escape, words)))
    with contextlib.suppress(FileNotFoundError), Path(path).open("r+b") as file:
        read = written = 0
        rest = b""
        while piece := _read_at(file, read):
            read += len(piece)
            data = rest + piece
            # What begins further behind may be the beginning of a longer secret.
            masked, rest = _masked(data, pattern, max(len(data) - len(words[0]) + 1, 0))
            written += _write_at(file, written, masked)
        masked, _ = _masked(rest, pattern, len(rest))
        written += _write_at(file, written, masked)
        if written != read:
            file.truncate(written)


def _masked(data: bytes, pattern: re.Pattern[bytes], before: int) -> tuple[bytes, bytes]:
    """`data` with the secrets that begin before that place replaced, and its end, which was not looked at."""
    done, at = [], 0
    for found in pattern.finditer(data):
        if found.start() >= before:
            break
        done += [data[at : found.start()], MASK.encode()[: len(found[0])]]
        at = found.end()
    cut = max(at, before)
    return b"".join([*done, data[at:cut]]), data[cut:]


def _read_at(file: IO[bytes], offset: int) -> bytes:
    file.seek(offset)
    return file.read(PIECE_BYTES)


def _write_at(file: IO[bytes], offset: int, content: bytes) -> int:
    """Write where it differs; the number of bytes."""
    file.seek(offset)
    if file.read(len(content)) != content:
        file.seek(offset)
        file.write(content)
    return len(content)


def _alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie does not, and a reused pid is another process."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _signal(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _tell(event: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more: the work is done all the same
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()


def _prctl(option: int, value: int) -> None:
    """Linux's prctl; elsewhere the children seen during life are all that is known of the tree."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
