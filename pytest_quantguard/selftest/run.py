"""Runs a self-test: mutation testing of a gate. The candidate without faults first, then with each fault.

Every verdict is the gate's own (`gate.judge`); this module only switches faults, counts, and stops asking
once an absolute bound has caught a fault.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Literal

from pytest_quantguard.baseline.recording import Cell, CellKey
from pytest_quantguard.config import EmulatorServer, GateConfig
from pytest_quantguard.emulator.checkpoint import module_formats
from pytest_quantguard.emulator.faults import FAULTS, parse_fault
from pytest_quantguard.emulator.models import resolve_model
from pytest_quantguard.errors import ConfigError
from pytest_quantguard.gate.diagnose import diagnose_trial
from pytest_quantguard.gate.plan import Check, plan_checks
from pytest_quantguard.gate.trial import Progress, Trial, TrialOptions
from pytest_quantguard.results import CheckResult, Kind
from pytest_quantguard.selftest.bench import Bench, judge_stages
from pytest_quantguard.selftest.catalogue import Candidate, check_marks, choose_faults, must_be_caught
from pytest_quantguard.selftest.effect import advise, measure_effect
from pytest_quantguard.selftest.plan import JUDGED_KINDS, plan_selftest
from pytest_quantguard.selftest.results import (
    CleanRun,
    FaultCheck,
    FaultResult,
    KindStatus,
    SelftestPlanResult,
    SelftestResult,
    Status,
)

AcceptedRun = Literal["stored", "made from the clean candidate", "not asked for"]


@dataclass(frozen=True, slots=True)
class SelftestOptions:
    """What the command line adds to a config; None and () take the config's `selftest`.

    output: folder of the server's log. prompts: 0 asks all. score_tokens: 0 scores whole spans. full: judge
    every check of every fault, even after it was caught.
    """

    output: Path
    faults: tuple[str, ...] = ()
    variants: bool = False
    clean_runs: int | None = None
    prompts: int | None = None
    score_tokens: int | None = None
    full: bool = False


def run_selftest(
    config: GateConfig,
    config_path: Path,
    options: SelftestOptions,
    progress: Progress,
    announce: Progress | None = None,
) -> SelftestResult:
    """Try the gate of `config` on a clean and on faulty candidates.

    progress: is told of every step. announce: of every clean run and fault that is done.

    Raises ConfigError for a config that cannot be tested so, BaselineError without a baseline, and whatever
    keeps the clean candidate from being judged.
    """
    started = time.perf_counter()
    for name in (*options.faults, *config.selftest.faults):
        parse_fault(name, FAULTS)
    check_marks(config.selftest.must_catch)
    own = config.selftest
    prompts = own.prompts if options.prompts is None else options.prompts
    scored = own.score_tokens if options.score_tokens is None else options.score_tokens
    baseline = Trial(config, config_path, TrialOptions(options.output), progress).baseline()
    plan = plan_selftest(config, baseline, prompts=prompts or None, score_tokens=scored or None)
    names = options.faults or (() if options.variants else config.selftest.faults)
    longest = max(prompt.token_ids.size for prompt in plan.baseline.prompts)
    candidates = choose_faults(names, _formats(config, progress), longest, variants=options.variants)
    with Bench(plan, config_path, options.output, progress) as bench:
        test = _Selftest(bench, config.selftest.must_catch, options.full, progress, announce or progress)
        test.run_clean(options.clean_runs or config.selftest.clean_runs)
        for number, candidate in enumerate(candidates, start=1):
            test.try_fault(candidate, f"{number} of {len(candidates)}")
    return SelftestResult(
        name=config.name,
        config_path=str(config_path),
        candidate=_describe(plan.config),
        baseline_path=str(config.baseline),
        plan=SelftestPlanResult(
            prompts=len(plan.baseline.prompts),
            suite_prompts=len(baseline.prompts),
            positions=plan.baseline.positions,
            cells=[str(key) for key in plan.cells],
            chunked_prefill_size=plan.chunk_size,
            accepted_run=test.accepted_run,
            stops_early=not options.full,
            notes=list(plan.notes),
        ),
        clean=test.clean,
        faults=test.faults,
        seconds=round(time.perf_counter() - started, 1),
    )


@dataclass(slots=True)
class _Selftest:
    """A self-test under way. alarmed: ids of checks that fail on a clean candidate and so catch nothing."""

    bench: Bench
    marked: Sequence[str]
    full: bool
    progress: Progress
    announce: Progress
    clean: list[CleanRun] = field(default_factory=list)
    faults: list[FaultResult] = field(default_factory=list)
    accepted_run: AcceptedRun = "not asked for"
    clean_cells: dict[CellKey, Cell] = field(default_factory=dict)
    alarmed: set[str] = field(default_factory=set)

    def run_clean(self, runs: int) -> None:
        """The first run is what faulty answers are compared with and, where drift has nothing stored to be
        judged against, the accepted run; the second repeats it; later ones ask in another order.
        """
        bench, drift = self.bench, self.bench.plan.config.accuracy.drift is not None
        first = bench.trial()
        stored = drift and not bench.plan.reduced and _has_accepted(first)
        self._clean_run(first, f"1 of {runs}", 0, lambda check: stored or check.kind != "drift")
        measured = first.measured().items()
        self.clean_cells = {key: found.cell for (key, warm, _), found in measured if not warm}
        if drift:
            self.accepted_run = "stored" if stored else "made from the clean candidate"
            bench.accepted = first.accepted() if stored else bench.accept(first)
        for run in range(2, runs + 1):
            shuffle = run - 2
            trial = bench.trial(shuffle=shuffle)
            holds = _holds_in_any_order if shuffle else lambda _: True
            self._clean_run(trial, f"{run} of {runs}", shuffle, holds)

    def _clean_run(self, trial: Trial, which: str, shuffle: int, wanted: Callable[[Check], bool]) -> None:
        self.progress(f"clean run {which}")
        started = time.perf_counter()
        stages = [[check for check in stage if wanted(check)] for stage in self.bench.plan.stages()]
        results = [result for stage in judge_stages(trial, stages) for result in stage]
        for result in results:
            if result.extra.get("error") in ("ConfigError", "BaselineError"):
                raise ConfigError(f"The clean candidate cannot be judged: {result.id}: {result.message}")
        alarms = [_check(result) for result in results if result.outcome in ("failed", "error")]
        self.alarmed.update(alarm.id for alarm in alarms)
        order = f"shuffled by seed {shuffle}" if shuffle else "as in the suite"
        seconds = round(time.perf_counter() - started, 2)
        self.clean.append(CleanRun(order=order, checks=len(results), alarms=alarms, seconds=seconds))
        said = f"{len(alarms)} FALSE ALARMS" if alarms else "no alarm"
        self.announce(f"clean run {which}: {said}, {seconds:.1f} s")

    def try_fault(self, candidate: Candidate, which: str) -> None:
        """Switch it on, judge, and keep what was found."""
        fault = candidate.fault
        known = FaultResult(
            specification=fault.specification,
            name=fault.name,
            severity=fault.severity,
            summary=fault.summary,
            shows_in=fault.shows_in,
            source=fault.source,
            must_catch=must_be_caught(fault, self.marked),
            status="not_tried",
            advice=candidate.skipped,
            note=candidate.note,
        )
        if candidate.skipped is None:
            self.progress(f"fault {which}: {fault.specification}")
            known = self._tried(known)
            by = f" by {known.first_check}" if known.first_check else ""
            self.announce(f"fault {which}: {fault.specification}: {known.status}{by}, {known.seconds:.1f} s")
        self.faults.append(known)

    def _tried(self, known: FaultResult) -> FaultResult:
        started = time.perf_counter()
        plan = self.bench.plan
        trial = self.bench.trial([known.specification])
        stages = plan.stages()
        results: list[CheckResult] = []
        for judged in judge_stages(trial, stages):
            results += judged
            if not self.full and any(self._certain(result) for result in results):
                break
        caught = [result for result in results if self._catches(result)]
        order = [check.name for check in plan_checks(plan.config)]
        first = min(caught, key=lambda result: order.index(result.id), default=None)
        warned = any(result.outcome == "warned" for result in results)
        effect = measure_effect(trial, self.clean_cells)
        status: Status = "caught" if caught else "warned" if warned else "missed"
        return known.model_copy(
            update={
                "status": status,
                "kinds": {kind: self._kind_status(kind, results) for kind in self._kinds()},
                "first_check": first and first.id,
                "first_message": first and headline(first.message),
                "failed_checks": len(caught),
                "judged_checks": len(results),
                "diagnosis": diagnose_trial(trial),
                "effect": effect,
                "advice": None if caught else advise(plan.config, known, effect, results),
                "complete": len(results) == sum(map(len, stages)),
                "seconds": round(time.perf_counter() - started, 2),
                "checks": [_check(result) for result in results],
            }
        )

    def _kinds(self) -> list[Kind]:
        asked = {check.kind for check in plan_checks(self.bench.plan.config)}
        return [kind for kind in JUDGED_KINDS if kind in asked]

    def _catches(self, result: CheckResult) -> bool:
        """The gate would be red because of it, and is not without the fault."""
        return result.outcome in ("failed", "error") and result.id not in self.alarmed

    def _certain(self, result: CheckResult) -> bool:
        """Caught by something that holds whatever else is measured, and whatever was accepted before."""
        return self._catches(result) and result.kind in ("server", "validity", "accuracy")

    def _kind_status(self, kind: Kind, results: Iterable[CheckResult]) -> KindStatus:
        own = [result for result in results if result.kind == kind]
        caught = [result for result in own if self._catches(result)]
        if any(result.outcome == "failed" or kind in ("server", "validity") for result in caught):
            return "caught"
        if any(result.outcome == "warned" for result in own):
            return "warned"
        if caught:
            return "unusable"
        return "missed" if own else "not_measured"


def headline(message: str) -> str:
    """A failure's first paragraph, in one line."""
    return " ".join(takewhile(lambda line: not line.startswith("  "), message.split("\n")))


