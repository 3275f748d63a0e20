"""The recorded answers of a real SGLang server, and how answers are compared by shape."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import requests

from .processes import DATA, Emulator

SAMPLES = DATA / "sglang"
DROPPED = -1
"""The recorded status of a request after which the real server was gone."""


@dataclass(frozen=True)
class Recorded:
    """One request to the real server and what came back."""

    name: str
    method: str
    path: str
    body: Any
    status: int
    response: Any


def recorded(name: str) -> Recorded:
    """A sample by its path below tests/data/sglang, without the ending."""
    content = json.loads((SAMPLES / f"{name}.json").read_text(encoding="utf-8"))
    request = content["request"]
    return Recorded(
        name, request["method"], request["path"], request["body"], content["status"], content["response"]
    )


def names(folder: str = "") -> list[str]:
    """All samples of a folder."""
    return sorted(
        str(path.relative_to(SAMPLES).with_suffix("")) for path in (SAMPLES / folder).glob("*.json")
    )


def replay(server: Emulator, sample: Recorded) -> requests.Response:
    """Send the sample's request; a body that was recorded as text is sent as it is."""
    if sample.body is None:
        return server.request(sample.method, sample.path)
    if isinstance(sample.body, str):
        return server.request(
            sample.method, sample.path, data=sample.body, headers={"Content-Type": "application/json"}
        )
    return server.request(sample.method, sample.path, json=sample.body)


def shape(value: Any) -> Any:
    """The structure of a JSON value: keys, lengths and kinds, without the values."""
    if isinstance(value, dict):
        return {key: shape(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [shape(entry) for entry in value]
    if isinstance(value, bool) or value is None:
        return value
    return "text" if isinstance(value, str) else "number"
