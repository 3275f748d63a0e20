"""The built-in tests as pytest nodes: a collector per config, an item per check."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pytest_quantguard.errors import ConfigError, QuantguardError
from pytest_quantguard.gate.accept import accept_run, add_times, prepare_adding
from pytest_quantguard.gate.capture import record_baseline
from pytest_quantguard.gate.judge import judge
from pytest_quantguard.gate.message import shortened
from pytest_quantguard.gate.plan import Check, plan_checks
from pytest_quantguard.gate.speed import time_cell
from pytest_quantguard.gate.speed_times import Prepared, prepare_cell
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.paths import with_short_paths
from pytest_quantguard.report.headline import label
from pytest_quantguard.report.visible import visible_lines
from pytest_quantguard.report.wrapping import fitted, text_width
from pytest_quantguard.results import NOT_RUN, CheckResult
from pytest_quantguard.session import GateSession


class QuantguardWarning(UserWarning):
    """A check that did not hold and that the config wants as a warning only."""


class Gate(pytest.Collector):
    """All checks of one config."""

    trial: Trial
    state: GateSession
    told: dict[str, str]
    """Row of the table -> the first check of it that failed and told everything."""

    @classmethod
    def of(cls, parent: pytest.Session, state: GateSession, trial: Trial) -> Gate:
        """The collector of `trial`."""
        gate = cls.from_parent(parent, name=trial.config.name, nodeid=trial.config.name)
        gate.state, gate.trial, gate.told = state, trial, {}
        return gate

    def collect(self) -> Iterator[pytest.Item]:
        """One item per check; to capture or to accept are items too."""
        options = self.state.options
        if options.update_baseline:
            yield Errand.of(self, "capture_baseline", lambda: record_baseline(self.trial))
            return
        if options.add_times:
            yield from self._adding()
            return
        for check in plan_checks(self.trial.config):
            if options.accept and check.kind == "drift":
                continue
            yield (JudgedCheck if check.speed is None else TimedCheck).of(self, check)
        if options.accept:
            yield Errand.of(self, "accept", lambda: accept_run(self.trial))

    def _adding(self) -> Iterator[pytest.Item]:
        """What is timed, and the errand that adds it; it is selected with them (-k speed, -m timed)."""
        for check in plan_checks(self.trial.config):
            if check.speed is not None:
                yield TimedCheck.of(self, check)
        errand = Errand.of(self, "add_times", lambda: add_times(self.trial))
        errand.add_marker(pytest.mark.timed)
        errand.extra_keyword_matches.add("speed")
        yield errand

    def __repr__(self) -> str:
        return f"<Gate {self.name}>"


class BrokenGate(pytest.Collector):
    """Stands for configs that cannot be loaded: a collection error with the reason."""

    error: ConfigError

    @classmethod
    def of(cls, parent: pytest.Session, error: ConfigError) -> BrokenGate:
        """The collector that fails with `error`."""
        gate = cls.from_parent(parent, name="quantguard-config", nodeid="quantguard-config")
        gate.error = error
        return gate

    def collect(self) -> Iterator[pytest.Item]:
        """Never returns."""
        raise self.CollectError(fitted(with_short_paths(str(self.error)), text_width()))


class GateItem(pytest.Item):
    """What all items of a gate share: the gate's name stands where other tests have a file."""

    gate: Gate

    def reportinfo(self) -> tuple[Path, int, str]:
        """There is no code to look at; pytest wants a line where other plugins skip or warn."""
        return self.config.rootpath / self.gate.name, 0, self.name


class CheckItem(GateItem):
    """A check as a test. `result` is there once it was judged."""

    check: Check
    result: CheckResult | None = None

    def attach(self, gate: Gate, check: Check) -> None:
        """Give the item its check, and the names by which -k and -m find it."""
        self.gate, self.check = gate, check
        self.add_marker(pytest.mark.quantguard)
        if check.kind == "generation":
            self.add_marker(pytest.mark.slow)
        if check.kind == "speed":
            self.add_marker(pytest.mark.timed)
        words = {check.kind, check.metric or "", check.cell.phase if check.cell else "", check.task or ""}
        words |= {check.speed[0]} if check.speed else set()
        self.extra_keyword_matches.update(words - {""})

    def report_outcome(self) -> None:
        """Fail, skip or warn as the result says."""
        assert self.result is not None
        if self.result.outcome == "failed":
            first = self.gate.told.setdefault(label(self.result), self.check.name)
            alike = self.check.cell is not None and first != self.check.name
            brief = alike and self.config.getoption("verbose") <= 0
            message = shortened(self.gate.trial, self.result, first) if brief else self.result.message
            pytest.fail(visible_lines(message), pytrace=False)
        if self.result.outcome == "skipped":
            pytest.skip(visible_lines(self.result.message))
        if self.result.outcome == "warned":
            warnings.warn(
                QuantguardWarning(f"{self.nodeid}: {visible_lines(self.result.message)}"), stacklevel=2
            )


