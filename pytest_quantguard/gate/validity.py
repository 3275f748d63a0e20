"""Whether a cell's answers can be used at all: judged before any number of it, and required by every
number.
"""

from __future__ import annotations

from pytest_quantguard.baseline.recording import Cell, CellKey
from pytest_quantguard.errors import InvalidAnswerError
from pytest_quantguard.gate.diagnose import diagnose_trial
from pytest_quantguard.gate.message import bullets, describe_failure, labelled
from pytest_quantguard.gate.plan import Check
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.logprobs.belonging import check_quantized, check_row_identity, match_vocabularies
from pytest_quantguard.logprobs.guards import Violation, check_rows
from pytest_quantguard.results import CheckResult
from pytest_quantguard.serving.quantized import why_unquantized

SHOWN_VIOLATIONS = 5


def judge_validity(trial: Trial, check: Check) -> CheckResult:
    """No guard fires for the cell's answers; answers that the client refused are a failure too."""
    key = check.cell
    assert key is not None
    result = CheckResult(
        id=check.name, kind=check.kind, phase=key.phase, batch_size=key.batch_size, outcome="passed"
    )
    try:
        violations = violations_of(trial, key)
    except InvalidAnswerError as error:
        trial.told(error, f"{trial.config.name}::{check.name}")
        details = bullets("diagnosis", diagnose_trial(trial))
        return _failed(trial, result, f"The answers cannot be used. {error}", details)
    if not violations:
        return result
    first, *others = violations
    details = bullets("also", [violation.message for violation in others[:SHOWN_VIOLATIONS]])
    if len(others) > SHOWN_VIOLATIONS:
        details += labelled("", f"and {len(others) - SHOWN_VIOLATIONS} more")
    details += bullets("diagnosis", diagnose_trial(trial))
    result = result.model_copy(
        update={"extra": {"guards": sorted({violation.guard for violation in violations})}}
    )
    return _failed(trial, result, f"The answers cannot be used. {first.message}.", details)


def judge_quantized(trial: Trial, check: Check) -> CheckResult:
    """A candidate that should be quantized differs from the reference by more than noise, in some cell, and
    shows a sign of quantization in what it says of itself or in its model folder.

    Not in each cell: a quantized KV cache need not show in prefill.
    """
    fired: list[Violation] = []
    result = CheckResult(id=check.name, kind=check.kind, outcome="passed")
    trial.baseline()  # without it no server is started
    evidence = why_unquantized(trial.server().capabilities)
    if evidence is not None:
        return _failed(trial, result, f"Not quantized. {evidence}.", [])
    for phase, batch_size in trial.config.cells():
        key = CellKey(phase, batch_size)
        require_valid(trial, key)
        floor = trial.baseline().noise_floor.get(key, {}).get("kl_mean", 0.0)
        value = trial.comparison(key).divergence.aggregate("kl_mean")
        violation = check_quantized(kl_mean=value, noise_floor=floor, cell=str(key))
        if violation is None:
            return result
        fired.append(violation)
    said = trial.server().capabilities
    details = [
        *labelled(
            "the server says",
            f"model {said.model_path}, quantization {said.quantization}, KV cache {said.kv_cache_dtype}",
        ),
        *bullets("also", [violation.message for violation in fired[1:SHOWN_VIOLATIONS]]),
    ]
    return _failed(trial, result, f"Not quantized. {fired[0].message}.", details)


def violations_of(trial: Trial, key: CellKey, *, warm: bool = False, repeat: int = 0) -> list[Violation]:
    """Every guard that fires for one measurement. Raises `InvalidAnswerError` for answers the client
    refused.
    """
    measurement = trial.measurement(key, warm=warm, repeat=repeat)

    def checked() -> list[Violation]:
        return _check(trial, trial.baseline().cells[key], measurement.cell)

    return trial.once(("violations", key, warm, repeat), checked)


def require_valid(trial: Trial, key: CellKey, *, warm: bool = False, repeat: int = 0) -> None:
    """Raise where a guard fired: no number of such a cell may be called passed."""
    violations = violations_of(trial, key, warm=warm, repeat=repeat)
    if violations:
        raise trial.once(
            ("invalid", key, warm, repeat),
            lambda: InvalidAnswerError(
                f"{key} is not judged: its answers cannot be used. {violations[0].message}"
            ),
        )


def _check(trial: Trial, baseline: Cell, candidate: Cell) -> list[Violation]:
    prompts, cell = trial.baseline().prompts, str(candidate.key)
    names = [prompt.id for prompt in prompts]
    violations = check_rows(
        candidate.rows,
        prompt_ids=names,
        reference_ids=[prompt.span_ids for prompt in prompts],
        cell=cell,
        captured_mass_floor=trial.config.validity.min_captured_mass,
    )
    match = match_vocabularies(baseline.rows, candidate.rows, cell=cell)
    if isinstance(match, Violation):
        return [*violations, match]
    if any(violation.guard != "reference_logprob" for violation in violations):
        return violations
    # Rows that contradict their own reference token may be another prompt's: that is the better explanation.
    return [*check_row_identity(baseline.rows, candidate.rows, prompt_ids=names, cell=cell), *violations]


def _failed(trial: Trial, result: CheckResult, headline: str, details: list[str]) -> CheckResult:
    message = describe_failure(trial, result, headline, details)
    return result.model_copy(update={"outcome": "failed", "message": message})
