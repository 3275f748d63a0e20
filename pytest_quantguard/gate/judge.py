"""From measurements to a verdict: one function per kind of check, the same for tests, commands and selftest.

Raises `QuantguardError` where a check cannot be judged; a check that was judged returns its result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pytest_quantguard.baseline.recording import CellKey
from pytest_quantguard.config import Decision, DriftConfig, Increase
from pytest_quantguard.gate.diagnose import diagnose_trial
from pytest_quantguard.gate.generation_judge import judge_generation
from pytest_quantguard.gate.machine import candidate_device
from pytest_quantguard.gate.message import (
    bullets,
    describe_failure,
    describe_tasks,
    describe_worst,
    labelled,
    number,
)
from pytest_quantguard.gate.plan import Check
from pytest_quantguard.gate.speed_score import judge_score
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.gate.validity import judge_quantized, judge_validity, require_valid
from pytest_quantguard.gate.verdicts import detectable_change, require_judged, result_of, without_figures
from pytest_quantguard.logprobs.divergence import Divergence
from pytest_quantguard.logprobs.metrics import METRICS, Metric, metric_change, metric_intervals
from pytest_quantguard.measure.cells import CellMeasurement
from pytest_quantguard.measure.consistency import SelfComparison, compare_with_itself
from pytest_quantguard.measure.drift import DriftMeasurement, measure_drift
from pytest_quantguard.measure.identity import describe_server, environment_changes
from pytest_quantguard.results import CheckResult, Kind
from pytest_quantguard.stats.bootstrap import Interval
from pytest_quantguard.stats.decision import Verdict, decide, decide_drift
from pytest_quantguard.stats.paired import PairedChange


def judge(trial: Trial, check: Check) -> CheckResult:
    """What `check` found on `trial`. Raises `QuantguardError` with the cause where it cannot be judged."""
    return JUDGES[check.kind](trial, check)


def _judge_server(trial: Trial, check: Check) -> CheckResult:
    """The server runs, is what the config says, and there is a baseline that belongs to the config."""
    trial.baseline()
    server = trial.server()
    said = server.capabilities
    return CheckResult(
        id=check.name,
        kind=check.kind,
        outcome="passed",
        message=f"{said.kind} {said.version or ''}, {said.model_path}, quantization {said.quantization}",
    )


def _judge_validity(trial: Trial, check: Check) -> CheckResult:
    return judge_quantized(trial, check) if check.cell is None else judge_validity(trial, check)


def _judge_accuracy(trial: Trial, check: Check) -> CheckResult:
    """A metric against BF16 within its bound."""
    key, metric = _parts(check)
    assert check.bound is not None
    require_valid(trial, key)
    divergence = trial.comparison(key).divergence
    interval = intervals_of(trial, ("comparison", key), divergence).get(metric.name)
    verdict = decide(
        metric=metric.name,
        value=metric.of(divergence),
        bound=check.bound.limit,
        better=metric.better,
        decision=check.bound.decision or trial.config.accuracy.decision,
        interval=interval,
        noise_floor=trial.baseline().noise_floor.get(key, {}).get(metric.name),
        smallest_detectable=detectable_change(interval),
    )
    jitter = _jitter(trial, key, metric)
    result = result_of(check, verdict, metric.unit, {"repeats": jitter} if jitter else {})
    if verdict.passed:
        return result
    require_judged(trial, verdict, f"accuracy.{metric.name}")
    cells = trial.baseline().cells[key], trial.measurement(key).cell
    details = [
        *(labelled("own jitter", _spread(jitter)) if jitter else []),
        *describe_tasks(trial, metric, divergence),
        *bullets("diagnosis", diagnose_trial(trial)),
        *describe_worst(trial, metric, divergence, *cells, names=("bf16", "candidate")),
    ]
    return _failed(trial, result, f"{_where(key)}: {_headline(verdict, check.bound.limit, metric)}.", details)


def _jitter(trial: Trial, key: CellKey, metric: Metric) -> list[float]:
    """The metric in each repeat, if the cell is measured more than once."""
    if trial.options.repeats < 2:
        return []
    return [
        metric.of(trial.comparison(key, repeat=repeat).divergence) for repeat in range(trial.options.repeats)
    ]


def _spread(values: list[float]) -> str:
    return f"{number(min(values))} to {number(max(values))} in {len(values)} measurements of the candidate"


def _judge_self_consistency(trial: Trial, check: Check) -> CheckResult:
    """Two ways of asking the candidate that should give the same: the paired change of KL to BF16 first."""
    assert check.cell is not None
    assert check.self_check is not None
    assert check.comparison is not None
    rule, metric = check.self_check, METRICS["kl_mean"]
    compared = _compare_with_itself(trial, check)
    assert compared.before is not None
    assert compared.after is not None
    change = metric_change(compared.before, compared.after, metric.name)
    verdict = _decide_increase(metric, change, rule.max_increase, rule.decision)
    between = compared.between.aggregate("kl_mean")
    beyond = rule.max_kl is not None and between > rule.max_kl
    figures = {
        "comparison": check.comparison,
        "before": change.before,
        "after": change.after,
        "kl_between": between,
        "max_kl": rule.max_kl,
        "identical_share": compared.bits.share,
        "evidence": list(compared.evidence),
    }
    result = result_of(check, verdict, metric.unit, figures)
    if verdict.passed and not beyond:
        return result
    require_judged(trial, verdict, f"self_consistency.{check.comparison}.max_increase")
    headline = f"{compared.evidence[0]}: {_grown(metric, change, rule.max_increase)}."
    if verdict.passed:
        headline = (
            f"{compared.evidence[0]}: the KL between them is {number(between)}; at most {rule.max_kl} is "
            f"allowed (self_consistency.{check.comparison}.max_kl)."
        )
    details = [
        *labelled(
            "KL between", f"{number(between)}; {compared.bits.share:.1%} of the rows are bit-identical"
        ),
        *bullets("evidence", compared.evidence[1:]),
        *bullets("diagnosis", diagnose_trial(trial)),
    ]
    return _failed(trial, result, headline, details)


def _compare_with_itself(trial: Trial, check: Check) -> SelfComparison:
    """The comparison; of several repeats, the one that lies farthest from the first."""
    key, comparison = check.cell, check.comparison
    assert key is not None
    assert comparison is not None
    one, *others = _self_measurements(trial, key, comparison)
    for cell, warm, repeat in (one, *others):
        require_valid(trial, cell, warm=warm, repeat=repeat)

    def compare_to(other: tuple[CellKey, bool, int]) -> SelfComparison:
        baseline = trial.baseline().cells
        return compare_with_itself(
            comparison, _measured(trial, one), _measured(trial, other), baseline=baseline
        )

    def compared() -> SelfComparison:
        return max(map(compare_to, others), key=lambda found: found.between.aggregate("kl_mean"))

    return trial.once(("self", key, comparison), compared)


def _measured(trial: Trial, part: tuple[CellKey, bool, int]) -> CellMeasurement:
    cell, warm, repeat = part
    return trial.measurement(cell, warm=warm, repeat=repeat)


def _self_measurements(trial: Trial, key: CellKey, comparison: str) -> list[tuple[CellKey, bool, int]]:
    """(cell, warm, repeat) of what is held against, then of what is on trial."""
    match comparison:
        case "decode_against_prefill":
            return [(CellKey("prefill", key.batch_size), False, 0), (key, False, 0)]
        case "batch":
            return [(CellKey(key.phase, min(trial.config.suite.batch_sizes)), False, 0), (key, False, 0)]
        case "warm_cache":
            return [(key, False, 0), (key, True, 0)]
        case _:
            return [(key, False, repeat) for repeat in range(max(2, trial.options.repeats))]


def _judge_drift(trial: Trial, check: Check) -> CheckResult:
    """The candidate against its accepted run."""
    key, metric = _parts(check)
    drift = trial.config.accuracy.drift
    assert drift is not None
    accepted, baseline = trial.accepted(), trial.baseline()
    if check.drift_bound is None and (elsewhere := _on_another_device(trial, drift)):
        return without_figures(check, "skipped", elsewhere, {"comparison": f"divergence {metric.name}"})
    require_valid(trial, key)
    moved = trial.once(
        ("drift", key),
        lambda: measure_drift(trial.measurement(key).cell, accepted=accepted, baseline=baseline),
    )
    change = metric_change(moved.before, moved.after, metric.name)
    if check.drift_bound is not None:
        allowed = check.drift_bound.max_increase
        verdict = _decide_increase(metric, change, allowed, check.drift_bound.decision or drift.decision)
        headline = f"since the accepted run {_grown(metric, change, allowed)}"
    else:
        assert check.bound is not None
        verdict = decide(
            metric=f"{metric.name} from the accepted run",
            value=metric.of(moved.between),
            bound=check.bound.limit,
            better=metric.better,
            decision=check.bound.decision or drift.decision,
            interval=intervals_of(trial, ("drift", key), moved.between).get(metric.name),
        )
        headline = f"accepted run against candidate: {_headline(verdict, check.bound.limit, metric)}"
    result = result_of(check, verdict, metric.unit, _drift_figures(check, change, moved))
    if verdict.passed:
        return result
    require_judged(trial, verdict, f"accuracy.drift.{metric.name}")
    details = [
        *labelled("against BF16", f"{number(change.before)} accepted, {number(change.after)} now"),
        *_affected(moved),
        *bullets("changed since", _changes_since(trial)),
        *bullets("diagnosis", diagnose_trial(trial)),
        *describe_worst(
            trial,
            metric,
            moved.between,
            accepted.cells[key],
            trial.measurement(key).cell,
            names=("accepted", "candidate"),
        ),
    ]
    failed = _failed(trial, result, f"{_where(key)}: {headline}.", details)
    return failed.model_copy(update={"outcome": "warned"}) if drift.on_failure == "warn" else failed


def _on_another_device(trial: Trial, drift: DriftConfig) -> str | None:
    """Why bounds on accepted against candidate are not to be judged here; None where they are."""
    if drift.divergence is None or drift.divergence.other_device == "judge":
        return None
    accepted, now = trial.accepted().manifest.environment.get("device"), candidate_device(trial)
    if accepted is not None and accepted == now:
        return None
    return (
        f"not judged: accepted on {accepted or 'a device that is not known'}, now on "
        f"{now or 'one that is not known'} (accuracy.drift.divergence.other_device: skip). To judge it here, "
        f"accept a run here: {trial.accept_command}"
    )


def _drift_figures(check: Check, change: PairedChange, moved: DriftMeasurement) -> dict[str, Any]:
    return {
        "comparison": check.metric if check.drift_bound else f"divergence {check.metric}",
        "before": change.before,
        "after": change.after,
        "kl_between": moved.between.aggregate("kl_mean"),
        "identical_share": moved.bits.share,
        "first_affected": None if moved.first is None else moved.first.text_position,
    }


def _affected(moved: DriftMeasurement) -> list[str]:
    if moved.first is None:
        return labelled("rows", "all rows are bit-identical to the accepted run")
    first = moved.first
    text = (
        f"{moved.bits.share:.1%} are bit-identical to the accepted run; {first.prompts} prompts differ, the "
        f"first at span position {first.span_position}; with the fewest tokens before it: {first.prompt_id} "
        f"after {first.text_position} tokens"
    )
    return labelled("rows", text)


def _changes_since(trial: Trial) -> list[str]:
    """What is different about model, server and device since the accepted run."""
    server, config = trial.server(), trial.config
    said = describe_server(config.candidate, server.capabilities)
    accepted, device = trial.accepted().manifest, candidate_device(trial)
    rows = environment_changes(accepted, trial.model_record(), said, device)
    return [f"{name}: {before} -> {now}" for name, before, now in rows]


def intervals_of(
    trial: Trial, part: tuple[object, ...], divergence: Divergence
) -> Mapping[str, Interval | None]:
    """95 % intervals of all metrics of a comparison, computed once."""
    known = [name for name, metric in METRICS.items() if metric.known(divergence) > 0]
    return trial.once(("intervals", *part), lambda: metric_intervals(divergence, known))


def _decide_increase(metric: Metric, change: PairedChange, allowed: Increase, decision: Decision) -> Verdict:
    """Any share of nothing is nothing: where the value was zero, no increase at all is allowed."""
    from_zero = allowed.relative and change.relative is None
    return decide_drift(
        metric=metric.name,
        change=change,
        better=metric.better,
        max_increase=0.0 if from_zero else allowed.amount,
        relative=allowed.relative and not from_zero,
        decision=decision,
    )


def _parts(check: Check) -> tuple[CellKey, Metric]:
    assert check.cell is not None
    assert check.metric is not None
    return check.cell, METRICS[check.metric]


def _failed(trial: Trial, result: CheckResult, headline: str, details: list[str]) -> CheckResult:
    message = describe_failure(trial, result, headline, details)
    return result.model_copy(update={"outcome": "failed", "message": message})


def _headline(verdict: Verdict, limit: float, metric: Metric) -> str:
    allowed = "at most" if metric.better == "lower" else "at least"
    how = {
        "point": "",
        "proven_bad": ", beyond it with its whole interval",
        "proven_good": ", not proven to keep it",
    }
    return f"{metric.name} is {number(verdict.value)}; {allowed} {limit:g} is allowed{how[verdict.decision]}"


def _grown(metric: Metric, change: PairedChange, allowed: Increase) -> str:
    """How much worse a metric against BF16 has become, and how much it may."""
    worse = change.change if metric.better == "lower" else -change.change
    grown = f"{worse / change.before:.1%}" if allowed.relative and change.before else number(worse)
    verb = "grew" if metric.better == "lower" else "fell"
    return (
        f"{metric.name} against BF16 {verb} by {grown} ({number(change.before)} to {number(change.after)}); "
        f"at most {allowed} is allowed"
    )


def _where(key: CellKey) -> str:
    return f"{key.phase} at batch size {key.batch_size}"


JUDGES: Mapping[Kind, Callable[[Trial, Check], CheckResult]] = {
    "server": _judge_server,
    "validity": _judge_validity,
    "accuracy": _judge_accuracy,
    "self_consistency": _judge_self_consistency,
    "drift": _judge_drift,
    "generation": judge_generation,
    "speed": judge_score,
}
