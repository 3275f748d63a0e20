"""The terminal's table of times."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_quantguard.report.speed import speed_lines
from pytest_quantguard.results import CheckResult, SpeedResult, SpeedVerdict

FIGURES = {"duration": 1.2345, "output_throughput": 12345.6, "p99_ttft_ms": 34.5, "p99_itl_ms": 5.67}


def check(
    level: str, *verdicts: SpeedVerdict, outcome: Any = "passed", figures: Any = FIGURES
) -> CheckResult:
    speed = SpeedResult(
        scenario="decode_heavy",
        level=level,
        requests=32,
        concurrency=8,
        input_tokens=64,
        output_tokens=256,
        rounds=7,
        warmup_rounds=2,
        steady=True,
        compared="duration",
        figures=figures,
        intervals={},
        by_round={},
        scatter=0.0123,
        errors=0,
        verdicts=list(verdicts),
    )
    return CheckResult(id=f"speed[decode_heavy-{level}]", kind="speed", outcome=outcome, speed=speed)


def verdict(against: Any, status: Any, value: float | None, **record: Any) -> SpeedVerdict:
    return SpeedVerdict(against=against, figure="duration", status=status, value=value, sentence="", **record)


CHECKS = [
    check("1", verdict("accepted", "unchanged", 1.012), verdict("reference", "reached", 1.5)),
    check("8", verdict("accepted", "regressed", 1.2), verdict("reference", "missed", 0.9), outcome="failed"),
    check("max", verdict("accepted", "refused", None), outcome="failed", figures={}),
]


def test_one_row_per_cell_with_its_verdicts() -> None:
    _, head, one, eight, crowded, _ = speed_lines(CHECKS, 120)
    titles = [
        "speed",
        "level",
        "time",
        "accepted",
        "reference",
        "out",
        "tok/s",
        "TTFT",
        "p99",
        "ITL",
        "p99",
        "scatter",
    ]
    assert head.split() == titles
    assert one.split()[:7] == ["decode_heavy", "1", "1.23", "s", "+1.2%", "unchanged", "1.50x"]
    assert one.split()[8:] == ["12346", "34.5", "ms", "5.67", "ms", "1.2%"]
    assert eight.endswith("!")
    assert "+20.0% regressed" in eight
    assert crowded.split()[:4] == ["decode_heavy", "max", "failed", "refused"]


@pytest.mark.parametrize("width", [60, 72, 80, 100, 120])
def test_it_fits(width: int) -> None:
    lines = speed_lines(CHECKS, width)
    assert all(len(line) <= width for line in lines)
    assert "accepted" in lines[1]


def test_columns_without_anything_are_left_out() -> None:
    lines = speed_lines([check("1")], 80)
    assert "accepted" not in lines[1]
    assert "reference" not in lines[1]
    assert lines[1].split()[-1] == "scatter"


def test_the_record_is_named_with_how_its_runs_differ() -> None:
    known = [{}, {"runs": 1}, {"runs": 5, "spread": 0.0214}]
    lines = speed_lines([check("1", verdict("accepted", "unchanged", 1.0, **one)) for one in known], 120)
    assert lines[1].split()[2:6] == ["time", "accepted", "record", "out"]
    middle = [line.partition("unchanged")[2].partition("12346")[0] for line in lines[2:5]]
    assert [part.strip() for part in middle] == ["", "1 run", "5 runs, 2.1%"]


def test_without_times_there_is_no_table() -> None:
    assert speed_lines([CheckResult(id="server", kind="server", outcome="passed")], 80) == []


def test_a_level_that_was_not_reached_is_not_said_to_be() -> None:
    """32 requests are at most 32 in flight, whatever is asked for."""
    few = check("64").speed
    assert few is not None
    levels = {"64": 32, "8": 8, "max": 32}
    timed = [few.model_copy(update={"level": one, "concurrency": most}) for one, most in levels.items()]
    assert [speed.shown_level for speed in timed] == ["64 (32)", "8", "max"]
    row = CheckResult(id="speed[decode_heavy-64]", kind="speed", outcome="passed", speed=timed[0])
    assert "decode_heavy  64 (32)  1.23 s" in speed_lines([row], 120)[2]
