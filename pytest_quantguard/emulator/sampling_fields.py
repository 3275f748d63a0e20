"""`sampling_params` of a request: which exist, what each may be, and which the emulator refuses to ignore."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = Any
Complain = Callable[[str], Exception]

FIELDS = (
    "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "json_schema",
    "regex", "ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
    "no_stop_trim", "stream_interval", "logit_bias", "sampling_seed", "custom_params", "beam_width",
    "watermark", "choice",
)  # fmt: skip
"""All names that SGLang 0.5.23 knows, in the order of its error message."""

UNSUPPORTED = {
    "stop_regex": None, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    "repetition_penalty": 1.0, "min_new_tokens": 0, "json_schema": None, "regex": None, "ebnf": None,
    "structural_tag": None,
    "logit_bias": None, "beam_width": 1, "watermark": None, "choice": None,
}  # fmt: skip
"""Names that change what is generated and that the emulator lacks, with the value that changes nothing."""

MAX_SAMPLES = 128
MAX_STOPS = 64
DEFAULT_NEW_TOKENS = 128


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """Checked sampling parameters of one sequence.

    max_new_tokens: None goes on to the end of the context. explicit_length: the client gave it.
    """

    max_new_tokens: int | None
    explicit_length: bool
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    n: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    no_stop_trim: bool
    skip_special_tokens: bool


def parse_sampling(value: dict[str, Json] | None, contract: Complain, reject: Complain) -> SamplingParameters:
    """Check one `sampling_params` object.

    contract, reject: make the exception for a wrong name or type, and for an impossible value.
    """
    given = value or {}
    reader = FieldReader(given, contract)
    for name in given:
        if name not in FIELDS:
            raise contract(
                f"unknown field `{name}`, expected one of {', '.join(f'`{field}`' for field in FIELDS)}"
            )
    for name, neutral in UNSUPPORTED.items():
        if given.get(name) not in (None, neutral):
            raise reject(f"sampling parameter {name} is not supported by the emulator.")
    parameters = SamplingParameters(
        max_new_tokens=reader.integer("max_new_tokens") if "max_new_tokens" in given else DEFAULT_NEW_TOKENS,
        explicit_length=given.get("max_new_tokens") is not None,
        temperature=reader.number("temperature", 1.0),
        top_p=reader.number("top_p", 1.0),
        top_k=reader.integer("top_k", -1) or 0,
        seed=reader.integer("sampling_seed"),
        n=reader.integer("n") or 1,
        ignore_eos=reader.boolean("ignore_eos", False),
        stop_token_ids=reader.token_ids("stop_token_ids"),
        stop=reader.strings("stop"),
        no_stop_trim=reader.boolean("no_stop_trim", False),
        skip_special_tokens=reader.boolean("skip_special_tokens", True),
    )
    check_values(parameters, reject)
    return parameters


def check_values(parameters: SamplingParameters, reject: Complain) -> None:
    """Raise `reject(...)` for values that no server takes; the messages are SGLang's."""
    if not math.isfinite(parameters.temperature) or parameters.temperature < 0:
        raise reject(
            f"temperature must be a non-negative finite number, got {shown(parameters.temperature)}."
        )
    if not 0 < parameters.top_p <= 1:
        raise reject(f"top_p must be in (0, 1], got {shown(parameters.top_p)}.")
    if parameters.top_k < 1 and parameters.top_k != -1:
        raise reject(f"top_k must be -1 (disable) or at least 1, got {parameters.top_k}.")
    if parameters.max_new_tokens is not None and parameters.max_new_tokens < 0:
        raise reject(f"max_new_tokens must be at least 0, got {parameters.max_new_tokens}.")
    if not 1 <= parameters.n <= MAX_SAMPLES:
        raise reject(f"n must be in [1, {MAX_SAMPLES}], got {parameters.n}.")
    if len(parameters.stop) > MAX_STOPS:
        raise reject(f"at most {MAX_STOPS} stop strings are allowed, got {len(parameters.stop)}")
    if parameters.seed is not None and not -(2**63) <= parameters.seed < 2**63:
        raise reject(f"sampling_seed must be in [-2**63, 2**63 - 1], got {parameters.seed}.")


class FieldReader:
    """Reads fields of one type each; the messages are those of SGLang's schema check."""

    def __init__(self, given: dict[str, Json], contract: Complain) -> None:
        self._given = given
        self._contract = contract

    def integer(self, name: str, default: int | None = None) -> int | None:
        """A whole number; `default` where absent or null."""
        value = self._given.get(name)
        if value is None:
            return default
        if type(value) is not int:
            raise self._contract(f"invalid type: {described(value)}, expected i64")
        return value

    def number(self, name: str, default: float) -> float:
        """A number; `default` where absent or null."""
        value = self._given.get(name)
        if value is None:
            return default
        if type(value) not in (int, float):
            raise self._contract(f"invalid type: {described(value)}, expected f64")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false; `default` where absent or null."""
        value = self._given.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._contract(f"invalid type: {described(value)}, expected a boolean")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self._given.get(name) or []
        if not isinstance(value, list) or any(type(entry) is not int for entry in value):
            raise self._contract(f"invalid type: {described(value)}, expected a sequence of i64")
        return tuple(value)

    def strings(self, name: str) -> tuple[str, ...]:
        """A string or a list of them; empty ones are dropped."""
        value = self._given.get(name)
        values = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(entry, str) for entry in values):
            raise self._contract(
                f"invalid type: {described(value)}, expected a value or an array of values for StringOrList"
            )
        return tuple(entry for entry in values if entry)


def described(value: Json) -> str:
    """A JSON value as SGLang's schema check words it."""
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, str):
        return f'string "{value[:80]}"'
    if isinstance(value, int):
        return f"integer `{value}`"
    if isinstance(value, float):
        return f"floating point `{value}`"
    return "sequence" if isinstance(value, list) else "map"


def shown(value: float) -> str:
    """A number as the client probably wrote it: -1, not -1.0."""
    return str(int(value)) if value.is_integer() else str(value)
