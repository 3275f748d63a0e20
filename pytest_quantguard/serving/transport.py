"""HTTP to one server: URL rules, pooled connections, deadlines, retries, and what went wrong in words.

It knows status codes and the three shapes of SGLang's error bodies, and nothing of prompts or
log-probabilities.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import orjson
import requests
import urllib3

from pytest_quantguard.errors import (
    ConfigError,
    InvalidAnswerError,
    RequestRejectedError,
    ServerDiedError,
    ServerError,
)
from pytest_quantguard.serving.deadline import Deadline, bound_session

CONNECT_TIMEOUT = 10.0
RETRY_SECONDS = 10.0
"""How long a refused connection or a 503 is tried again: nothing was processed, so nothing can be doubled."""
IDLE_SECONDS = 2.0
"""Servers close idle connections (uvicorn after 5 s); one that idled longer is not used again, so that a
dropped connection always means that the server dropped the request."""
CHUNK_BYTES = 1 << 20
PROBE_BYTES = 1 << 26
"""Of what a server says of itself; SGLang's /openapi.json has some hundred kB."""
ERROR_BYTES = 1 << 20
"""So much of an error's text is read."""
SHOWN_ERROR = 2000
"""Characters of it that are told."""
DEATH_SECONDS = 3.0
"""How long a server that dropped a connection is given to end, so that its end can be reported too."""


def normalize_url(url: str) -> str:
    """The URL without a trailing slash. Raises ConfigError for anything but http(s)://host[:port][/path]."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(
            f"url {url!r} cannot be read: {error}; an IPv6 address is written http://[::1]:30000"
        ) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"url {url!r} must begin with http:// or https:// and name a host; did you mean 'http://{url}'?"
        )
    if parts.username or parts.password:
        raise ConfigError("url must not hold a user name or password; use api_key: ${NAME}")
    if parts.query or parts.fragment:
        raise ConfigError(f"url {url!r} must end with the path; routes such as /generate are added to it")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    netloc = host if port is None else f"{host}:{port}"
    return f"{parts.scheme}://{netloc}{parts.path.rstrip('/')}"


def is_loopback(url: str) -> bool:
    """Whether the host is this machine, by name or address."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def error_text(body: bytes) -> str:
    """The message of an error body: {"error": {"message"}}, {"error": "..."}, {"object": "error", "message"},
    FastAPI's {"detail"}, or plain text."""
    text = body.decode(errors="replace").strip()
    payload_text = text.removeprefix("data:").strip()
    try:
        payload = orjson.loads(payload_text)
    except orjson.JSONDecodeError:
        payload = None
    if isinstance(payload, dict):
        error = payload.get("error")
        named = error.get("message") if isinstance(error, dict) else None
        for value in (named, error, payload.get("message"), payload.get("detail")):
            if value:
                return str(value)[:SHOWN_ERROR]
    return text[:SHOWN_ERROR] or "no message"


class StatusError(RequestRejectedError):
    """An error status, kept for callers that try another route."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class NoAnswerInTimeError(ServerError):
    """The server did not answer before the request's deadline."""


class _BearerAuth(requests.auth.AuthBase):
    """Sets the header last, so that a ~/.netrc entry of the host cannot replace it."""

    def __init__(self, api_key: str | None) -> None:
        self._api_key = api_key

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._api_key is not None:
            request.headers["Authorization"] = f"Bearer {self._api_key}"
        return request


