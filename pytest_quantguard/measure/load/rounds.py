"""Repeats a workload: warm-up until it is steady, then rounds, each with an empty prefix cache.

Keeps the figures of every round and why requests failed, not the times of single tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from pytest_quantguard.measure.load.generator import Round, Target, run_round
from pytest_quantguard.measure.load.workload import Workload
from pytest_quantguard.measure.waiting import Progress
from pytest_quantguard.serving.client import Client
from pytest_quantguard.stats.figures import round_figures
from pytest_quantguard.stats.speed import scatter

STEADY = 0.05
"""Two successive warm-up rounds that differ by no more are steady."""
SHOWN_ERRORS = 5


@dataclass(slots=True)
class Load:
    """A workload at a server, ready to be sent any number of times.

    figures: name -> value of each round so far. errors: of each round. warmup: untimed rounds that were sent;
    steady: whether the last two agreed. progress: hears of rounds that take long.
    """

    client: Client
    target: Target
    workload: Workload
    concurrency: int
    slo_ms: Mapping[str, float]
    progress: Progress | None = None
    figures: dict[str, list[float]] = field(default_factory=dict)
    errors: list[int] = field(default_factory=list)
    error_examples: list[str] = field(default_factory=list)
    cached_tokens: int = 0
    warmup: int = 0
    steady: bool = False

    @property
    def comparison_figure(self) -> str:
        """The time that is compared between runs."""
        return self.workload.comparison_figure

    @property
    def times(self) -> list[float]:
        """The compared time of each round."""
        return self.figures.get(self.comparison_figure, [])

    @property
    def scatter(self) -> float:
        """Standard deviation over mean of the compared times."""
        return scatter(self.times) if self.times else 0.0

    def medians(self) -> dict[str, float]:
        """Every figure's median over the rounds."""
        return {name: float(np.median(values)) for name, values in self.figures.items()}

    def prepare(self) -> None:
        """Empty the server's prefix cache. Raises ServerErrors."""
        self.client.flush_cache()

    def warm_up(self, at_most: int, progress: Callable[[str], None]) -> None:
        """Send untimed rounds until two in a row agree within 5 % or one has errors; at most so many."""
        last: float | None = None
        while self.warmup < at_most and not self.steady and not self.failed:
            self.prepare()
            sent = self._send()
            self.warmup += 1
            self._note_errors(sent)
            now = None if sent.errors else _time_of(sent, self.comparison_figure)
            if last is not None and now is not None:
                self.steady = abs(now - last) <= STEADY * min(now, last)
            last = now
            progress(f"{self.workload.scenario}: warm-up round {self.warmup} took {sent.duration:.2f} s")

    @property
    def failed(self) -> int:
        """The most requests that failed in one round."""
        return max(self.errors, default=0)

    def broken(self, allowed_errors: int) -> bool:
        """Whether a round had more failed requests than may be, or nothing else."""
        return self.failed > allowed_errors or self.failed == len(self.workload.requests)

    def run(self) -> None:
        """One timed round. `prepare` comes before it."""
        sent = self._send()
        self._note_errors(sent)
        self.cached_tokens += sum(timing.cached_tokens for timing in sent.timings)
        for name, value in round_figures(sent.timings, sent.duration, slo_ms=self.slo_ms).items():
            self.figures.setdefault(name, []).append(value)

    def _send(self) -> Round:
        return run_round(self.target, self.workload, self.concurrency, progress=self.progress)

    def _note_errors(self, sent: Round) -> None:
        self.errors.append(len(sent.errors))
        for error in sent.errors:
            if len(self.error_examples) < SHOWN_ERRORS and error not in self.error_examples:
                self.error_examples.append(error)


def _time_of(sent: Round, figure: str) -> float | None:
    return round_figures(sent.timings, sent.duration).get(figure)