def _check(result: CheckResult) -> FaultCheck:
    return FaultCheck(
        id=result.id,
        kind=result.kind,
        outcome=result.outcome,
        value=result.value,
        bound=result.bound,
        message=headline(result.message),
    )


def _holds_in_any_order(check: Check) -> bool:
    """A bound on accepted against candidate supposes the same batches: other ones round differently."""
    return check.kind != "drift" or check.bound is None


def _has_accepted(trial: Trial) -> bool:
    """Whether there is a stored accepted run; one that cannot be used is an error of the checks."""
    return trial.accepted_folder().is_dir()


def _formats(config: GateConfig, progress: Progress) -> dict[str, str]:
    candidate = config.candidate
    assert isinstance(candidate, EmulatorServer)
    return module_formats(
        resolve_model(candidate.model_path, progress=progress),
        quantization=candidate.quantization,
        kv_cache_dtype=candidate.kv_cache_dtype,
        dtype=candidate.dtype,
    )


def _describe(config: GateConfig) -> str:
    candidate = config.candidate
    assert isinstance(candidate, EmulatorServer)
    how = candidate.quantization if isinstance(candidate.quantization, str) else "mixed quantization"
    scheme = how if candidate.quantization is not None else "as stored"
    return f"{candidate.model_path}, {scheme}, KV cache {candidate.kv_cache_dtype}"
