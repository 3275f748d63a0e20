"""What a user's own test gets of a trial: the `quantguard` fixture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

import pytest

from pytest_quantguard.baseline.recording import CellKey, Recording
from pytest_quantguard.config import Bound, GateConfig, Phase
from pytest_quantguard.errors import QuantguardError
from pytest_quantguard.gate.judge import judge
from pytest_quantguard.gate.plan import Check
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.logprobs.divergence import Divergence
from pytest_quantguard.logprobs.metrics import METRICS
from pytest_quantguard.results import CheckResult
from pytest_quantguard.serving.launch import RunningServer
from pytest_quantguard.session import SESSION

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Quantguard:
    """Measure and assert. What cannot be had (server, baseline) fails the test with the reason, without a
    traceback.
    """

    trial: Trial

    @property
    def config(self) -> GateConfig:
        """The config."""
        return self.trial.config

    @property
    def server(self) -> RunningServer:
        """The candidate, started on first use."""
        return _or_fail(self.trial.server)

    @property
    def baseline(self) -> Recording:
        """The stored recording of the reference."""
        return _or_fail(self.trial.baseline)

    def measure(self, phase: Phase, batch_size: int) -> Divergence:
        """The candidate against the baseline in one cell: per-position arrays, `.aggregate(metric)`.

        Measured once per session, and shared with the built-in tests.
        """
        key = self._cell(phase, batch_size)
        return _or_fail(lambda: self.trial.comparison(key).divergence)

    def value(self, metric: str, *, phase: Phase, batch_size: int) -> float:
        """One metric of one cell."""
        self._known(metric)
        return self.measure(phase, batch_size).aggregate(metric)

    def check(
        self,
        metric: str,
        *,
        phase: Phase,
        batch_size: int,
        max: float | None = None,
        min: float | None = None,
    ) -> CheckResult:
        """Fail the test unless the metric keeps the bound; returns the result with interval and noise
        floor.
        """
        self._known(metric)
        key = self._cell(phase, batch_size)
        check = Check("accuracy", f"accuracy[{key}-{metric}]", key, metric, bound=_bound(metric, max, min))
        result = _or_fail(lambda: judge(self.trial, check))
        if result.outcome == "failed":
            pytest.fail(result.message, pytrace=False)
        return result

    def _cell(self, phase: Phase, batch_size: int) -> CellKey:
        key = CellKey(phase, batch_size)
        known = [CellKey(*cell) for cell in self.config.cells()]
        if key not in known:
            measured = ", ".join(map(str, known))
            pytest.fail(
                f"{self.config.name}: the suite has no cell {key}; it measures {measured}.", pytrace=False
            )
        return key

    def _known(self, metric: str) -> None:
        if metric not in METRICS:
            close = get_close_matches(metric, METRICS, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else "."
            pytest.fail(f"There is no metric '{metric}'{hint}", pytrace=False)


def handle_for(request: pytest.FixtureRequest) -> Quantguard:
    """The handle of the config that the test is parametrised with, or of the only one."""
    state = request.config.stash.get(SESSION, None)
    if state is None:
        pytest.fail("This test needs a config: run pytest with --quantguard-config=FILE.", pytrace=False)
    name = getattr(request, "param", None)
    trials = _or_fail(state.trials)
    return Quantguard(state.trial(name) if name is not None else trials[0])


def _bound(metric: str, most: float | None, least: float | None) -> Bound:
    wanted = "max" if METRICS[metric].better == "lower" else "min"
    if (most is None) == (least is None) or {"max": most, "min": least}[wanted] is None:
        pytest.fail(f"check('{metric}', ...) needs {wanted}=, and nothing else.", pytrace=False)
    return Bound(max=most, min=least)


def _or_fail(make: Callable[[], T]) -> T:
    try:
        return make()
    except QuantguardError as error:
        pytest.fail(str(error), pytrace=False)
