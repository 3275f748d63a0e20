"""One pytest session's gates: which configs, what was collected, what each check found, and the files at the
end.

It hangs on `config.stash`. With xdist the controller and every worker have one each: checks travel with
pytest's own reports, the rest is published by each worker at its end and merged by the controller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from pytest_quantguard.config_file import load_configs
from pytest_quantguard.gate.plan import plan_checks
from pytest_quantguard.gate.summary import outline, summarize
from pytest_quantguard.gate.trial import Trial, TrialOptions
from pytest_quantguard.report.files import write_run, write_unfinished
from pytest_quantguard.results import CheckResult, RunResult, TrialResult

SESSION: pytest.StashKey[GateSession] = pytest.StashKey()
DEFAULT_OUTPUT = Path(".quantguard")
NOTE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """The command line. `worker` is None outside of xdist workers."""

    config_paths: tuple[Path, ...]
    output: Path = DEFAULT_OUTPUT
    repeats: int = 1
    accept: bool = False
    add_times: bool = False
    update_baseline: bool = False
    push: bool = False
    worker: int | None = None


@dataclass(slots=True)
class GateSession:
    """State of a session; hooks call it, it calls nothing of pytest."""

    options: SessionOptions
    progress: Callable[[str], None]
    selection: tuple[str, ...] = ()
    started: datetime = field(default_factory=lambda: datetime.now(timezone.utc))
    planned: dict[str, list[str]] = field(default_factory=dict)
    checks: dict[str, dict[str, CheckResult]] = field(default_factory=dict)
    published: dict[str, TrialResult] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    reports: dict[str, Path | None] = field(default_factory=dict)
    _trials: list[Trial] | None = None
    _noted: dict[str, float] = field(default_factory=dict)
    _final: set[tuple[str, str]] = field(default_factory=set)

    def trials(self) -> list[Trial]:
        """One per config; raises `ConfigError` if any config is wrong."""
        if self._trials is None:
            configs = load_configs(self.options.config_paths)
            self._trials = [
                Trial(
                    config,
                    path,
                    TrialOptions(
                        self.options.output / config.name,
                        self.options.repeats,
                        self.options.worker or 0,
                        self.options.push,
                        self.options.accept or self.options.add_times,
                    ),
                    self.progress,
                )
                for config, path in zip(configs, self.options.config_paths, strict=True)
            ]
        return self._trials

    def trial(self, name: str) -> Trial:
        """The trial of one config."""
        return next(trial for trial in self.trials() if trial.config.name == name)

    def record(self, name: str, check: CheckResult, *, final: bool = False) -> None:
        """Keep what a check found; a repeated test replaces its earlier result, unless that was final."""
        if (name, check.id) not in self._final:
            self.checks.setdefault(name, {})[check.id] = check
        if final:
            self._final.add((name, check.id))
        self.note(name)

    def note(self, name: str) -> None:
        """Write what is known so far, now and then: a run that is killed must not leave the files of
        another.
        """
        now = time.monotonic()
        if self.options.worker is not None or now - self._noted.get(name, -NOTE_SECONDS) < NOTE_SECONDS:
            return
        self._noted[name] = now
        trial = self.trial(name)
        result = self._result(outline(trial), self.checks.get(name, {}).values(), 0)
        so_far = {"partial": True, "verdict": "failed" if result.failures else "incomplete"}
        self.problems += write_unfinished(trial.options.output, result.model_copy(update=so_far))

    def expect(self, test_ids: Iterable[str]) -> None:
        """Take note of what the workers collected."""
        known = set(test_ids)
        for trial in self.trials():
            name = trial.config.name
            checks = [check.name for check in plan_checks(trial.config) if f"{name}::{check.name}" in known]
            if checks:
                self.planned[name] = checks

    def publish(self) -> dict[str, Any]:
        """What a worker tells its controller at the end: plain data."""
        used = [trial for trial in self._trials or [] if trial.touched()]
        return {
            "planned": self.planned,
            "trials": [summarize(trial).model_dump(mode="json") for trial in used],
        }

    def merge(self, published: dict[str, Any]) -> None:
        """Take in what a worker published."""
        self.planned.update(published["planned"])
        for trial in map(TrialResult.model_validate, published["trials"]):
            self.published[trial.name] = trial

    def finish(self) -> list[RunResult]:
        """The result of every config that had a check selected, with its files written.

        What could not be written is told in `problems`.
        """
        results = []
        for trial in self._trials or []:
            name = trial.config.name
            if not self.planned.get(name) and not self.checks.get(name):
                continue
            known = self.published.get(name) or summarize(trial)
            everything = {check.name for check in plan_checks(trial.config)}
            unselected = everything - set(self.planned.get(name, ())) - self.checks.get(name, {}).keys()
            result = self._result(known, list(self.checks.get(name, {}).values()), len(unselected))
            written = write_run(trial.options.output, result)
            self.reports[name] = written.report
            self.problems += written.problems
            results.append(result)
        return results

    def close(self) -> None:
        """Stop every server."""
        for trial in self._trials or []:
            trial.close()

    def _result(self, known: TrialResult, checks: Iterable[CheckResult], unselected: int) -> RunResult:
        found = list(checks)
        order = {check_id: index for index, check_id in enumerate(self.planned.get(known.name, []))}
        found.sort(key=lambda check: order.get(check.id, len(order)))
        partial = any(check_id not in {check.id for check in found} for check_id in order)
        failed = any(check.outcome in ("failed", "error") for check in found)
        nothing = not any(check.outcome != "skipped" for check in found)
        finished = datetime.now(timezone.utc)
        return RunResult(
            **dict(known),
            verdict="failed" if failed else "incomplete" if partial or nothing else "passed",
            partial=partial,
            unselected=unselected,
            finished=finished.isoformat(timespec="seconds"),
            seconds=round((finished - self.started).total_seconds(), 3),
            checks=found,
        )
