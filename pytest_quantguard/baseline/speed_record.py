"""The accepted times of a candidate: a versioned JSON document attached to its accepted run.

It holds the rounds themselves, of one run or several, so that a later run is judged against the spread of
rounds and of runs, and the fingerprint of the machine, without which no time can be compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from pytest_quantguard.baseline.store import MANIFEST, read_attachment, write_attachment
from pytest_quantguard.errors import BaselineError

SCHEMA_VERSION: Literal[2] = 2
ATTACHMENT = "speed"
MAX_RUNS = 10
"""So many runs of a cell are kept: more would hardly narrow Student's quantile, and old ones grow stale."""
COMPARED = ("duration", "mean_e2e_latency_ms")
"""Figures of which ratios are taken."""
SHORTEST, LONGEST = 1e-9, 1e12
"""Of a compared figure, seconds or milliseconds: what is beyond is no time, and its ratios overflow."""


class SpeedModel(BaseModel):
    """Base of the record's models: unknown keys are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class RecordedRun(SpeedModel):
    """What one start of the server took for a cell. recorded: when. figures: name -> value of each round."""

    recorded: str
    figures: dict[str, Annotated[list[FiniteFloat], Field(min_length=1)]]

    @model_validator(mode="after")
    def _times_are_times(self) -> RecordedRun:
        for name in COMPARED:
            if not all(SHORTEST <= value <= LONGEST for value in self.figures.get(name, ())):
                raise ValueError(f"{name} is not between {SHORTEST:g} and {LONGEST:g} in every round")
        return self


class RecordedCell(SpeedModel):
    """One scenario at one level. workload: digest of its requests. runs: oldest first."""

    workload: str
    requests: int = Field(ge=1)
    runs: Annotated[list[RecordedRun], Field(min_length=1, max_length=MAX_RUNS)]

    def with_run(self, run: RecordedRun) -> RecordedCell:
        """The cell with one more run, without the oldest where there would be more than `MAX_RUNS`."""
        return self.model_copy(update={"runs": [*self.runs, run][-MAX_RUNS:]})


class SpeedRecord(SpeedModel):
    """The whole document. cells: "scenario-level" -> what was measured."""

    schema_version: Literal[2] = SCHEMA_VERSION
    fingerprint: dict[str, str | int | float | bool | None]
    cells: dict[str, RecordedCell]


def write_speed_record(folder: Path, record: SpeedRecord) -> None:
    """Attach the record to the accepted run in `folder`, in place of an older one. Raises BaselineError."""
    write_attachment(folder, ATTACHMENT, dump_speed_record(record))


def dump_speed_record(record: SpeedRecord) -> bytes:
    """The attachment's content."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(record.model_dump(mode="json"), option=options)


def known_speed_record(folder: Path) -> bytes | None:
    """The record as it is stored, whatever its schema; None where there is none. Raises BaselineError."""
    return read_attachment(folder, ATTACHMENT) if (folder / MANIFEST).is_file() else None


def read_speed_record(folder: Path, *, command: str) -> SpeedRecord:
    """The record of the accepted run in `folder`. command: what records it, for messages.

    Raises BaselineError where it is missing, cannot be read, is damaged or has another schema.
    """
    raw = known_speed_record(folder)
    if raw is None:
        raise BaselineError(
            f"There is no accepted speed record in {folder}. If this candidate is as fast as it should be, "
            f"record it: {command}"
        )
    return parse_speed_record(raw, where=f"The speed record of {folder}", command=command)


def parse_speed_record(raw: bytes, *, where: str, command: str) -> SpeedRecord:
    """The record that `raw` holds; raises BaselineError, which names it `where`."""
    try:
        loaded = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BaselineError(f"{where} is not JSON: {error}. Record it again: {command}") from error
    version = loaded.get("schema_version") if isinstance(loaded, dict) else None
    if version != SCHEMA_VERSION:
        hint = "Record it again"
        if isinstance(version, int) and version > SCHEMA_VERSION:
            hint = (
                "A newer version wrote it: upgrade with pip install -U pytest-quantguard, or record it again"
            )
        raise BaselineError(
            f"{where} has schema version {version}; this pytest-quantguard reads {SCHEMA_VERSION}. {hint}: "
            f"{command}"
        )
    try:
        return SpeedRecord.model_validate(loaded)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"]) or "the whole document"
        raise BaselineError(
            f"{where} is not in this package's format: {at}: {first['msg']}. Record it again: {command}"
        ) from error
