"""The history of runs: lines that survive accidents, the experiment log, shifts that are there and none that
are not.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from pytest_quantguard import cli
from pytest_quantguard.errors import QuantguardError
from pytest_quantguard.report.history import (
    HistoryEntry,
    append_entry,
    better,
    entry_of,
    read_history,
    what_changed,
    what_it_did,
)
from pytest_quantguard.report.history_text import log_lines, trend_lines, trends
from pytest_quantguard.report.trend import shifts, sparkline
from tests.report.samples import HOSTILE, full


def entry(kl: float = 0.4, day: int = 1, **more: Any) -> HistoryEntry:
    fields = {
        "finished": f"2026-01-{day:02d}T00:00:00+00:00",
        "name": "gate",
        "config_digest": "0",
        "config": {},
        "verdict": "passed",
        "reason": "every check held",
        "seconds": 1.0,
        "baseline": "texts",
        "figures": {"kl_mean[prefill-bs8]": kl},
        **more,
    }
    return HistoryEntry.model_validate(fields)


def write(folder: Path, entries: list[HistoryEntry]) -> Path:
    for one in entries:
        append_entry(folder, one)
    return folder


def test_a_line_holds_what_a_run_was() -> None:
    line = entry_of(full(), None)
    assert (line.verdict, line.commit, line.server_version) == ("failed", "a" * 40, "plain")
    assert line.reason.startswith("kl_mean in decode bs 1: 0.9000, at most 0.5")
    assert line.figures["kl_mean[decode-bs8]"] == 0.41
    assert line.figures["speed[toy-8]"] == 2.5
    assert (line.changed, line.effect) == ("", "")


def test_a_figure_that_is_no_number_is_left_out() -> None:
    result = full()
    checks = [check.model_copy(update={"value": float("nan")}) for check in result.checks]
    cells = [cell.model_copy(update={"metrics": {"kl_mean": float("inf")}}) for cell in result.cells]
    assert entry_of(result.model_copy(update={"checks": checks, "cells": cells}), None).figures == {}


def test_the_log_says_what_changed_and_what_it_did() -> None:
    config = {"candidate": {"quantization": "nvfp4", "threads": 2}, "accuracy": {"kl_mean": {"max": 0.5}}}
    changed = {"candidate": {"quantization": "fp8", "threads": 2}, "accuracy": {}}
    before = entry(0.4, config=config, commit="1" * 40, units={"speed[a]": "s"})
    before = before.model_copy(
        update={"figures": {**before.figures, "speed[a]": 10.0, "agreement[decode-bs1]": 0.7}}
    )
    now = entry(0.03, 2, config=changed, commit="2" * 40, units={"speed[a]": "s"}, verdict="failed")
    now = now.model_copy(update={"figures": {**now.figures, "speed[a]": 8.0, "agreement[decode-bs1]": 0.7}})
    assert what_changed(before, now) == (
        "changed: candidate.quantization: nvfp4 -> fp8; accuracy.kl_mean.max: 0.5 -> none; "
        "commit 1111111111 -> 2222222222"
    )
    assert what_it_did(before, now) == (
        "did: passed -> failed; kl_mean 0.4000 -> 0.0300 (-92.5%, prefill-bs8); speed[a] 10 -> 8 (-20.0%)"
    )


def test_every_check_outside_the_cells_is_a_figure_of_its_own() -> None:
    """Also one whose unit nobody wrote down: only figures of cells are summed up by their metric."""
    old = {"generation[score]": 0.9, "generation[qa-score]": 0.8, "speed[score]": 1.0, "speed[a-1]": 2.0}
    new = {"generation[score]": 0.45, "generation[qa-score]": 0.6, "speed[score]": 1.5, "speed[a-1]": 1.0}
    before = entry().model_copy(update={"figures": old})
    assert what_it_did(before, entry(2).model_copy(update={"figures": new})) == (
        "did: passed; generation[score] 0.9000 -> 0.4500 (-50.0%); generation[qa-score] 0.8000 -> 0.6000 "
        "(-25.0%); speed[score] 1 -> 1.5 (+50.0%); speed[a-1] 2 -> 1 (-50.0%)"
    )


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("kl_mean[prefill-bs8]", "lower"),
        ("agreement[decode-bs1]", "higher"),
        ("generation[relative_score]", "higher"),
        ("generation[my-task-runaways]", "lower"),
        ("speed[decode_heavy-max]", "lower"),
        ("speed[score]", "higher"),
        ("something[else]", None),
    ],
)
def test_directions(name: str, direction: str | None) -> None:
    assert better(name) == direction


def test_figures_over_other_texts_are_not_compared() -> None:
    before, now = entry(), entry(baseline="other")
    assert what_changed(before, now) == "changed: nothing in the config; baseline: texts -> other"
    assert "do not compare" in what_it_did(before, now)


def test_runs_that_measured_nothing_are_passed_over(tmp_path: Path) -> None:
    history = read_history(write(tmp_path, [entry(0.4), entry(figures={}), entry(0.1, name="other")]))
    before = history.before("gate")
    assert before is not None
    assert before.figures == {"kl_mean[prefill-bs8]": 0.4}
    assert history.before("nobody") is None


def test_an_interrupted_line_costs_only_itself(tmp_path: Path) -> None:
    write(tmp_path, [entry(0.1)])
    file = tmp_path / "history.jsonl"
    file.write_bytes(file.read_bytes() + b'{"half":')
    write(tmp_path, [entry(0.2)])
    with file.open("a", encoding="utf-8") as stream:
        stream.write('{"history_version": 99}\n[]\n\n')
    history = read_history(file)
    assert [one.figures["kl_mean[prefill-bs8]"] for one in history.entries] == [0.1, 0.2]
    assert len(history.problems) == 3
    assert "line 2 is left out" in history.problems[0]
    assert "version 99" in history.problems[1]
    assert "pip install -U" in history.problems[1]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-inf", "x", None, []])
@pytest.mark.parametrize("where", ["figures", "seconds"])
def test_a_line_with_what_is_no_number_is_left_out(tmp_path: Path, where: str, value: object) -> None:
    write(tmp_path, [entry(0.1)])
    line = json.loads((tmp_path / "history.jsonl").read_text(encoding="utf-8"))
    line[where] = {"kl_mean[prefill-bs8]": value} if where == "figures" else value
    with (tmp_path / "history.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")
    history = read_history(tmp_path)
    assert len(history.entries) == 1
    assert "line 2 is left out" in history.problems[0]


def test_the_folder_above_names_those_that_have_a_history(tmp_path: Path) -> None:
    write(tmp_path / "one", [entry(0.1)])
    with pytest.raises(QuantguardError, match=r"There is one in each of: .*one\."):
        read_history(tmp_path)


def test_what_is_no_history_is_explained(tmp_path: Path) -> None:
    with pytest.raises(QuantguardError, match=r"There is no history at .*quantguard run CONFIG"):
        read_history(tmp_path)
    (tmp_path / "history.jsonl").mkdir()
    with pytest.raises(QuantguardError, match=r"could not be written.*--quantguard-output"):
        append_entry(tmp_path, entry())


def test_sparklines() -> None:
    assert sparkline([0, 1, None, 7]) == "▁▂ █"
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([100, 101, 99, 100]) == "▅▅▄▅", "scatter of 1 % looks flat"
    assert sparkline([None]) == " "
    assert sparkline([0, 7], ascii_only=True) == "_@"


@pytest.mark.parametrize(("at", "before", "after"), [(3, 0.4, 0.5), (10, 0.4, 0.39), (18, 0.4, 4.0)])
def test_the_first_run_of_a_new_level_is_found(at: int, before: float, after: float) -> None:
    values = [before + 0.0001 * (index % 3) + (after - before) * (index >= at) for index in range(20)]
    (shift,) = shifts(values)
    assert shift.index == at
    assert shift.before == pytest.approx(before, abs=3e-4)
    assert shift.after == pytest.approx(after, abs=3e-4)


def test_two_shifts_and_an_outlier() -> None:
    noise = random.Random(3)
    levels = [1.0] * 10 + [1.5] * 10 + [0.8] * 10
    values = [level + noise.gauss(0, 0.02) for level in levels]
    values[5] = 1.4
    first, second = shifts(values)
    assert (first.index, second.index) == (10, 20)
    assert (first.before, first.after) == (pytest.approx(1, abs=0.02), pytest.approx(1.5, abs=0.02))
    assert (second.before, second.after) == (pytest.approx(1.5, abs=0.02), pytest.approx(0.8, abs=0.02))


@pytest.mark.parametrize("runs", [8, 12, 40])
def test_scatter_alone_rarely_shifts(runs: int) -> None:
    noise = random.Random(runs)
    series = [[100 + noise.gauss(0, 5) for _ in range(runs)] for _ in range(300)]
    assert sum(bool(shifts(values)) for values in series) <= 5


@pytest.mark.parametrize(
    "values", [[], [1.0], [1.0] * 4, [1.0, 1.0, 1.0, 2.0], [0.0] * 9, [1.0] * 5 + [1.01] * 5]
)
def test_too_few_runs_and_too_small_steps_are_no_shift(values: list[float]) -> None:
    assert shifts(values) == []


def test_a_series_ends_where_other_texts_were_scored() -> None:
    runs = [entry(0.1, baseline="old"), entry(0.2), entry(0.3, baseline=None, figures={}), entry(0.4)]
    (trend,) = trends(runs)
    assert trend.values == (0.2, None, 0.4)
    assert trend.known == [(1, 0.2), (3, 0.4)]


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    runs = [entry(0.4 if day < 6 else 0.6, day, commit=f"{day:040d}") for day in range(1, 11)]
    runs[5] = runs[5].model_copy(update={"changed": "changed: candidate.quantization: fp8 -> nvfp4"})
    write(tmp_path, runs)
    assert cli.main(["history", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "kl_mean[prefill-bs8]" in said
    assert "shifted from 0.4000 to 0.6000 (+50.0%), worse; first in the run of" in said.replace("\n    ", " ")
    assert "candidate.quantization: fp8 -> nvfp4" in said
    assert max(map(len, said.splitlines())) <= 80


def test_the_command_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [entry(0.4 if day < 6 else 0.6, day) for day in range(1, 11)])
    assert cli.main(["history", str(tmp_path / "history.jsonl"), "--json", "--last", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["runs"]) == 3
    assert found["series"] == {"kl_mean[prefill-bs8]": [0.6, 0.6, 0.6]}
    (shift,) = found["shifts"]
    assert (shift["finished"], shift["before"], shift["after"]) == ("2026-01-06T00:00:00+00:00", 0.4, 0.6)


def test_the_log_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (
        entry_of(full(HOSTILE, name="gate"), None),
        entry(0.5, changed="changed: x", effect="did: y"),
    )
    write(tmp_path, [first, second])
    assert cli.main(["history", str(tmp_path), "--log"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("  first run: ")
    assert lines[-2:] == ["  changed: x", "  did: y"]
    assert "\x1b" not in "".join(log_lines([first]))


def test_bad_use_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["history", str(tmp_path)]) == 3
    assert "There is no history" in capsys.readouterr().err
    write(tmp_path, [entry()])
    assert cli.main(["history", str(tmp_path), "--name", "nobody"]) == 2
    assert "has no run of 'nobody'; it has runs of: gate." in capsys.readouterr().err
    assert cli.main(["history", str(tmp_path), "--last", "0"]) == 2
    capsys.readouterr()
    assert cli.main(["history", str(tmp_path), "--figure", "kl_mean", "--figure", "kl_maen"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--figure=kl_maen: no figure's name contains that. There are: kl_mean[prefill-bs8]." in said


def test_runs_stand_in_columns_however_long_their_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = "kl_mean in every cell: worst 0.4669, at most 0.4; and 3 more kinds of checks beside it"
    runs = [entry(reason=reason) for reason in ("every check held", long)]
    lines = trend_lines(runs, 20, (), unicode=True)[:2]
    assert [
        line.index(reason[:12]) for line, reason in zip(lines, ("every check held", long), strict=True)
    ] == [lines[0].index("every check")] * 2
    assert len(lines[1]) <= 80
    assert lines[1].endswith(" ...")
