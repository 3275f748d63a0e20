"""Uvicorn's HTTP/1.1 protocol with a limit on how long a client may take to send a request's head."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0


class BoundedHttpProtocol(H11Protocol):
    """Closes connections that brought no request within HEAD_SECONDS; later ones fall under keep-alive."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        asyncio.get_running_loop().call_later(HEAD_SECONDS, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if cast(Any, self).cycle is None:
            self.transport.close()
