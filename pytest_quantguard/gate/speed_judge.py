"""Judges the times of one scenario at one level: errors, absolute bounds, the accepted record, the reference.

Each is a verdict of its own, so that one table shows them all; statistics are in `stats/speed.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_quantguard.baseline.compatibility import two_columns
from pytest_quantguard.baseline.speed_record import RecordedCell, SpeedRecord, read_speed_record
from pytest_quantguard.config import Bound
from pytest_quantguard.config_speed import Level, SpeedConfig, SpeedRules
from pytest_quantguard.errors import BaselineError
from pytest_quantguard.gate.machine import fingerprint_of
from pytest_quantguard.gate.speed_times import Timed, cell_name, speed_config
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.measure.load.rounds import Load
from pytest_quantguard.measure.load.workload import Workload
from pytest_quantguard.results import SpeedVerdict
from pytest_quantguard.serving.fingerprint import differences
from pytest_quantguard.stats.bootstrap import CONFIDENCE, Interval
from pytest_quantguard.stats.decision import decide
from pytest_quantguard.stats.figures import FIGURES
from pytest_quantguard.stats.speed import MIN_RUNS, decide_slowdown, decide_speedup, median_interval


def judge_times(trial: Trial, name: str, level: Level, timed: Timed) -> list[SpeedVerdict]:
    """Every verdict about one cell. Where requests failed nothing else is judged: the times are of others."""
    speed = speed_config(trial)
    rules = speed.rules_of(name, level)
    if timed.load.broken(speed.allowed_errors):
        return [_errors(timed.load, speed.allowed_errors)]
    verdicts = [_bound(timed, figure, bound, speed) for figure, bound in rules.bounds.items()]
    verdicts += _accepted(trial, name, level, timed, rules)
    verdicts += _reference(trial, timed, rules)
    return verdicts


def doubts(timed: Timed, *, paired: bool = False) -> list[str]:
    """What may have changed the candidate's times. paired: other than what slowed the reference alike."""
    return timed.state.throttling + ([] if paired else timed.state.crowding) + _quickened(timed.load)


def _quickened(load: Load) -> list[str]:
    if not (load.cached_tokens and load.workload.distinct):
        return []
    return [f"{load.cached_tokens} prompt tokens came from the prefix cache, which was flushed"]


def _errors(load: Load, allowed: int) -> SpeedVerdict:
    total = len(load.workload.requests)
    return SpeedVerdict(
        against="errors",
        figure="errors",
        status="failed",
        value=load.failed,
        bound=allowed,
        sentence=f"{load.failed} of {total} requests failed in a round; {allowed} may (speed.allowed_errors)",
        reasons=load.error_examples,
    )


def _bound(timed: Timed, figure: str, bound: Bound, speed: SpeedConfig) -> SpeedVerdict:
    load, better = timed.load, FIGURES[figure].better
    values = load.figures.get(figure)
    if not values:
        return SpeedVerdict(
            against="bound",
            figure=figure,
            status="failed",
            bound=bound.limit,
            sentence=f"{figure} {_why_unknown(figure)}: its bound cannot hold, remove it for this scenario",
        )
    value = load.medians()[figure]
    low, high = median_interval(values)
    verdict = decide(
        metric=figure,
        value=value,
        bound=bound.limit,
        better=better,
        decision=bound.decision or speed.decision,
        interval=Interval(low, high, value, 0.0, len(values), CONFIDENCE, "bootstrap")
        if len(values) > 1
        else None,
    )
    within = low >= bound.limit if better == "higher" else high <= bound.limit
    reasons = _doubts_of_bound(timed, speed.max_scatter, kept=verdict.passed and within)
    return SpeedVerdict(
        against="bound",
        figure=figure,
        status="inconclusive" if reasons else "held" if verdict.passed else "failed",
        value=value,
        bound=bound.limit,
        bound_side="min" if better == "higher" else "max",
        interval=(low, high),
        sentence=verdict.sentence,
        reasons=reasons,
    )


def _doubts_of_bound(timed: Timed, max_scatter: float, *, kept: bool) -> list[str]:
    """Why a figure says nothing about its bound. kept: with its whole interval; then it does not matter what
    may have slowed the server down, only what may have helped it.
    """
    slowed = [*timed.state.throttling, *timed.state.crowding]
    found = timed.load.scatter
    if found > max_scatter:
        slowed.append(f"the rounds of this run scatter by {found:.1%}; at most {max_scatter:.0%} is allowed")
    return _quickened(timed.load) + ([] if kept else slowed)


