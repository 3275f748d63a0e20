"""Speed records that somebody edited: what is no time is refused where it is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_quantguard.baseline.speed_record import SpeedRecord, parse_speed_record
from pytest_quantguard.errors import BaselineError

ROUNDS = [1.0, 1.1, 0.9, 1.0, 1.05]


def record(**figures: Any) -> bytes:
    cell = {"workload": "digest", "requests": 4, "figures": {"duration": ROUNDS, **figures}}
    document = {"schema_version": 1, "recorded": "now", "fingerprint": {}, "cells": {"toy-1": cell}}
    return json.dumps(document).encode()


def parse(raw: bytes) -> SpeedRecord:
    return parse_speed_record(raw, where="The record", command="quantguard accept gate.yaml")


def test_a_whole_record_is_read() -> None:
    assert parse(record(request_goodput=[0.0, 0.0])).cells["toy-1"].figures["duration"] == ROUNDS


@pytest.mark.parametrize(
    "rounds",
    [[], None, 1.0, ["NaN", 1.0], ["Infinity"], ["x"], [0.0], [1.0, -1.0], [None], [[1.0]]],
    ids=str,
)
@pytest.mark.parametrize("figure", ["duration", "mean_e2e_latency_ms"])
def test_what_is_no_time_is_refused(figure: str, rounds: object) -> None:
    with pytest.raises(
        BaselineError, match=rf"not in this package's format: .*{figure}.*quantguard accept gate.yaml"
    ):
        parse(record(**{figure: rounds}))
