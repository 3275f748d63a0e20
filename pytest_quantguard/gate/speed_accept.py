"""What times a run leaves for later ones, when it is accepted."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from pytest_quantguard.baseline.speed_record import (
    RecordedCell,
    SpeedRecord,
    known_speed_record,
    parse_speed_record,
)
from pytest_quantguard.config_speed import Level
from pytest_quantguard.errors import BaselineError
from pytest_quantguard.gate.machine import fingerprint_of
from pytest_quantguard.gate.speed_judge import judge_times
from pytest_quantguard.gate.speed_times import Timed, cell_name, speed_config
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.measure.load.rounds import Load
from pytest_quantguard.serving.fingerprint import Fingerprint
from pytest_quantguard.stats.speed import MIN_ROUNDS

Cell = tuple[str, Level]
"""Scenario and level."""


@dataclass(frozen=True, slots=True)
class AcceptedTimes:
    """record: to be stored; None where there is nothing to store. sentence: for the user."""

    record: SpeedRecord | None
    sentence: str


def accepted_times(trial: Trial, folder: Path) -> AcceptedTimes:
    """The times of this session, added to those of `folder` that were measured under the same fingerprint.

    Cells with too few rounds for an interval are left out: nothing can be held against them. Raises
    BaselineError where a timed cell failed, or scatters so much that later runs would prove nothing.
    """
    if trial.config.speed is None:
        return AcceptedTimes(None, "")
    timed: dict[Cell, Timed] = {
        (part[1], part[2]): found for part, found in trial.known("speed").items() if isinstance(part, tuple)
    }
    raw = known_speed_record(folder)
    if not timed:
        return _kept(raw, trial)
    for cell, found in timed.items():
        _require_good(trial, cell, found)
    fingerprint = fingerprint_of(trial)
    cells = {} if raw is None else _comparable(raw, fingerprint, trial)
    recorded = {cell: found for cell, found in timed.items() if len(found.load.times) >= MIN_ROUNDS}
    cells |= {cell_name(*cell): _recorded(found.load) for cell, found in recorded.items()}
    wanted = [name for cell in speed_config(trial).cells() if (name := cell_name(*cell)) in cells]
    if not wanted:
        return AcceptedTimes(None, f"No times were accepted: they need {MIN_ROUNDS} rounds (speed.rounds).")
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    record = SpeedRecord(recorded=now, fingerprint=fingerprint, cells={name: cells[name] for name in wanted})
    return AcceptedTimes(record, f"Times of {len(recorded)} scenarios and levels were accepted.")


def _kept(raw: bytes | None, trial: Trial) -> AcceptedTimes:
    """What was stored, in a run that timed nothing. Raises BaselineError where that cannot be read."""
    if raw is None:
        return AcceptedTimes(None, "No times were accepted: no speed check was selected.")
    old = parse_speed_record(raw, where="The speed record", command=trial.accept_command)
    return AcceptedTimes(old, "The accepted times were kept.")


def _comparable(raw: bytes, fingerprint: Fingerprint, trial: Trial) -> dict[str, RecordedCell]:
    """The cells of an older record of the same fingerprint; none of one that can no longer be read."""
    try:
        old = parse_speed_record(raw, where="The speed record", command=trial.accept_command)
    except BaselineError as error:
        trial.notes.append(f"the older times were replaced: {error}")
        return {}
    return dict(old.cells) if old.fingerprint == fingerprint else {}


def _recorded(load: Load) -> RecordedCell:
    return RecordedCell(
        workload=load.workload.digest, requests=len(load.workload.requests), figures=load.figures
    )


def _require_good(trial: Trial, cell: Cell, timed: Timed) -> None:
    speed, load, name = speed_config(trial), timed.load, cell_name(*cell)
    broken = [verdict.sentence for verdict in judge_times(trial, *cell, timed) if verdict.failed]
    if broken:
        raise BaselineError(
            f"Not accepted: speed[{name}] failed: {broken[0]}. Mend it or change its bound, and accept again."
        )
    if speed.rules_of(*cell).max_slowdown is not None and load.scatter > speed.max_scatter:
        raise BaselineError(
            f"Not accepted: the rounds of speed[{name}] scatter by {load.scatter:.1%}, more than max_scatter "
            f"({speed.max_scatter:.0%}), so that no later run could be held against them. Accept on a calm "
            "machine, raise requests or tokens, or accept without times: quantguard accept --no-times."
        )
