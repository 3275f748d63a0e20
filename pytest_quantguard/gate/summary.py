"""What a trial knows beyond its checks, as plain models: who answered, what each cell cost, what was
noted.
"""

from __future__ import annotations

import platform
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

import pytest_quantguard
from pytest_quantguard.baseline.recording import CellKey, Recording
from pytest_quantguard.config import AttachServer, EmulatorServer
from pytest_quantguard.errors import QuantguardError
from pytest_quantguard.gate.details import details_of
from pytest_quantguard.gate.diagnose import diagnose_trial
from pytest_quantguard.gate.generation_summary import summarize_generation
from pytest_quantguard.gate.machine import known_fingerprint
from pytest_quantguard.gate.prompt_set import describe_prompts
from pytest_quantguard.gate.revision import revision_of
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.logprobs.buckets import by_position, by_task
from pytest_quantguard.logprobs.divergence import Divergence
from pytest_quantguard.paths import shown_path
from pytest_quantguard.results import CellResult, ServerResult, TrialResult

HIDDEN = "***"
PART_METRICS = ("kl_mean", "agreement")


def outline(trial: Trial) -> TrialResult:
    """Who is on trial, by which config, against what; no measurement."""
    return TrialResult(
        name=trial.config.name,
        config_path=str(trial.config_path),
        config=_without_secrets(trial.config.model_dump(mode="json")),
        started=trial.started.isoformat(timespec="seconds"),
        candidate=describe_candidate(trial),
        baseline_path=shown_path(trial.config.baseline),
        baseline=_manifest(trial.known_baseline()),
        accepted=_manifest(trial.known_accepted()),
        environment={**_environment(), **revision_of(trial.config_path.parent), **known_fingerprint(trial)},
    )


def summarize(trial: Trial) -> TrialResult:
    """Everything that is known so far; asks the server for texts of tokens only, and never fails."""
    cells, running = _cells(trial), trial.running_server()
    prompts = describe_prompts(trial)
    notes = [
        *trial.notes,
        *(running.notes if running is not None else ()),
        *filter(None, [running.end_note() if running is not None else None]),
        *(note for cell in cells for note in cell.notes),
    ]
    try:
        diagnosis = diagnose_trial(trial)
    except QuantguardError as error:
        diagnosis = []
        notes.append(f"no diagnosis: {error}")
    measured = {
        "cells": cells,
        "details": details_of(trial),
        "generation": summarize_generation(trial),
        "prompts": prompts,
        "diagnosis": diagnosis,
        "notes": list(dict.fromkeys(notes)),
    }
    return outline(trial).model_copy(update=measured)


def describe_candidate(trial: Trial) -> ServerResult:
    """The server on trial by its config, and by what it says of itself once it runs."""
    config, running = trial.config.candidate, trial.running_server()
    said: dict[str, Any] = asdict(running.capabilities) if running is not None else {}
    command = running.command if running is not None else None
    expected = config.expect if isinstance(config, AttachServer) else config
    return ServerResult(
        backend=config.backend,
        model_path=expected.model_path or said.get("model_path"),
        dtype=said.get("dtype") if isinstance(config, AttachServer) else config.dtype,
        quantization=expected.quantization or said.get("quantization"),
        kv_cache_dtype=expected.kv_cache_dtype or said.get("kv_cache_dtype"),
        faults=config.faults if isinstance(config, EmulatorServer) else [],
        command=shlex.join(command) if command else None,
        seconds_to_ready=round(running.seconds_to_ready, 2) if running is not None and command else None,
        url=running.url if running is not None else None,
        log=str(trial.server_log) if command else None,
        capabilities=_without_secrets(said),
    )


def _cells(trial: Trial) -> list[CellResult]:
    found = []
    baseline = trial.known_baseline()
    tasks = [prompt.task for prompt in baseline.prompts] if baseline is not None else []
    for (key, warm, repeat), measurement in trial.measured().items():
        cost = measurement.cost
        try:
            comparison = trial.comparison(key, warm=warm, repeat=repeat)
        except QuantguardError:
            comparison = None  # The check of this cell has reported why.
        found.append(
            CellResult(
                phase=key.phase,
                batch_size=key.batch_size,
                mode=measurement.mode,
                warm=warm,
                repeat=repeat,
                requests=cost.requests,
                seconds=round(cost.seconds, 4),
                input_tokens=cost.input_tokens,
                output_tokens=cost.output_tokens,
                cached_tokens=cost.cached_tokens,
                metrics=comparison.divergence.aggregates() if comparison is not None else {},
                by_position=_parts(by_position(comparison.divergence)) if comparison is not None else {},
                by_task=_parts(by_task(comparison.divergence, tasks)) if comparison is not None else {},
                standard_errors=_standard_errors(trial, key) if not warm and repeat == 0 else {},
                notes=[*measurement.notes, *(comparison.notes if comparison is not None else ())],
            )
        )
    return found


def _standard_errors(trial: Trial, key: CellKey) -> dict[str, float]:
    """Of the metrics whose intervals a check has asked for; a suite of one prompt has none."""
    intervals = trial.known("intervals").get(("intervals", "comparison", key), {})
    return {name: interval.standard_error for name, interval in intervals.items() if interval is not None}


def _parts(parts: Mapping[str, Divergence]) -> dict[str, dict[str, float]]:
    return {label: {name: part.aggregate(name) for name in PART_METRICS} for label, part in parts.items()}


def _manifest(recording: Recording | None) -> dict[str, Any] | None:
    return (
        None
        if recording is None
        else recording.manifest.model_dump(mode="json", exclude={"files", "noise_floor"})
    )


def _environment() -> dict[str, Any]:
    return {
        "pytest_quantguard": pytest_quantguard.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "system": platform.system(),
    }


def _without_secrets(value: Any, key: str = "") -> Any:
    """Mask what may be a secret by its key; environment variables are all masked."""
    if isinstance(value, dict):
        return {
            name: _without_secrets(item, "env" if key == "env" else str(name)) for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_without_secrets(item, key) for item in value]
    secret = key == "env" or any(
        word in key.lower() for word in ("api_key", "secret", "password", "token_file")
    )
    return HIDDEN if secret and value is not None else value
