"""Gathers what a trial has measured so far for the rules of `measure.diagnosis`. Asks the server nothing."""

from __future__ import annotations

from typing import Any, cast

from pytest_quantguard.baseline.recording import CellKey, Recording
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.logprobs.divergence import Divergence
from pytest_quantguard.measure.diagnosis import diagnose
from pytest_quantguard.measure.observations import LogitScale, Observations, fit_logit_scale


def diagnose_trial(trial: Trial) -> list[str]:
    """The sentences that fit what is known so far; empty where no pattern is seen."""
    baseline = trial.known_baseline()
    if baseline is None:
        return []
    cells = trial.compared()
    unusable = {
        cast(tuple[Any, ...], part)[1]: str(error).split("\n", 1)[0]
        for part, error in trial.failures("cell").items()
    }
    if not cells and not unusable:
        return []
    comparisons, drifts = trial.known("self"), trial.known("drift")
    permuted = _permuted(trial)
    seen_so_far = ("diagnosis", len(cells), len(unusable), len(comparisons), len(drifts), len(permuted))
    return trial.once(seen_so_far, lambda: _diagnose(trial, baseline, cells, unusable))


def _diagnose(
    trial: Trial, baseline: Recording, cells: dict[CellKey, Divergence], unusable: dict[CellKey, str]
) -> list[str]:
    server = trial.running_server()
    seen = Observations(
        prompts=baseline.prompts,
        cells=cells,
        noise=baseline.noise_floor,
        comparisons=list(trial.known("self").values()),
        drifts=list(trial.known("drift").values()),
        logit_scales={key: _logit_scale(trial, baseline, key) for key in cells},
        permuted=_permuted(trial),
        unusable=unusable,
        chunk_size=server.capabilities.chunked_prefill_size if server is not None else None,
    )
    return [str(diagnosis) for diagnosis in diagnose(seen)]


def _logit_scale(trial: Trial, baseline: Recording, key: CellKey) -> LogitScale:
    return trial.once(
        ("logit scale", key), lambda: fit_logit_scale(baseline.cells[key], trial.measurement(key).cell)
    )


def _permuted(trial: Trial) -> dict[CellKey, list[str]]:
    """Prompts whose rows fit another prompt better, by cell."""
    found: dict[CellKey, list[str]] = {}
    for part, violations in trial.known("violations").items():
        for violation in violations:
            if violation.guard == "row_identity" and violation.prompt is not None:
                found.setdefault(cast(tuple[Any, ...], part)[1], []).append(violation.prompt)
    return found
