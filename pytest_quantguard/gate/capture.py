"""Records the baseline of a config: starts the reference, captures, writes."""

from __future__ import annotations

from pathlib import Path

from pytest_quantguard.baseline.remote import RemoteFolder, check_pushable, push
from pytest_quantguard.baseline.store import write_recording
from pytest_quantguard.errors import ConfigError
from pytest_quantguard.gate.portable import portable
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.measure.capture import capture
from pytest_quantguard.serving.launch import start


def record_baseline(trial: Trial) -> str:
    """Capture and store; returns a sentence for the user. Raises `QuantguardError` with the cause."""
    config = trial.config
    if config.reference is None:
        raise ConfigError(
            f"{trial.config_path}: there is no `reference`, so no baseline can be captured. Add the server "
            "of the "
            "unquantized model: reference: {backend: sglang, model_path: ..., dtype: bfloat16}."
        )
    remote, folder = trial.remote_baseline(), recorded_folder(trial)
    _require_place(trial, remote)
    suite = trial.suite()
    trial.progress(f"starting the reference ({config.reference.backend})")
    with start(
        config.reference,
        log_path=trial.options.output / "reference.log",
        worker=trial.options.worker,
        progress=trial.progress,
    ) as server:
        recording = capture(
            server, suite, portable(config, trial.config_path.parent), progress=trial.progress
        )
    write_recording(folder, recording)
    pinned = "" if remote is None else _push(trial, folder, remote)
    return (
        f"baseline written to {config.baseline}: {len(recording.prompts)} prompts, "
        f"{config.suite.score_tokens} scored tokens each, {len(recording.cells)} cells. Run the gate without "
        f"the update flag to use it.{pinned}"
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
