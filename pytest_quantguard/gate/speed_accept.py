"""What times a run leaves for later ones: as an accepted run, or as one more run of its record."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from pytest_quantguard.baseline.speed_record import (
    MAX_RUNS,
    RecordedCell,
    RecordedRun,
    SpeedRecord,
    known_speed_record,
    parse_speed_record,
    read_speed_record,
)
from pytest_quantguard.config_speed import Level
from pytest_quantguard.errors import BaselineError, ConfigError
from pytest_quantguard.gate.machine import fingerprint_of
from pytest_quantguard.gate.speed_judge import doubts, judge_times, record_of, recorded_cell
from pytest_quantguard.gate.speed_times import Timed, cell_name, speed_config, workload_of
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.measure.load.rounds import Load
from pytest_quantguard.serving.fingerprint import Fingerprint
from pytest_quantguard.stats.speed import MIN_ROUNDS, MIN_RUNS, run_spread

Cell = tuple[str, Level]
"""Scenario and level."""


@dataclass(frozen=True, slots=True)
class AcceptedTimes:
    """record: to be stored; None where there is nothing to store. sentence: for the user."""

    record: SpeedRecord | None
    sentence: str


def accepted_times(trial: Trial, folder: Path) -> AcceptedTimes:
    """The times of this session, as the first run of each cell, beside those cells of `folder` that were not
    timed now and are of the same fingerprint.

    Cells with too few rounds for an interval are left out: nothing can be held against them. Raises
    BaselineError where a timed cell failed, or scatters so much that later runs would prove nothing.
    """
    if trial.config.speed is None:
        return AcceptedTimes(None, "")
    timed, raw = _timed(trial), known_speed_record(folder)
    if not timed:
        return _kept(raw, trial)
    for cell, found in timed.items():
        _require_good(trial, cell, found, "accepted")
    fingerprint = fingerprint_of(trial)
    cells = {} if raw is None else _comparable(raw, fingerprint, trial)
    recorded = {cell: found for cell, found in timed.items() if len(found.load.times) >= MIN_ROUNDS}
    new = {cell_name(*cell): _recorded(found.load) for cell, found in recorded.items()}
    before = max((len(cells[name].runs) for name in new if name in cells), default=0)
    cells |= new
    wanted = [name for cell in speed_config(trial).cells() if (name := cell_name(*cell)) in cells]
    if not wanted:
        return AcceptedTimes(None, f"No times were accepted: they need {MIN_ROUNDS} rounds (speed.rounds).")
    record = SpeedRecord(fingerprint=fingerprint, cells={name: cells[name] for name in wanted})
    replaced = f", in place of {before} runs" if before > 1 else ""
    return AcceptedTimes(
        record,
        f"Times of {len(recorded)} scenarios and levels were accepted, of this run alone{replaced}. Add "
        f"others, so that later verdicts know how runs differ: {trial.add_times_command}",
    )


def require_addable(trial: Trial, cell: Cell) -> None:
    """Refuse before anything is timed where its times could not be added: BaselineError or ConfigError."""
    rounds = speed_config(trial).rounds
    if rounds < MIN_ROUNDS:
        raise ConfigError(
            f"{trial.config_path}: speed.rounds is {rounds}; times can be added from {MIN_ROUNDS} rounds on."
        )
    try:
        recorded_cell(trial, *cell, workload_of(trial, cell[0]))
    except BaselineError as error:
        raise BaselineError(f"Nothing can be added: {error}") from error


def added_times(trial: Trial) -> AcceptedTimes:
    """The accepted record with the times of this session as one more run of each cell that was timed.

    Raises BaselineError where nothing was timed, or a timed cell failed, scatters or was disturbed: a run
    that proves nothing about itself says nothing about how runs differ.
    """
    timed = _timed(trial)
    if not timed:
        raise BaselineError("No times were added: no speed check was timed.")
    for cell, found in timed.items():
        _require_good(trial, cell, found, "added")
        if disturbed := doubts(found):
            raise BaselineError(
                f"Not added: speed[{cell_name(*cell)}] was disturbed: {disturbed[0]}. Time on a calm machine."
            )
    record = record_of(trial)
    if read_speed_record(trial.accepted_folder(), command=trial.accept_command) != record:
        raise BaselineError(
            "Not added: the accepted record was changed by somebody else while this run was timed. Add it "
            f"again: {trial.add_times_command}"
        )
    added: dict[str, RecordedCell] = {}
    full: list[str] = []
    for cell, found in timed.items():
        name, old = cell_name(*cell), recorded_cell(trial, *cell, found.load.workload)
        full += [name] if len(old.runs) == MAX_RUNS else []
        added[name] = old.with_run(_run(found.load))
    sentence = _told(trial, timed, added)
    if full:
        sentence += f" The oldest run of {', '.join(full)} was dropped: {MAX_RUNS} are kept."
    return AcceptedTimes(record.model_copy(update={"cells": record.cells | added}), sentence)


def _told(trial: Trial, timed: dict[Cell, Timed], added: dict[str, RecordedCell]) -> str:
    counts = sorted({len(cell.runs) for cell in added.values()})
    spreads = [
        run_spread([run.figures[found.load.comparison_figure] for run in added[cell_name(*cell)].runs])
        for cell, found in timed.items()
    ]
    said = (
        f"Times of {len(added)} scenarios and levels were added to the accepted record, which now holds "
        f"{' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} runs of them; they differ by "
        f"{max(spread or 0.0 for spread in spreads):.1%} at most."
    )
    if counts[0] < MIN_RUNS:
        said += f" From {MIN_RUNS} runs on verdicts know how runs differ: {trial.add_times_command}"
    return said


def _timed(trial: Trial) -> dict[Cell, Timed]:
    return {
        (part[1], part[2]): found for part, found in trial.known("speed").items() if isinstance(part, tuple)
    }


def _run(load: Load) -> RecordedRun:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return RecordedRun(recorded=now, figures=load.figures)


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
        workload=load.workload.digest, requests=len(load.workload.requests), runs=[_run(load)]
    )


def _require_good(trial: Trial, cell: Cell, timed: Timed, what: Literal["accepted", "added"]) -> None:
    speed, load, name = speed_config(trial), timed.load, cell_name(*cell)
    for verdict in judge_times(trial, *cell, timed):
        doubtful = verdict.against == "bound" and verdict.status == "inconclusive"
        if verdict.failed or doubtful:
            because = "; ".join([verdict.sentence, *verdict.reasons])
            found = "proves nothing" if doubtful else "failed"
            raise BaselineError(
                f"Not {what}: speed[{name}] {found}: {because}. Mend it or change its bound, and try again."
            )
    if speed.rules_of(*cell).max_slowdown is not None and load.scatter > speed.max_scatter:
        raise BaselineError(
            f"Not {what}: the rounds of speed[{name}] scatter by {load.scatter:.1%}, more than max_scatter "
            f"({speed.max_scatter:.0%}), so that no later run could be held against them. Time on a calm "
            "machine, or raise requests or tokens"
            + ("; or accept without times: quantguard accept --no-times." if what == "accepted" else ".")
        )