class Transport:
    """Sends requests to one server. Not thread-safe: one per thread."""

    def __init__(self, url: str, *, api_key: str | None = None, request_timeout: float = 600) -> None:
        self.url = normalize_url(url)
        self.request_timeout = request_timeout
        self.explain_death: Callable[[float], str | None] | None = None
        """Set by who started the server: what became of its process; None if it still runs after that many
        seconds."""
        self._api_key = api_key
        self._last_used = 0.0
        self._deadline = Deadline()
        self._session = bound_session(self._deadline)
        self._session.auth = _BearerAuth(api_key)
        self._session.headers["Accept-Encoding"] = "identity"
        if is_loopback(self.url):
            self._session.trust_env = False  # a proxy of the environment cannot reach this machine's loopback

    def close(self) -> None:
        self._session.close()

    def sibling(self, *, request_timeout: float | None = None) -> Transport:
        """Another transport to the same server, for another thread."""
        other = Transport(
            self.url,
            api_key=self._api_key,
            request_timeout=self.request_timeout if request_timeout is None else request_timeout,
        )
        other.explain_death = self.explain_death
        return other

    def post(
        self, route: str, payload: Any, *, what: str, timeout: float | None = None, limit: int = PROBE_BYTES
    ) -> bytes:
        """Body of a 200 answer of at most `limit` bytes.

        `what` says in messages what the request was. timeout: seconds from sending to the answer's last byte.
        Raises the ServerErrors.
        """
        return self._send("POST", route, orjson.dumps(payload), what, timeout, limit)

    def get(self, route: str, *, timeout: float | None = None) -> bytes:
        """Body of a 200 answer."""
        return self._send("GET", route, None, f"GET {route}", timeout, PROBE_BYTES)

    def probe(self, route: str, *, timeout: float) -> tuple[int, bytes] | None:
        """Status and body without retries and without judging them; None where no whole answer came in time.

        Of an endless body the first PROBE_BYTES. Raises InvalidAnswerError for one that is packed.
        """
        self._deadline.start(timeout)
        try:
            response = self._session.get(
                self.url + route,
                timeout=(min(timeout, CONNECT_TIMEOUT), timeout),
                allow_redirects=False,
                stream=True,
            )
            with response:
                self._refuse_packed(response, f"GET {route}")
                return response.status_code, _read(response, self._deadline, most=PROBE_BYTES)
        except (requests.RequestException, UnicodeError):
            return None

    def _send(
        self, method: str, route: str, data: bytes | None, what: str, timeout: float | None, limit: int
    ) -> bytes:
        seconds = self.request_timeout if timeout is None else timeout
        self._deadline.start(seconds)
        retry_until = time.monotonic() + min(RETRY_SECONDS, seconds)
        for wait in backoff():
            with self._translated(what, seconds):
                status, body = self._once(method, route, data, what, limit)
            refused = status is None
            if not refused and status != 503:
                assert status is not None
                return self.accept(status, body, route, what)
            if time.monotonic() + wait > retry_until or self._death() is not None:
                break
            time.sleep(wait)
        if status == 503:
            raise RequestRejectedError(
                f"{what}: {self.url} answered 503 for {RETRY_SECONDS:g} s: {error_text(body)}"
            )
        raise ServerDiedError(
            f"{what}: nothing listens at {self.url} (connection refused){self._death_note()}"
        )

    def _once(
        self, method: str, route: str, data: bytes | None, what: str, limit: int
    ) -> tuple[int | None, bytes]:
        """Status and body; status None when the connection was refused, so that nothing was sent."""
        if time.monotonic() - self._last_used > IDLE_SECONDS:
            self._session.close()
        remaining = self._deadline.remaining()
        try:
            response = self._session.request(
                method,
                self.url + route,
                data=data,
                headers={"Content-Type": "application/json"} if data is not None else None,
                timeout=(min(CONNECT_TIMEOUT, remaining), remaining),
                allow_redirects=False,
                stream=True,
            )
            with response:
                if response.status_code != 200:
                    return response.status_code, _read(response, self._deadline, most=ERROR_BYTES)
                self._refuse_packed(response, what)
                announced = response.headers.get("Content-Length", "")
                if announced.isdecimal() and (len(announced) > 18 or int(announced) > limit):
                    raise self._too_long(what, limit, f", it announces {announced[:30]} bytes")
                body = _read(response, self._deadline, most=limit + 1)
            if len(body) > limit:
                raise self._too_long(what, limit)
            return 200, body
        except requests.ConnectionError as error:
            if _was_refused(error):
                return None, b""
            raise
        finally:
            self._last_used = time.monotonic()

    def _refuse_packed(self, response: requests.Response, what: str) -> None:
        """Raise InvalidAnswerError for a compressed answer: unpacked it may have any size."""
        packed = response.headers.get("Content-Encoding", "").strip().lower()
        if packed not in ("", "identity"):
            raise InvalidAnswerError(
                f"{what}: {self.url} sent its answer as {packed[:40]!r} although 'identity' was asked for; "
                "unpacked it may have any size. Switch compression off in what stands before the server (a "
                "proxy, a gateway)"
            )

    def _too_long(self, what: str, limit: int, found: str = "") -> InvalidAnswerError:
        return InvalidAnswerError(
            f"{what}: the answer of {self.url} is too long: at most {limit / 1e6:.0f} MB can come of "
            f"this{found}; is it SGLang, and does it heed logprob_start_len and top_logprobs_num?"
        )

    @contextmanager
    def _translated(self, what: str, seconds: float) -> Iterator[None]:
        """Turn what `requests` raises into sentences."""
        try:
            yield
        except requests.exceptions.SSLError as error:
            raise ServerError(
                f"{what}: no TLS connection to {self.url}; does it speak plain http? ({error})"
            ) from error
        except requests.exceptions.ProxyError as error:
            raise ServerError(
                f"{what}: the proxy of the environment failed for {self.url}: {error}"
            ) from error
        except requests.exceptions.ConnectTimeout as error:
            raise NoAnswerInTimeError(
                f"{what}: no connection to {self.url} within {min(CONNECT_TIMEOUT, seconds):g} s"
                f"{self._death_note()}"
            ) from error
        except (requests.Timeout, TimeoutError) as error:
            raise self._too_late(what, seconds) from error
        except requests.RequestException as error:
            if _never_connected(error):
                raise ServerError(f"{what}: cannot connect to {self.url}: {error}") from error
            if self._deadline.passed:
                raise self._too_late(what, seconds) from error
            hint = "; if it speaks TLS, write https://" if self.url.startswith("http://") else ""
            raise ServerDiedError(
                f"{what}: {self.url} dropped the connection before it answered (a dying server does "
                f"this{hint})"
                f"{self._death_note(DEATH_SECONDS)}"
            ) from error

    def _too_late(self, what: str, seconds: float) -> NoAnswerInTimeError:
        return NoAnswerInTimeError(
            f"{what}: no whole answer from {self.url} within {seconds:g} s; raise request_timeout, or see "
            f"the server's log{self._death_note()}"
        )

    def accept(self, status: int, body: bytes, route: str, what: str) -> bytes:
        """The body of a 200; for any other status the error that says what it means."""
        if status == 200:
            return body
        message = error_text(body)
        if "not JSON compliant" in message:
            raise InvalidAnswerError(
                f"non-finite log-probabilities: {what}: the server could not write its answer ({message}), "
                "so the model's output layer produced NaN or infinity"
            )
        if status in (401, 403):
            key = "none was sent" if self._api_key is None else "the one sent was not accepted"
            raise RequestRejectedError(
                f"{what}: {self.url} wants an API key and {key}; set api_key: ${{NAME}} ({message})"
            )
        if 300 <= status < 400:
            raise RequestRejectedError(
                f"{what}: {self.url} redirects ({status}); give the final url, perhaps https://"
            )
        if status in (404, 405):
            raise StatusError(
                f"{what}: {self.url} has no {route} ({status}: {message}); is the url's path right, and is "
                "it SGLang?",
                status,
            )
        raise StatusError(f"{what}: {self.url} answered {status}: {message}{self._death_note()}", status)

    def _death(self, wait: float = 0.0) -> str | None:
        return self.explain_death(wait) if self.explain_death is not None else None

    def _death_note(self, wait: float = 0.0) -> str:
        death = self._death(wait)
        return f"\n{death}" if death else ""


