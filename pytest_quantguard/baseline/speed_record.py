"""The accepted times of a candidate: a versioned JSON file beside its accepted run.

It holds the rounds themselves, so that a later run is judged against their spread, and the fingerprint of the
machine, without which no time can be compared.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pytest_quantguard.errors import BaselineError

SCHEMA_VERSION: Literal[1] = 1
SPEED_FILE = "speed.json"


class SpeedModel(BaseModel):
    """Base of the record's models: unknown keys are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class RecordedCell(SpeedModel):
    """One scenario at one level. workload: digest of its requests. figures: name -> value of each round."""

    workload: str
    requests: int = Field(ge=1)
    figures: dict[str, list[float]]


class SpeedRecord(SpeedModel):
    """Everything of the file. cells: "scenario-level" -> what was measured."""

    schema_version: Literal[1] = SCHEMA_VERSION
    recorded: str
    fingerprint: dict[str, str | int | float | bool | None]
    cells: dict[str, RecordedCell]


def write_speed_record(folder: Path, record: SpeedRecord) -> Path:
    """Write `folder/speed.json`, whole or not at all. Raises BaselineError where that is not possible."""
    file = folder / SPEED_FILE
    body = orjson.dumps(
        record.model_dump(mode="json"), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".tmp-")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(body)
                stream.flush()
                os.fsync(stream.fileno())
            Path(name).chmod(0o644)
            Path(name).replace(file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise BaselineError(
            f"The speed record could not be written to {file}: {error.strerror or error}. What was stored there "
            "before is unchanged. Make room or give permission there, then repeat the command."
        ) from error
    return file


def read_speed_record(folder: Path, *, command: str) -> SpeedRecord:
    """Read `folder/speed.json`. command: what records it, for messages.

    Raises BaselineError where it is missing, cannot be read, is damaged or has another schema.
    """
    file = folder / SPEED_FILE
    try:
        loaded = orjson.loads(file.read_bytes())
    except FileNotFoundError:
        raise BaselineError(
            f"There is no accepted speed record at {file}. If this candidate is as fast as it should be, "
            f"record it: {command}"
        ) from None
    except OSError as error:
        raise BaselineError(
            f"The speed record {file} cannot be read: {error.strerror or error}. Make it readable, or record it "
            f"again: {command}"
        ) from error
    except orjson.JSONDecodeError as error:
        raise BaselineError(
            f"The speed record {file} is damaged: {error}. Restore it from version control, or record it again: "
            f"{command}"
        ) from error
    version = loaded.get("schema_version") if isinstance(loaded, dict) else None
    if version != SCHEMA_VERSION:
        hint = (
            "A newer version wrote it: upgrade with pip install -U pytest-quantguard, or record it again"
            if isinstance(version, int) and version > SCHEMA_VERSION
            else "Record it again"
        )
        raise BaselineError(
            f"The speed record {file} has schema version {version}; this pytest-quantguard reads "
            f"{SCHEMA_VERSION}. {hint}: {command}"
        )
    try:
        return SpeedRecord.model_validate(loaded)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise BaselineError(
            f"The speed record {file} is not in this package's format: {where}: {first['msg']}. Record it again: "
            f"{command}"
        ) from error
