"""A TCP port of this machine that is ours until the server takes it, and who has one that is taken."""

from __future__ import annotations

import contextlib
import socket
from types import TracebackType

import psutil

from pytest_quantguard.errors import ServerStartError

HOST = "127.0.0.1"


class HeldPort:
    """A bound port that nobody listens on.

    As both sockets ask for SO_REUSEADDR, the server may bind and listen while we hold the port, and the
    kernel gives it to nobody else who asks for a free one.
    """

    def __init__(self, port: int | None) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((HOST, port or 0))
        except OSError as error:
            self._socket.close()
            raise ServerStartError(f"port {port} cannot be used: {error.strerror}{_by_whom(port)}") from error
        self.port: int = self._socket.getsockname()[1]
        if port is not None and answers(port):
            self.release()
            raise ServerStartError(
                f"port {port} is already in use{_by_whom(port)}. A server there would answer in place of "
                "ours; "
                "end it, or leave `port` out to have a free one chosen"
            )

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Let go of the port. May be called twice."""
        self._socket.close()


def answers(port: int) -> bool:
    """Whether something listens on the port."""
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


def listener_of(port: int) -> psutil.Process | None:
    """The process that listens on the port, where this user may see it."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,)
            if listens and connection.pid is not None:
                return psutil.Process(connection.pid)
    return None


def _by_whom(port: int | None) -> str:
    process = listener_of(port) if port else None
    if process is None:
        return ""
    with contextlib.suppress(psutil.Error):
        return f" by process {process.pid} ({' '.join(process.cmdline())[:200]})"
    return f" by process {process.pid}"
