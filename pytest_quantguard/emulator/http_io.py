"""Reading requests and writing responses: limits, JSON, server-sent events, clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pytest_quantguard.emulator.protocol import HttpError, rejected, schema_error

MAX_BODY_BYTES = 64 << 20
"""A batch of 64 prompts of 32k tokens is about 14 MB of JSON."""
BODY_SECONDS = 30.0
"""How long a client may pause while it sends a body."""

Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client closed the connection before its answer was ready."""


async def read_json(request: Request, *, optional: bool = False) -> Any:
    """The decoded body. optional: an empty body is an empty object.

    Raises HttpError: 413 above MAX_BODY_BYTES, 408 for a client that stops sending, 400 for what is no JSON.
    """
    body = await read_body(request)
    if optional and not body:
        return {}
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise schema_error(None, f"JSON decode error: {error}") from error


async def read_body(request: Request) -> bytes:
    """The raw body, bounded in size and in time."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise too_large()
    body = bytearray()
    chunks = request.stream()
    while True:
        try:
            body += await asyncio.wait_for(anext(chunks), BODY_SECONDS)
        except StopAsyncIteration:
            return bytes(body)
        except asyncio.TimeoutError as error:
            raise rejected(f"the request body stopped for {BODY_SECONDS:.0f} s", status=408) from error
        except ClientDisconnect as error:
            raise ClientGoneError from error
        if len(body) > MAX_BODY_BYTES:
            raise too_large()


def too_large() -> HttpError:
    """The answer to a body beyond the limit."""
    return rejected(f"the request body is larger than {MAX_BODY_BYTES >> 20} MiB", status=413)


def json_response(content: Any, status: int = 200) -> Response:
    """A response with a JSON body; Python values and orjson fragments alike."""
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


def error_response(error: HttpError) -> Response:
    """An error's status and body."""
    return json_response(error.body, error.status)


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def guarded_events(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A stream that ends well: a refusal becomes an event, as in SGLang, and [DONE] follows."""
    try:
        async for chunk in events:
            yield chunk
    except HttpError as error:
        details = {
            "message": str(error),
            "type": "invalid_request_error",
            "code": error.status,
            "retryable": False,
        }
        yield event({"error": details})
    yield DONE


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`, but cancel it and raise ClientGoneError when the client closes the connection."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def disconnected(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
