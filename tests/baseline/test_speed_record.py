"""Speed records that somebody edited: what is no time is refused where it is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_quantguard.baseline.speed_record import RecordedRun, SpeedRecord, parse_speed_record
from pytest_quantguard.errors import BaselineError

ROUNDS = [1.0, 1.1, 0.9, 1.0, 1.05]


def record(runs: int = 1, **figures: Any) -> bytes:
    run = {"recorded": "now", "figures": {"duration": ROUNDS, **figures}}
    cell = {"workload": "digest", "requests": 4, "runs": [run] * runs}
    document = {"schema_version": 2, "fingerprint": {}, "cells": {"toy-1": cell}}
    return json.dumps(document).encode()


def parse(raw: bytes) -> SpeedRecord:
    return parse_speed_record(raw, where="The record", command="quantguard accept gate.yaml")


def test_a_whole_record_is_read() -> None:
    cell = parse(record(runs=3, request_goodput=[0.0, 0.0])).cells["toy-1"]
    assert [run.figures["duration"] for run in cell.runs] == [ROUNDS] * 3


@pytest.mark.parametrize(
    "rounds",
    [
        [],
        None,
        1.0,
        ["NaN", 1.0],
        ["Infinity"],
        ["x"],
        [0.0],
        [1.0, -1.0],
        [1e-300],
        [1e300],
        [None],
        [[1.0]],
    ],
    ids=str,
)
@pytest.mark.parametrize("figure", ["duration", "mean_e2e_latency_ms"])
def test_what_is_no_time_is_refused(figure: str, rounds: object) -> None:
    with pytest.raises(
        BaselineError, match=rf"not in this package's format: .*{figure}.*quantguard accept gate.yaml"
    ):
        parse(record(**{figure: rounds}))


@pytest.mark.parametrize("runs", [0, 11])
def test_a_cell_has_one_to_ten_runs(runs: int) -> None:
    with pytest.raises(BaselineError, match=r"not in this package's format: cells\.toy-1\.runs"):
        parse(record(runs=runs))


def test_the_eleventh_run_takes_the_place_of_the_oldest() -> None:
    cell = parse(record()).cells["toy-1"]
    for number in range(11):
        cell = cell.with_run(RecordedRun(recorded=str(number), figures={"duration": ROUNDS}))
    assert [run.recorded for run in cell.runs] == [str(number) for number in range(1, 11)]


def test_a_record_of_one_run_each_is_refused_with_the_command() -> None:
    """The document as it was before records had runs."""
    cell = {"workload": "digest", "requests": 4, "figures": {"duration": ROUNDS}}
    old = {"schema_version": 1, "recorded": "now", "fingerprint": {}, "cells": {"toy-1": cell}}
    with pytest.raises(
        BaselineError,
        match=r"The record has schema version 1; this pytest-quantguard reads 2\. Record it again: ",
    ):
        parse(json.dumps(old).encode())
