"""The recorded answers of a real SGLang 0.5.23 (and 0.5.9) server, and the requests that made them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pytest_quantguard.serving.answers import GenerateRequest

FOLDER = Path(__file__).parents[1] / "data" / "sglang"
VOCAB_SIZE = 49152


def sample(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return value


def body_of(recorded: dict[str, Any]) -> bytes:
    """The answer as the bytes that came over the wire."""
    return json.dumps(recorded["response"]).encode()


def requests_of(recorded: dict[str, Any]) -> list[GenerateRequest]:
    """What the recorded request asked, in our own words."""
    body = recorded["request"]["body"]
    prompts = body["input_ids"] if isinstance(body["input_ids"][0], list) else [body["input_ids"]]
    starts = body.get("logprob_start_len", -1)
    sampling = body["sampling_params"]
    return [
        GenerateRequest(
            input_ids=tuple(prompt),
            max_new_tokens=_of(sampling, i).get("max_new_tokens", 128),
            logprob_start_len=None if _of(starts, i) == -1 else _of(starts, i),
            ignore_eos=_of(sampling, i).get("ignore_eos", False),
            forced_ids=None,
        )
        for i, prompt in enumerate(prompts)
    ]


def _of(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, list) else value
