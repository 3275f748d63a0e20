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
from pytest_quantguard.errors import BaselineError
from pytest_quantguard.gate.speed_times import Timed, cell_name, fingerprint_of, speed_config
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.stats.speed import scatter


@dataclass(frozen=True, slots=True)
class AcceptedTimes:
    """record: to be stored; None where there is nothing to store. sentence: for the user."""

    record: SpeedRecord | None
    sentence: str


def accepted_times(trial: Trial, folder: Path) -> AcceptedTimes:
    """The times of this session, added to those of `folder` that were measured under the same fingerprint.

    Raises BaselineError where a timed cell failed, or scatters so much that later runs would prove nothing.
    """
    if trial.config.speed is None:
        return AcceptedTimes(None, "")
    timed: dict[str, Timed] = {
        cell_name(*part[1:]): found for part, found in trial.known("speed").items() if isinstance(part, tuple)
    }
    old = _old_record(trial, folder)
    if not timed:
        kept = (
            "The accepted times were kept." if old else "No times were accepted: no speed check was selected."
        )
        return AcceptedTimes(old, kept)
    for name, cell in timed.items():
        _require_good(trial, name, cell)
    fingerprint = fingerprint_of(trial)
    cells = dict(old.cells) if old is not None and old.fingerprint == fingerprint else {}
    wanted = [cell_name(*cell) for cell in speed_config(trial).cells()]
    for name, cell in timed.items():
        load = cell.load
        cells[name] = RecordedCell(
            workload=load.workload.digest, requests=len(load.workload.requests), figures=load.figures
        )
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    kept_cells = {name: cells[name] for name in wanted if name in cells}
    record = SpeedRecord(recorded=now, fingerprint=fingerprint, cells=kept_cells)
    return AcceptedTimes(record, f"Times of {len(timed)} scenarios and levels were accepted.")


def _old_record(trial: Trial, folder: Path) -> SpeedRecord | None:
    raw = known_speed_record(folder)
    if raw is None:
        return None
    try:
        return parse_speed_record(raw, where="it", command=trial.accept_command)
    except BaselineError:
        return None  # Of another schema: it is to be replaced.


def _require_good(trial: Trial, name: str, timed: Timed) -> None:
    speed, load = speed_config(trial), timed.load
    if load.failed > speed.allowed_errors:
        raise BaselineError(
            f"Not accepted: {load.failed} requests of speed[{name}] failed ({load.error_examples[0]}). Mend "
            "that, "
            "then accept again."
        )
    if scatter(load.times) > speed.max_scatter:
        raise BaselineError(
            f"Not accepted: the rounds of speed[{name}] scatter by {scatter(load.times):.1%}, more than "
            f"max_scatter ({speed.max_scatter:.0%}), so that no later run could be held against them. "
            "Accept on a quieter machine, raise requests or tokens, or accept without times: quantguard "
            "accept --no-times."
        )
