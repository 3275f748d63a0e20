"""Serving figures of a set of timed requests: throughput, TTFT, TPOT, ITL, end-to-end latency, goodput.

Names and definitions are those of `sglang.bench_serving` and `vllm bench serve`, so that figures can be
compared. Pure arithmetic over times; nothing here sends a request or judges a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Better = Literal["lower", "higher"]

STATISTICS = ("mean", "median", "p90", "p95", "p99")
LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first, one value per request",
    "itl": "inter-token latency, one value per token after the first",
    "e2e_latency": "from sending a request to its last token",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """What a figure is called, in which unit, and which direction is better."""

    name: str
    unit: str
    better: Better
    description: str


def _figures() -> dict[str, Figure]:
    listed = [
        Figure("duration", "s", "lower", "from the first request sent to the last token received"),
        Figure("request_throughput", "requests/s", "higher", "completed requests per second of the duration"),
        Figure("input_throughput", "tokens/s", "higher", "prompt tokens of completed requests per second"),
        Figure("output_throughput", "tokens/s", "higher", "generated tokens per second"),
        Figure("total_throughput", "tokens/s", "higher", "prompt and generated tokens per second"),
        *(
            Figure(f"{statistic}_{latency}_ms", "ms", "lower", f"{statistic} of the {text}")
            for latency, text in LATENCIES.items()
            for statistic in STATISTICS
        ),
        Figure(
            "request_goodput", "requests/s", "higher", "requests per second that met every limit of the SLO"
        ),
        Figure(
            "slo_attainment", "share", "higher", "share of the requests sent that met every limit of the SLO"
        ),
    ]
    return {figure.name: figure for figure in listed}


FIGURES: Mapping[str, Figure] = _figures()


def canonical(name: str) -> str:
    """The figure that `name` means; `ttft_p99_ms` is `p99_ttft_ms`, `output_tokens_per_s` is
    `output_throughput`. Other names come back as they are.
    """
    if name.endswith("_tokens_per_s"):
        return f"{name.removesuffix('_tokens_per_s')}_throughput"
    if name == "requests_per_s":
        return "request_throughput"
    for latency in LATENCIES:
        for statistic in STATISTICS:
            if name == f"{latency}_{statistic}_ms":
                return f"{statistic}_{latency}_ms"
    return name


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """One streamed request on the client's monotonic clock, in seconds.

    arrivals: (time, tokens so far) of every chunk that brought tokens; the first holds the first token.
    error: why the request does not count; its times are then not used.
    """

    sent: float
    arrivals: tuple[tuple[float, int], ...]
    ended: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Time to first token, seconds."""
        return self.arrivals[0][0] - self.sent

    @property
    def e2e_latency(self) -> float:
        """From sending to the last token, seconds."""
        return self.arrivals[-1][0] - self.sent

    @property
    def tpot(self) -> float | None:
        """(e2e latency - TTFT) / (tokens - 1), seconds; None for an answer of one token."""
        if self.output_tokens < 2:
            return None
        return (self.e2e_latency - self.ttft) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Seconds before each token after the first chunk; a chunk of n tokens counts as n equal gaps."""
        gaps: list[float] = []
        for (before, known), (time, tokens) in zip(self.arrivals, self.arrivals[1:], strict=False):
            new = tokens - known
            gaps += [(time - before) / new] * new
        return gaps


def round_figures(
    timings: Sequence[RequestTiming], duration: float, *, slo_ms: Mapping[str, float] | None = None
) -> dict[str, float]:
    """All figures of one round that the completed requests allow: name -> value in the unit of `FIGURES`.

    slo_ms: latency ("ttft", "tpot", "itl", "e2e_latency") -> most milliseconds. A request meets an ITL limit
    with the 99th percentile of its own gaps. A request that failed met nothing. TPOT and ITL are absent where
    every answer had one token. Raises ValueError for a duration that is not positive.
    """
    if not duration > 0:
        raise ValueError(f"a round lasts longer than {duration} s")
    done = [timing for timing in timings if timing.error is None]
    figures = {"duration": duration}
    if not done:
        return figures
    tokens_in = sum(timing.input_tokens for timing in done)
    tokens_out = sum(timing.output_tokens for timing in done)
    figures["request_throughput"] = len(done) / duration
    figures["input_throughput"] = tokens_in / duration
    figures["output_throughput"] = tokens_out / duration
    figures["total_throughput"] = (tokens_in + tokens_out) / duration
    samples: dict[str, list[float]] = {
        "ttft": [timing.ttft for timing in done],
        "tpot": [value for timing in done if (value := timing.tpot) is not None],
        "itl": [gap for timing in done for gap in timing.itl],
        "e2e_latency": [timing.e2e_latency for timing in done],
    }
    for latency, seconds in samples.items():
        figures |= _statistics(latency, seconds)
    if slo_ms:
        good = sum(_meets(timing, slo_ms) for timing in done)
        figures["request_goodput"] = good / duration
        figures["slo_attainment"] = good / len(timings)
    return figures


def _statistics(latency: str, seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = np.asarray(seconds) * 1000
    percentiles = np.percentile(values, [50, 90, 95, 99])
    found = zip(STATISTICS, [values.mean(), *percentiles], strict=True)
    return {f"{statistic}_{latency}_ms": float(value) for statistic, value in found}


def _meets(timing: RequestTiming, slo_ms: Mapping[str, float]) -> bool:
    gaps = timing.itl
    observed = {
        "ttft": timing.ttft,
        "tpot": timing.tpot or 0.0,
        "itl": float(np.percentile(gaps, 99)) if gaps else 0.0,
        "e2e_latency": timing.e2e_latency,
    }
    return all(observed[latency] * 1000 <= limit for latency, limit in slo_ms.items())
