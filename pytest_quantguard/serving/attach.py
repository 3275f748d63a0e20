"""Uses a server that already runs, after checking that it is the one that the config expects."""

from __future__ import annotations

import time

from pytest_quantguard.config import AttachServer
from pytest_quantguard.errors import ServerDiedError, ServerError, ServerStartError
from pytest_quantguard.serving.answers import Capabilities, GenerateRequest
from pytest_quantguard.serving.client import Client
from pytest_quantguard.serving.probe import read_capabilities
from pytest_quantguard.serving.readiness import Progress
from pytest_quantguard.serving.transport import backoff, error_text

REPLICA_PROBES = 6
"""Requests that must all be answered by the same server."""
IDENTITY = ("kind", "version", "model_path", "dtype", "quantization", "kv_cache_dtype")
PROCESS_MARKS = ("random_seed", "port", "host", "launch_command", "dp_size")
"""Arguments that tell one process from another of the same model."""


def attach(config: AttachServer, progress: Progress | None) -> tuple[Client, Capabilities, tuple[str, ...]]:
    """The client, what the server says of itself, and notes; ServerStartError for an unexpected server."""
    client = Client(config.url, api_key=config.api_key, request_timeout=config.request_timeout)
    try:
        _await_answer(client, config.startup_timeout, progress)
        found = client.probe()
        _check_expectations(config, found, client.url)
        notes = _replica_notes(client, found)
    except BaseException:
        client.close()
        raise
    return client, found, notes


def check_same_server(client: Client, before: Capabilities) -> None:
    """Raise ServerDiedError where the url is now answered by a server with another identity."""
    now = read_capabilities(client.transport)
    changed = [
        f"{name} was {getattr(before, name)!r}, is {getattr(now, name)!r}"
        for name in IDENTITY
        if getattr(before, name) != getattr(now, name)
    ]
    if changed:
        raise ServerDiedError(f"another server answers at {client.url} now: {'; '.join(changed)}")


def _await_answer(client: Client, timeout: float, progress: Progress | None) -> None:
    deadline = time.monotonic() + timeout
    last = "nothing listens there, or it gives no whole answer in time"
    if progress is not None:
        progress(f"attaching to {client.url}")
    for wait in backoff():
        # A router may have no /health_generate of its own; then /health says that it is up.
        for route in ("/health_generate", "/health"):
            answer = client.transport.probe(route, timeout=min(timeout, 30))
            if answer is None:
                break
            if answer[0] == 200:
                return
            if answer[0] != 404:
                last = f"{route} answered {answer[0]}: {error_text(answer[1])}"
                if answer[0] in (401, 403):
                    client.transport.get(route)  # raises, naming api_key
                break
        if time.monotonic() + wait > deadline:
            raise ServerStartError(
                f"no server is ready at {client.url} after {timeout:g} s (startup_timeout): {last}"
            )
        time.sleep(wait)


def _check_expectations(config: AttachServer, found: Capabilities, url: str) -> None:
    rows = [
        (name, expected, getattr(found, name))
        for name, expected in config.expect.model_dump().items()
        if expected is not None and expected != getattr(found, name)
    ]
    if rows:
        table = "\n".join(f"  {name:<16} {expected!r:<32} {has!r}" for name, expected, has in rows)
        raise ServerStartError(
            f"the server at {url} is not the one that `expect` describes:\n"
            f"  {'':<16} {'expected':<32} found\n{table}\nAttach to another url, or correct `expect`."
        )


def _replica_notes(client: Client, found: Capabilities) -> tuple[str, ...]:
    """Ask the same several times: a router spreads the requests, and replicas give themselves away."""
    seen = {_marks(found)}
    identities = {_identity(found)}
    for _ in range(REPLICA_PROBES - 1):
        other = read_capabilities(client.transport)
        seen.add(_marks(other))
        identities.add(_identity(other))
    if len(identities) > 1:
        raise ServerStartError(
            f"several servers answer at {client.url}, and they differ: "
            + "; ".join(
                ", ".join(f"{n}={v!r}" for n, v in zip(IDENTITY, one, strict=True))
                for one in sorted(identities, key=str)
            )
            + ". Give the url of one of them"
        )
    notes = []
    if len(seen) > 1:
        notes.append(f"{len(seen)} replicas answer at {client.url}; their answers are mixed in every figure")
    notes += _differing_answers(client)
    return tuple(notes)


def _differing_answers(client: Client) -> list[str]:
    request = GenerateRequest(input_ids=(1, 2, 3, 4), logprob_start_len=0)
    values = set()
    try:
        for _ in range(REPLICA_PROBES):
            rows = client.generate([request])[0].prompt
            values.add(rows.chosen_logprobs.tobytes() if rows is not None else b"")
    except ServerError as error:
        return [f"the check for differing answers failed: {error}"]
    if len(values) == 1:
        return []
    return [
        f"{REPLICA_PROBES} equal requests to {client.url} got {len(values)} different answers: "
        "replicas with different kernels or devices, or a server that is not deterministic"
    ]


def _marks(found: Capabilities) -> tuple[str, ...]:
    return tuple(str(found.server_args.get(name)) for name in PROCESS_MARKS)


def _identity(found: Capabilities) -> tuple[object, ...]:
    return tuple(getattr(found, name) for name in IDENTITY)
