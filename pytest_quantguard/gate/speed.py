"""One scenario at one level as a test of pytest-benchmark's: timed, judged, and put into the result."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pytest_quantguard.gate.plan import Check
from pytest_quantguard.gate.speed_judge import judge_times
from pytest_quantguard.gate.speed_message import describe_speed
from pytest_quantguard.gate.speed_times import Prepared, Timed, speed_config, take_times
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.results import CheckResult, Outcome, SpeedResult
from pytest_quantguard.stats.figures import FIGURES
from pytest_quantguard.stats.speed import median_interval


def time_cell(trial: Trial, check: Check, prepared: Prepared, benchmark: Any) -> CheckResult:
    """Time what was prepared for `check` with pytest-benchmark's fixture, and judge it.

    Raises `QuantguardError` where the server ends meanwhile.
    """
    assert check.speed is not None
    name, level = check.speed
    benchmark.group = f"{trial.config.name}: {name}"
    timed = take_times(trial, prepared, benchmark)
    trial.keep(("speed", name, level), timed)
    result = _result(trial, check, timed)
    benchmark.extra_info.update(
        result.figures,
        scenario=name,
        level=str(level),
        requests=result.requests,
        concurrency=result.concurrency,
        warmup_rounds=result.warmup_rounds,
        verdicts={f"{verdict.against} {verdict.figure}": verdict.status for verdict in result.verdicts},
    )
    return _as_check(trial, check, result)


def _result(trial: Trial, check: Check, timed: Timed) -> SpeedResult:
    assert check.speed is not None
    name, level = check.speed
    load, workload = timed.load, timed.load.workload
    return SpeedResult(
        scenario=name,
        level=str(level),
        requests=len(workload.requests),
        concurrency=load.concurrency,
        request_rate=speed_config(trial).scenario(name).request_rate,
        input_tokens=workload.input_tokens,
        output_tokens=workload.output_tokens,
        rounds=len(load.times),
        warmup_rounds=load.warmup,
        steady=load.steady,
        compared=load.comparison_figure,
        figures=load.medians(),
        intervals={figure: median_interval(values) for figure, values in load.figures.items()},
        by_round=load.figures,
        scatter=load.scatter,
        errors=load.failed,
        error_examples=load.error_examples,
        cached_tokens=load.cached_tokens,
        reference_rounds=timed.reference.times if timed.reference is not None else [],
        interleaved=timed.paired,
        machine=asdict(timed.state) | {"disturbances": timed.state.disturbances},
        verdicts=judge_times(trial, name, level, timed),
    )


def _as_check(trial: Trial, check: Check, speed: SpeedResult) -> CheckResult:
    failed = any(verdict.failed for verdict in speed.verdicts)
    doubtful = any(verdict.status == "inconclusive" for verdict in speed.verdicts)
    outcome: Outcome = "passed"
    if failed or (doubtful and speed_config(trial).on_inconclusive == "fail"):
        outcome = "failed"
    elif doubtful:
        outcome = "warned"
    result = CheckResult(
        id=check.name,
        kind=check.kind,
        metric=speed.compared,
        unit=FIGURES[speed.compared].unit,
        value=speed.figures.get(speed.compared),
        interval=speed.intervals.get(speed.compared),
        outcome=outcome,
        speed=speed,
    )
    return result.model_copy(update={"message": describe_speed(trial, result, speed)})
