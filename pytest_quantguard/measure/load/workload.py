"""The requests of a scenario: token ids in, exact number of tokens out. Knows no server and no clock."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pytest_quantguard.config_base import MOST_TOKENS
from pytest_quantguard.config_speed import Level, Replay, Scenario, Synthetic, name_of
from pytest_quantguard.errors import ConfigError
from pytest_quantguard.measure.load.replay import read_replay

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request: its prompt and how many tokens must come back."""

    input_ids: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """A scenario's requests in the order in which they are sent.

    offsets: seconds after the start at which each is sent; None in a closed loop. distinct: no prompt begins
    as another does.
    """

    scenario: str
    requests: tuple[LoadRequest, ...]
    offsets: tuple[float, ...] | None
    distinct: bool
    digest: str

    @property
    def comparison_figure(self) -> str:
        """The time that is compared between runs: in an open loop the duration is that of the arrivals."""
        return "duration" if self.offsets is None else "mean_e2e_latency_ms"

    @property
    def input_tokens(self) -> int:
        return sum(len(request.input_ids) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)

    def concurrency(self, level: Level) -> int:
        """How many requests may be in flight."""
        return len(self.requests) if level == "max" else min(level, len(self.requests))


def build_workload(
    scenario: Scenario, *, seed: int, vocab_size: int, tokenize: Callable[[str], list[int]], folder: Path
) -> Workload:
    """The requests of `scenario`; the same seed gives the same.

    tokenize: for the texts of a replay. folder: that a replay's path is relative to. Raises ConfigError where
    the vocabulary is too small to tell so many prompts apart, or a replay file is wrong.
    """
    name = name_of(scenario)
    if isinstance(scenario, Replay):
        pairs = read_replay(folder / scenario.file, tokenize=tokenize, limit=scenario.requests)
        requests = tuple(LoadRequest(tuple(ids), tokens) for ids, tokens in pairs)
        distinct = False
        for keys, tokens in (
            ("prompts", sum(len(request.input_ids) for request in requests)),
            ("answers", sum(request.output_tokens for request in requests)),
        ):
            if tokens > MOST_TOKENS:
                raise ConfigError(
                    f"speed.scenarios: the {keys} of {folder / scenario.file} are {tokens:,} tokens; at most "
                    f"{MOST_TOKENS:,} can be held in memory. Lower `requests` of {name}."
                )
    else:
        requests, distinct = _synthetic(scenario, seed, vocab_size), scenario.shared_prefix == 0
    offsets = _offsets(scenario, len(requests), seed)
    return Workload(name, requests, offsets, distinct, _digest(requests, offsets))


def _synthetic(scenario: Synthetic, seed: int, vocab_size: int) -> tuple[LoadRequest, ...]:
    """Random ids from the middle of the vocabulary, away from special tokens; first tokens are distinct."""
    (shortest, longest), (least, most) = scenario.lengths()
    first, last = vocab_size // 10, vocab_size - vocab_size // 10
    if scenario.requests > last - first:
        raise ConfigError(
            f"speed.scenarios: {name_of(scenario)} has {scenario.requests} requests; with a vocabulary of "
            f"{vocab_size} only {last - first} prompts can begin differently. Lower `requests`."
        )
    rng = np.random.default_rng([seed, *name_of(scenario).encode()])
    shared = rng.integers(first, last, scenario.shared_prefix)
    begins = first + rng.choice(last - first, scenario.requests, replace=False)
    inputs = rng.integers(shortest, longest, scenario.requests, endpoint=True)
    outputs = rng.integers(least, most, scenario.requests, endpoint=True)
    requests = []
    for begin, length, output in zip(begins, inputs, outputs, strict=True):
        rest = rng.integers(first, last, length - shared.size - 1)
        requests.append(LoadRequest((*shared.tolist(), int(begin), *rest.tolist()), int(output)))
    return tuple(requests)


def _offsets(scenario: Scenario, count: int, seed: int) -> tuple[float, ...] | None:
    if scenario.request_rate is None:
        return None
    gap = 1 / scenario.request_rate
    if scenario.arrivals == "constant":
        return tuple(gap * number for number in range(count))
    gaps = np.random.default_rng([seed, count]).exponential(gap, count - 1)
    return (0.0, *np.cumsum(gaps).tolist())


def _digest(requests: tuple[LoadRequest, ...], offsets: tuple[float, ...] | None) -> str:
    """SHA-256 of everything that is sent, and when."""
    digest = hashlib.sha256()
    for request in requests:
        digest.update(np.array([request.output_tokens, len(request.input_ids), *request.input_ids]).tobytes())
    digest.update(repr(offsets).encode())
    return digest.hexdigest()