def backoff() -> Iterator[float]:
    """Seconds to wait between tries, doubling from 0.05 to 2, without end."""
    wait = 0.05
    while True:
        yield wait
        wait = min(wait * 2, 2.0)


def _read(response: requests.Response, deadline: Deadline, *, most: int) -> bytes:
    """The body as it travels, or its first `most` bytes."""
    read = bytearray()
    for chunk in _chunks(response):
        read += chunk
        if len(read) >= most:
            break
        if deadline.passed:
            raise requests.exceptions.ReadTimeout("the answer did not end in time")
    return bytes(read[:most])


def _chunks(response: requests.Response) -> Iterator[bytes]:
    """What has come, as soon as it has: `iter_content` waits until a chunk is full, however it trickles."""
    try:
        if not hasattr(response.raw, "read1"):  # urllib3 before 2.1
            yield from response.raw.stream(CHUNK_BYTES, decode_content=False)
            return
        while chunk := response.raw.read1(CHUNK_BYTES, decode_content=False):
            yield chunk
    except urllib3.exceptions.ReadTimeoutError as error:
        raise requests.exceptions.ReadTimeout(error) from error
    except urllib3.exceptions.HTTPError as error:
        raise requests.exceptions.ChunkedEncodingError(error) from error


def _never_connected(error: BaseException) -> bool:
    """Whether no connection was made. requests hides the reason in urllib3's retry error."""
    reason = getattr(error.args[0], "reason", None) if error.args else None
    return isinstance(reason, urllib3.exceptions.NewConnectionError)


def _was_refused(error: BaseException) -> bool:
    """Whether the host answered that nothing listens there."""
    cause: BaseException | None = error.args[0].reason if _never_connected(error) else None
    while cause is not None and not isinstance(cause, ConnectionRefusedError):
        cause = cause.__cause__ or cause.__context__
    return cause is not None
