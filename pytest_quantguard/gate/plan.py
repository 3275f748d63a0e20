"""Which checks a config asks for, in the order in which they run. Pure: knows neither servers nor pytest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from pytest_quantguard.baseline.recording import CellKey
from pytest_quantguard.config import Bound, DriftBound, GateConfig, SelfCheck, WarmCacheCheck
from pytest_quantguard.config_speed import Level
from pytest_quantguard.generation.metrics import EVERYTHING
from pytest_quantguard.results import Kind

SelfComparison = Literal["decode_against_prefill", "batch", "warm_cache", "repeat"]
SELF_COMPARISONS: tuple[SelfComparison, ...] = get_args(SelfComparison)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold, and one test.

    name: the rest of the test's id after the config's name; unique within a config.
    cell: what must be measured; None where the check is about the server as a whole.
    bound: of accuracy and generation. task: of generation, "all" for all together. drift_bound: of drift in a
    metric against BF16. self_check: of self-consistency. speed: scenario and level that are timed.
    """

    kind: Kind
    name: str
    cell: CellKey | None = None
    metric: str | None = None
    bound: Bound | None = None
    drift_bound: DriftBound | None = None
    self_check: SelfCheck | None = None
    task: str | None = None
    speed: tuple[str, Level] | None = None
    comparison: SelfComparison | None = None


def plan_checks(config: GateConfig) -> tuple[Check, ...]:
    """Every check: first who answers and whether answers can be used, then the numbers, then the clock."""
    return (
        Check("server", "server"),
        *_validity(config),
        *_accuracy(config),
        *_self_consistency(config),
        *_drift(config),
        *_generation(config),
        *_speed(config),
    )


def _cells(config: GateConfig) -> Iterator[CellKey]:
    return (CellKey(phase, batch_size) for phase, batch_size in config.cells())


def _validity(config: GateConfig) -> Iterator[Check]:
    for cell in _cells(config):
        yield Check("validity", f"validity[{cell}]", cell)
    if config.expects_quantization:
        yield Check("validity", "validity[quantized]")


def _accuracy(config: GateConfig) -> Iterator[Check]:
    for cell in _cells(config):
        for metric, bound in config.accuracy.bounds_of(*cell).items():
            yield Check("accuracy", f"accuracy[{cell}-{metric}]", cell, metric, bound=bound)


def _self_consistency(config: GateConfig) -> Iterator[Check]:
    smallest = min(config.suite.batch_sizes)
    for comparison in SELF_COMPARISONS:
        rule: SelfCheck | None = getattr(config.self_consistency, comparison)
        if rule is None:
            continue
        for cell in _cells(config):
            if comparison == "decode_against_prefill" and (
                cell.phase != "decode" or "prefill" not in config.suite.phases
            ):
                continue
            if comparison == "batch" and cell.batch_size == smallest:
                continue
            if isinstance(rule, WarmCacheCheck) and (
                cell.batch_size != smallest or cell.phase not in rule.phases
            ):
                continue
            yield Check(
                "self_consistency",
                f"self_consistency[{cell}-{comparison}]",
                cell,
                "kl_mean",
                self_check=rule,
                comparison=comparison,
            )


def _drift(config: GateConfig) -> Iterator[Check]:
    drift = config.accuracy.drift
    if drift is None:
        return
    for cell in _cells(config):
        for metric, drift_bound in drift.bounds.items():
            yield Check("drift", f"drift[{cell}-{metric}]", cell, metric, drift_bound=drift_bound)
        for metric, bound in (drift.divergence.bounds if drift.divergence else {}).items():
            yield Check("drift", f"drift[{cell}-divergence-{metric}]", cell, metric, bound=bound)


def _generation(config: GateConfig) -> Iterator[Check]:
    if config.generation is None:
        return
    for metric, bound in config.generation.bounds.items():
        yield Check("generation", f"generation[{metric}]", metric=metric, bound=bound, task=EVERYTHING)
    for task, settings in config.generation.tasks.items():
        for metric, bound in settings.bounds.items():
            yield Check("generation", f"generation[{task}-{metric}]", metric=metric, bound=bound, task=task)


def _speed(config: GateConfig) -> Iterator[Check]:
    if config.speed is None:
        return
    for name, level in config.speed.cells():
        yield Check("speed", f"speed[{name}-{level}]", speed=(name, level))
    if config.speed.score is not None:
        yield Check("speed", "speed[score]", metric="score")
