"""Records the baseline of a config: starts the reference, captures, writes."""

from __future__ import annotations

from pathlib import Path

from pytest_quantguard.baseline.answers import ATTACHMENT, dump_answers
from pytest_quantguard.baseline.remote import RemoteFolder, check_pushable, push
from pytest_quantguard.baseline.store import read_manifest, write_recording
from pytest_quantguard.errors import ConfigError
from pytest_quantguard.gate.generation import (
    generation_prompts,
    record_answers,
    store_answers,
    stored_answers,
)
from pytest_quantguard.gate.machine import read_machine
from pytest_quantguard.gate.portable import portable
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.measure.capture import capture
from pytest_quantguard.serving.fingerprint import device_of
from pytest_quantguard.serving.launch import RunningServer, start


def record_baseline(trial: Trial) -> str:
    """Capture and store; returns a sentence for the user. Raises `QuantguardError` with the cause."""
    config = trial.config
    remote, folder = trial.remote_baseline(), recorded_folder(trial)
    _require_place(trial, remote)
    suite = trial.suite()
    if config.generation is not None:
        generation_prompts(trial)  # What is wrong with them is better known before the work than after.
    with _started_reference(trial) as server:
        assert config.reference is not None
        recording = capture(
            server,
            suite,
            portable(config, trial.config_path.parent),
            device=device_of(read_machine(server)),
            progress=trial.progress,
        )
        answers = record_answers(trial, server) if config.generation is not None else None
    attached = {} if answers is None else {ATTACHMENT: dump_answers(answers)}
    write_recording(folder, recording, attached)
    generated = f" {stored_answers(answers)}" if answers is not None else ""
    pinned = "" if remote is None else _push(trial, folder, remote)
    return (
        f"baseline written to {config.baseline}: {len(recording.prompts)} prompts, "
        f"{config.suite.score_tokens} scored tokens each, {len(recording.cells)} cells. The gate that "
        f"compares with it: `quantguard run {trial.config_path}`.{generated}{pinned}"
    )


def record_generation(trial: Trial) -> str:
    """Record only the reference's answers to the generation questions, into the baseline that is there.

    Returns a sentence for the user. Raises `QuantguardError` with the cause.
    """
    folder = trial.config.baseline
    if isinstance(folder, str):
        raise ConfigError(
            f"{trial.config_path}: `baseline` is a URL, and generated answers are added to a folder on this "
            f"machine only. Record and push the whole baseline: {trial.capture_command}"
        )
    _require_place(trial, None)
    generation_prompts(trial)
    read_manifest(folder)
    with _started_reference(trial) as server:
        answers = record_answers(trial, server)
    return store_answers(folder, answers)


def _started_reference(trial: Trial) -> RunningServer:
    reference = trial.config.reference
    if reference is None:
        raise ConfigError(
            f"{trial.config_path}: there is no `reference`, so no baseline can be captured. Add the server "
            "of the "
            "unquantized model: reference: {backend: sglang, model_path: ..., dtype: bfloat16}."
        )
    trial.progress(f"starting the reference ({reference.backend})")
    return start(
        reference,
        log_path=trial.options.output / "reference.log",
        worker=trial.options.worker,
        progress=trial.progress,
    )


def recorded_folder(trial: Trial) -> Path:
    """Where a capture writes: the baseline's folder, or for a remote one the folder that is then pushed."""
    location = trial.config.baseline
    return trial.options.output / "baseline" if isinstance(location, str) else location


def _require_place(trial: Trial, remote: RemoteFolder | None) -> None:
    """Raise before the work is done where its outcome could not be stored."""
    if remote is None and trial.options.push:
        raise ConfigError(
            f"{trial.config_path}: `baseline` is a folder, so there is nowhere to push to. Let it be a URL, "
            "or leave "
            "--push out and commit the folder."
        )
    if remote is not None and not trial.options.push:
        raise ConfigError(
            f"{trial.config_path}: `baseline` is {remote.url}. Say that it may be replaced there: "
            f"{trial.capture_command}"
        )
    if remote is not None:
        check_pushable(remote)


def _push(trial: Trial, folder: Path, remote: RemoteFolder) -> str:
    digest = push(folder, remote, trial.progress)
    return f" To pin exactly this one: baseline: {remote.url}#sha256={digest}"
