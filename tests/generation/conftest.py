"""A scripted server and its client, and a project with a baseline to which answers can be added."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pytest_quantguard.serving.client import Client
from tests.generation.scripted import Script, serve


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def client(script: Script) -> Iterator[Client]:
    with connected(script) as client:
        yield client


@contextmanager
def connected(script: Script) -> Iterator[Client]:
    """A client that has probed the server."""
    with serve(script) as url, Client(url, request_timeout=30) as client:
        client.probe()
        yield client
