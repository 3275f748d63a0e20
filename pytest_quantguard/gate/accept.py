"""Stores a run's answers as the accepted run, if nothing spoke against them, or adds its times to one."""

from __future__ import annotations

from pathlib import Path

from pytest_quantguard.baseline.recording import Cell, CellKey
from pytest_quantguard.baseline.remote import RemoteFolder, check_pushable, push
from pytest_quantguard.baseline.speed_record import ATTACHMENT, dump_speed_record, write_speed_record
from pytest_quantguard.baseline.store import write_recording
from pytest_quantguard.errors import BaselineError, ConfigError
from pytest_quantguard.gate.generation import known_generation
from pytest_quantguard.gate.judge import judge
from pytest_quantguard.gate.machine import candidate_device
from pytest_quantguard.gate.plan import plan_checks
from pytest_quantguard.gate.portable import portable
from pytest_quantguard.gate.speed_accept import Cell as SpeedCell
from pytest_quantguard.gate.speed_accept import accepted_times, added_times, require_addable
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.measure.capture import accept
from pytest_quantguard.results import Kind


def accept_run(trial: Trial) -> str:
    """Judge everything but drift and speed (generated answers if there are any), then store; returns a
    sentence for the user.

    Raises `BaselineError` that names the checks which failed: a run that is not within budget is no model
    for later ones.
    """
    remote = _writable_remote(trial, trial.accept_command)
    left_out: set[Kind] = {"drift", "speed"}
    if known_generation(trial) is None:
        left_out.add("generation")  # Slow: asked only where this run's selection asked it.
    failed = [
        result.id
        for result in (
            judge(trial, check) for check in plan_checks(trial.config) if check.kind not in left_out
        )
        if result.outcome == "failed"
    ]
    if failed:
        named = ", ".join(failed[:5]) + (", ..." if len(failed) > 5 else "")
        raise BaselineError(
            f"Not accepted: {len(failed)} checks failed ({named}). Mend them or change their bounds, then "
            "accept again."
        )
    trial.server().check_alive()  # One that died under the load is no model, whatever it answered before.
    measured = trial.measured()
    firsts = [measurement for (_, warm, repeat), measurement in measured.items() if not warm and repeat == 0]
    repeats: dict[CellKey, list[Cell]] = {}
    for (key, warm, repeat), measurement in measured.items():
        if not warm and repeat > 0:
            repeats.setdefault(key, []).append(measurement.cell)
    recording = accept(
        firsts,
        config=portable(trial.config, trial.config_path.parent),
        capabilities=trial.server().capabilities,
        device=candidate_device(trial),
        baseline=trial.baseline(),
        repeats=repeats,
    )
    folder = trial.accepted_folder()
    times = accepted_times(trial, folder)
    attached = {} if times.record is None else {ATTACHMENT: dump_speed_record(times.record)}
    write_recording(folder, recording, attached)
    place = _stored(trial, folder, remote)
    then = (
        "the config does not judge drift yet: accuracy: {drift: {kl_mean: {max_increase: 10%}}}"
        if trial.config.accuracy.drift is None
        else "drift is judged against it from now on"
    )
    said = f"accepted run written to {place}; {then}."
    return f"{said} {times.sentence}".rstrip()


def prepare_adding(trial: Trial, cell: SpeedCell) -> None:
    """Refuse before anything is timed where the times of `cell` could not be added to the accepted run.

    Raises `QuantguardError` with the command that helps.
    """
    trial.once("writable remote", lambda: _writable_remote(trial, trial.add_times_command))
    require_addable(trial, cell)


def add_times(trial: Trial) -> str:
    """Add the times of this session to those of the accepted run, as one more run; returns a sentence for the
    user. Raises `BaselineError` where they are not fit for that.
    """
    if trial.config.speed is None:
        raise ConfigError(f"{trial.config_path} has no `speed` section, so that there are no times to add.")
    remote = _writable_remote(trial, trial.add_times_command)
    times, folder = added_times(trial), trial.accepted_folder()
    assert times.record is not None
    write_speed_record(folder, times.record)
    return f"{_stored(trial, folder, remote)}: {times.sentence}"


def _writable_remote(trial: Trial, command: str) -> RemoteFolder | None:
    """The baseline's URL if it has one; raises `BaselineError` where nothing may or can be stored there."""
    remote = trial.remote_baseline()
    if remote is not None:
        if not trial.options.push:
            raise BaselineError(
                f"Not stored: `baseline` is {remote.url}. Say that the accepted run may be replaced there: "
                f"{command}"
            )
        check_pushable(RemoteFolder(remote.url))
    return remote


def _stored(trial: Trial, folder: Path, remote: RemoteFolder | None) -> str:
    """Where the accepted run in `folder` is now: there, or at the URL to which it is pushed."""
    if remote is None:
        return str(folder)
    accepted = remote.child(f"accepted/{folder.name}")
    push(folder, accepted, trial.progress)
    return accepted.url
