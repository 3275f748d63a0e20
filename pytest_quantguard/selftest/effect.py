"""What a fault did to the answers, seen or not, and what to change where no check saw it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_quantguard.baseline.recording import Cell, CellKey
from pytest_quantguard.config import GateConfig
from pytest_quantguard.errors import QuantguardError
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.logprobs.identity import compare_bits
from pytest_quantguard.measure.comparison import compare_cells
from pytest_quantguard.results import CheckResult
from pytest_quantguard.selftest.results import Effect, FaultResult


def measure_effect(trial: Trial, clean: Mapping[CellKey, Cell]) -> Effect | None:
    """The faulty answers against the clean ones; None where no cell can be compared."""
    identical, rows = 0.0, 0
    worst: Effect | None = None
    for (key, warm, _), measurement in trial.measured().items():
        if warm or key not in clean:
            continue
        try:
            between = compare_cells(clean[key], measurement.cell).divergence
            before = compare_cells(trial.baseline().cells[key], clean[key]).divergence
            after = trial.comparison(key).divergence
        except QuantguardError:
            continue  # Answers that cannot be compared were refused by a check, which says why.
        positions = sum(part.positions for part in measurement.cell.rows)
        identical += compare_bits(clean[key].rows, measurement.cell.rows).share * positions
        rows += positions
        found = Effect(
            identical_share=1.0,
            cell=str(key),
            kl_from_clean=between.aggregate("kl_mean"),
            kl_clean=before.aggregate("kl_mean"),
            kl_faulty=after.aggregate("kl_mean"),
        )
        if worst is None or not worst.kl_from_clean >= found.kl_from_clean:
            worst = found
    return worst and worst.model_copy(update={"identical_share": identical / rows})


def advise(
    config: GateConfig, fault: FaultResult, effect: Effect | None, results: Sequence[CheckResult]
) -> str:
    """Why a fault was missed, and what would catch it. results: of every check that was judged."""
    if any(result.outcome == "warned" for result in results):
        return "drift only warns of it: accuracy.drift.on_failure is warn"
    beyond = [result for result in results if result.outcome == "passed" and _is_beyond(result)]
    if beyond:
        first = beyond[0]
        return (
            f"{first.id} is {first.value:.3g}, beyond its bound of {first.bound:g}, but its interval is not "
            f"({first.decision}): `decision: point` there, or more prompts, would catch it"
        )
    if effect is not None and effect.identical_share < 1:
        moved = (
            f"it changes {1 - effect.identical_share:.0%} of the rows, by a mean KL of at most "
            f"{effect.kl_from_clean:.2g} ({effect.cell}: {effect.kl_clean:.3g} to {effect.kl_faulty:.3g} "
            "from BF16), and every bound allows that"
        )
        if config.accuracy.drift is None:
            return f"{moved}; accuracy.drift with an accepted run would see it"
        if config.accuracy.drift.divergence is None:
            return f"{moved}; accuracy.drift.divergence, on one build and device, would see it"
        return f"{moved}; tighten accuracy.drift.divergence"
    if fault.severity == "none":
        return "it changes no answer: harmless with these parameters"
    return f"no answer that was measured changes: it shows in {fault.shows_in}{_missing(config, fault)}"


def _is_beyond(result: CheckResult) -> bool:
    if result.value is None or result.bound is None:
        return False
    return result.value > result.bound if result.bound_side == "max" else result.value < result.bound


def _missing(config: GateConfig, fault: FaultResult) -> str:
    """The key without which a fault cannot show."""
    where = fault.shows_in
    if "warm cache" in where and config.self_consistency.warm_cache is None:
        return "; switch self_consistency.warm_cache on"
    if "decode" in where and "decode" not in config.suite.phases:
        return "; add decode to suite.phases"
    if "long prompts" in where:
        return f"; suite.max_prompt_tokens is {config.suite.max_prompt_tokens}"
    if where.startswith("some "):
        return "; with --prompts all there are more that it may strike"
    if "batch size" in where:
        return f"; suite.batch_sizes is {config.suite.batch_sizes}"
    return ""