def _why_unknown(figure: str) -> str:
    if figure in ("request_goodput", "slo_attainment"):
        return "needs speed.slo"
    return "does not exist where every answer has one token"


def _accepted(
    trial: Trial, name: str, level: Level, timed: Timed, rules: SpeedRules
) -> Iterator[SpeedVerdict]:
    """Against the accepted record; not while a run is being accepted."""
    if rules.max_slowdown is None or trial.options.accepting:
        return
    load = timed.load
    try:
        cell = recorded_cell(trial, name, level, load.workload)
    except BaselineError as error:
        yield SpeedVerdict(
            against="accepted",
            figure=load.comparison_figure,
            status="refused",
            bound=1 + rules.max_slowdown,
            bound_side="max",
            sentence=str(error),
        )
        return
    verdict = decide_slowdown(
        accepted=[run.figures[load.comparison_figure] for run in cell.runs],
        measured=load.times,
        max_slowdown=rules.max_slowdown,
        max_scatter=speed_config(trial).max_scatter,
        disturbances=doubts(timed),
    )
    yield SpeedVerdict(
        against="accepted",
        figure=load.comparison_figure,
        status=verdict.status,
        value=verdict.ratio.value,
        bound=verdict.limit,
        bound_side="max",
        interval=(verdict.ratio.low, verdict.ratio.high),
        noise=verdict.noise,
        runs=verdict.runs,
        spread=verdict.spread,
        sentence=verdict.sentence + ("" if verdict.runs >= MIN_RUNS else _too_few_runs(trial)),
        reasons=list(verdict.reasons),
    )


def _too_few_runs(trial: Trial) -> str:
    return f" (how runs differ shows in {MIN_RUNS} or more: {trial.add_times_command})"


def recorded_cell(trial: Trial, name: str, level: Level, workload: Workload) -> RecordedCell:
    """What the record holds of the cell; raises BaselineError where it cannot be compared."""
    record = record_of(trial)
    rows = differences(record.fingerprint, fingerprint_of(trial))
    if rows:
        raise BaselineError(
            "the record was measured on another machine or server, so times cannot be compared:\n"
            + two_columns([(fact, str(stored), str(now)) for fact, stored, now in rows], "now")
            + "\nCompare there, hold the time against the reference instead "
            f"(speed.min_speedup_vs_reference), or record it here: {trial.accept_command}"
        )
    cell = record.cells.get(cell_name(name, level))
    if cell is None:
        known = ", ".join(record.cells) or "nothing"
        raise BaselineError(
            f"the record has no {cell_name(name, level)} (it has {known}). Record it: {trial.accept_command}"
        )
    if cell.workload != workload.digest or any(
        workload.comparison_figure not in run.figures for run in cell.runs
    ):
        raise BaselineError(
            f"{cell_name(name, level)} was recorded with other requests: the scenario, suite.seed or the "
            "replayed "
            f"file have changed since. Record it again: {trial.accept_command}"
        )
    return cell


def record_of(trial: Trial) -> SpeedRecord:
    """The accepted record; raises BaselineError with the command that writes it."""
    return trial.once(
        "speed record", lambda: read_speed_record(trial.accepted_folder(), command=trial.accept_command)
    )


def _reference(trial: Trial, timed: Timed, rules: SpeedRules) -> Iterator[SpeedVerdict]:
    if rules.min_speedup_vs_reference is None or timed.reference is None:
        return
    if timed.reference.broken(speed_config(trial).allowed_errors):
        yield SpeedVerdict(
            against="reference",
            figure=timed.load.comparison_figure,
            status="refused",
            bound=rules.min_speedup_vs_reference,
            bound_side="min",
            sentence=f"{timed.reference.failed} requests of the reference failed in a round",
            reasons=timed.reference.error_examples,
        )
        return
    alone = [] if timed.alone is None else timed.alone.disturbances
    verdict = decide_speedup(
        reference=timed.reference.times,
        measured=timed.load.times,
        minimum=rules.min_speedup_vs_reference,
        max_scatter=speed_config(trial).max_scatter,
        paired=timed.paired,
        disturbances=[*doubts(timed, paired=timed.paired), *(f"reference: {text}" for text in alone)],
    )
    yield SpeedVerdict(
        against="reference",
        figure=timed.load.comparison_figure,
        status=verdict.status,
        value=verdict.ratio.value,
        bound=verdict.minimum,
        bound_side="min",
        interval=(verdict.ratio.low, verdict.ratio.high),
        sentence=verdict.sentence,
        reasons=list(verdict.reasons),
    )