class JudgedCheck(CheckItem):
    """A check of answers: what it needs is measured in setup, so that a missing server is an error, not a
    failure.
    """

    @classmethod
    def of(cls, gate: Gate, check: Check) -> JudgedCheck:
        """The item of `check`."""
        item = cls.from_parent(gate, name=check.name)
        item.attach(gate, check)
        return item

    def setup(self) -> None:
        """Measure and judge."""
        with _told_plainly(self):
            self.result = judge(self.gate.trial, self.check)

    def runtest(self) -> None:
        """Report the verdict."""
        self.report_outcome()


class TimedCheck(CheckItem, pytest.Function):
    """A check of time, run by pytest-benchmark's `benchmark` fixture. Setup makes ready what it needs."""

    prepared: Prepared | None = None

    @classmethod
    def of(cls, gate: Gate, check: Check) -> TimedCheck:
        """The item of `check`."""

        def timed(benchmark: Any) -> CheckResult:
            assert item.prepared is not None
            return time_cell(gate.trial, check, item.prepared, benchmark)

        def untimed() -> None:
            """Stands in where the fixture does not exist; setup refuses before it is called."""

        available = gate.config.pluginmanager.hasplugin("benchmark")
        item = cls.from_parent(gate, name=check.name, callobj=timed if available else untimed)
        item.attach(gate, check)
        return item

    def setup(self) -> None:
        """Refuse where nothing could be timed; start servers and warm up before the clock."""
        if self.config.getoption("benchmark_disable", False):
            pytest.skip("--benchmark-disable: not timed")
        with _told_plainly(self):
            if "PYTEST_XDIST_WORKER" in os.environ:
                raise ConfigError(
                    "Nothing can be timed under pytest-xdist: pytest-benchmark switches itself off there, "
                    "and workers disturb each other. Time without -n (pytest -m timed ...), and leave the "
                    "timing out of the distributed run (-m 'not timed')."
                )
            if not self.config.pluginmanager.hasplugin("benchmark"):
                raise ConfigError(
                    "Timing needs pytest-benchmark, which is switched off (-p no:benchmark). Switch it on, "
                    "or set `speed: null` in the config."
                )
            assert self.check.speed is not None
            if self.gate.state.options.add_times:
                prepare_adding(self.gate.trial, self.check.speed)
            self.prepared = prepare_cell(self.gate.trial, *self.check.speed)
        super().setup()

    def runtest(self) -> None:
        """Time the requests and report."""
        with _told_plainly(self):
            self.result = self.obj(benchmark=self.funcargs["benchmark"])
        self.report_outcome()


class Errand(GateItem):
    """Something to do rather than to check: capture a baseline, accept a run."""

    run: Callable[[], str]
    said: str = ""

    @classmethod
    def of(cls, gate: Gate, name: str, run: Callable[[], str]) -> Errand:
        """The item that runs `run`, which returns a sentence about what it did."""
        item = cls.from_parent(gate, name=name)
        item.gate, item.run = gate, run
        item.add_marker(pytest.mark.quantguard)
        return item

    def runtest(self) -> None:
        """Do it."""
        with _told_plainly(self):
            self.said = self.run()


@contextmanager
def _told_plainly(item: GateItem) -> Iterator[None]:
    """A `QuantguardError` becomes a failure without traceback; anything else is a bug and keeps its own.

    The first test that meets an error tells it in full, later ones refer to it.
    """
    try:
        yield
    except QuantguardError as error:
        first = item.gate.trial.told(error, item.nodeid)
        message = with_short_paths(str(error))
        if first != item.nodeid:
            message = NOT_RUN + message.split("\n", 1)[0] + f"\n(told in full by {first})"
        raise pytest.fail.Exception(visible_lines(message), pytrace=False) from None
