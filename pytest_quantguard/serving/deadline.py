"""One deadline for a whole HTTP request: connecting, sending, the head of the answer, its body and its end.

`requests` and urllib3 limit the silence between two bytes, so that a server which sends a byte now and then
is waited for without end, and nobody sees the head's bytes come. Here every reading and writing of the socket
gets what is left of the request's time. Knows nothing of what is asked.
"""

from __future__ import annotations

import http.client
import io
import math
import time
from typing import Any

import requests
from requests.adapters import HTTPAdapter


class Deadline:
    """When the request under way must be over. One for each session, which sends one request at a time."""

    def __init__(self) -> None:
        self._at = math.inf

    def start(self, seconds: float) -> None:
        """A request begins, which may take so long."""
        self._at = time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() >= self._at

    def remaining(self) -> float:
        """Seconds that are left. Raises TimeoutError, as a socket does, where none are."""
        seconds = self._at - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the answer did not end in time")
        return seconds


class DeadlineAdapter(HTTPAdapter):
    """Sends requests over connections that keep to `deadline`, through proxies too."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        super().__init__()

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        """Called by the base class once, for direct connections."""
        super().init_poolmanager(*args, **options)
        self._bind(self.poolmanager)

    def proxy_manager_for(self, *args: Any, **options: Any) -> Any:
        """Called by the base class for each proxy."""
        manager = super().proxy_manager_for(*args, **options)
        self._bind(manager)
        return manager

    def _bind(self, manager: Any) -> None:
        manager.pool_classes_by_scheme = {
            scheme: _bound_pool(kind, self._deadline)
            for scheme, kind in manager.pool_classes_by_scheme.items()
        }


def bound_session(deadline: Deadline) -> requests.Session:
    """A session whose requests all keep to `deadline`."""
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, DeadlineAdapter(deadline))
    return session


def _bound_pool(kind: Any, deadline: Deadline) -> Any:
    """The pool class `kind` with connections that keep to `deadline`."""
    return type(kind.__name__, (kind,), {"ConnectionCls": _bound_connection(kind.ConnectionCls, deadline)})


def _bound_connection(kind: Any, deadline: Deadline) -> Any:
    """The connection class `kind`, plain or TLS, whose socket is given no more than the time that is left."""

    class Answer(http.client.HTTPResponse):
        def __init__(self, sock: Any, *args: Any, **options: Any) -> None:
            super().__init__(sock, *args, **options)
            self.fp = io.BufferedReader(_BoundReader(self.fp.detach(), sock, deadline))

    class Connection(kind):  # type: ignore[misc]
        response_class = Answer

        def send(self, data: Any) -> None:
            if self.sock is not None:
                self.sock.settimeout(deadline.remaining())
            super().send(data)

    return Connection


class _BoundReader(io.RawIOBase):
    """What comes from a socket, until the deadline."""

    def __init__(self, raw: Any, sock: Any, deadline: Deadline) -> None:
        self._raw = raw
        self._sock = sock
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._deadline.remaining())
        received: int | None = self._raw.readinto(buffer)
        return received

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()
