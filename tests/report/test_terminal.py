"""The table at the end of a run: right at every width, readable without colour."""

from __future__ import annotations

import pytest

from pytest_quantguard.report.headline import reason, verdict_line
from pytest_quantguard.report.progress import ThrottledLines, seconds_between
from pytest_quantguard.report.terminal import Line, render
from pytest_quantguard.results import RELATIVE, CheckResult, RunResult, ServerResult


def check(
    kind: str, phase: str, batch_size: int, metric: str, value: float | None, **more: object
) -> CheckResult:
    fields = {"bound": 0.5, "bound_side": "max", "outcome": "passed", **more}
    return CheckResult.model_validate(
        {
            "id": f"{kind}[{phase}-bs{batch_size}-{metric}]",
            "kind": kind,
            "phase": phase,
            "batch_size": batch_size,
            "metric": metric,
            "value": value,
            **fields,
        }
    )


def result(checks: list[CheckResult], **more: object) -> RunResult:
    fields = {"verdict": "passed", "partial": False, "diagnosis": [], "notes": [], **more}
    return RunResult.model_validate(
        {
            "name": "gate",
            "config_path": "gate.yaml",
            "config": {},
            "started": "2026-01-01T00:00:00+00:00",
            "finished": "2026-01-01T00:01:00+00:00",
            "seconds": 60.4,
            "candidate": ServerResult(backend="emulator", model_path="m", quantization="nvfp4"),
            "baseline_path": "baselines/m",
            "baseline": {"suite": {"prompt_count": 32, "score_tokens": 32, "width": 256}},
            "checks": checks,
            **fields,
        }
    )


CELLS = [(phase, size) for phase in ("prefill", "decode") for size in (1, 3, 8, 32)]
TABLE = [
    check(kind, phase, size, metric, value, **more)
    for kind, metric, value, more in (
        ("validity", "", None, {"bound": None}),
        ("accuracy", "kl_mean", 0.4123, {}),
        ("accuracy", "probability_shift_rms", 0.00012, {}),
        ("self_consistency", "kl_mean", 0.031, {"unit": RELATIVE, "extra": {"comparison": "batch"}}),
        ("speed", "tokens_per_s", 1234.5, {"bound": None, "bound_side": None}),
    )
    for phase, size in CELLS
]


def texts(lines: list[Line]) -> list[str]:
    return [line.text for line in lines]


@pytest.mark.parametrize("width", [20, 60, 80, 100, 120, 300])
def test_no_line_exceeds_the_width_and_nothing_is_lost(width: int) -> None:
    lines = texts(render(result(TABLE, diagnosis=["a long sentence " * 20]), width=width))
    assert max(map(len, lines)) <= max(60, min(width, 120))
    assert sum(line.count("0.4123") for line in lines) == len(CELLS)
    assert sum(line.count("1.2e-04") for line in lines) == len(CELLS)
    assert sum(line.count("+3.1%") for line in lines) == len(CELLS)
    assert sum(line.count(" 1234") for line in lines) == len(CELLS)


def test_verdict_comes_first_then_who() -> None:
    lines = render(result(TABLE))
    assert lines[0].text == "gate: PASSED (40 of 40 checks held; 60 s)"
    assert lines[0].markup == {"green": True, "bold": True}
    assert lines[1].text == "  candidate  emulator, m, nvfp4"
    assert lines[2].text == "  baseline   baselines/m (32 prompts x 32 positions, K = 256)"


def test_marks_tell_outcomes_without_colour() -> None:
    checks = [
        check("accuracy", "prefill", 1, "kl_mean", 0.9, outcome="failed"),
        check("accuracy", "prefill", 3, "kl_mean", None, outcome="error", bound=None),
        check("accuracy", "prefill", 8, "kl_mean", 0.49, near_bound=True),
        check("accuracy", "prefill", 32, "kl_mean", 0.6, outcome="warned"),
        check("accuracy", "decode", 1, "kl_mean", None, outcome="skipped", bound=None),
    ]
    lines = texts(render(result(checks, verdict="failed"), width=100))
    row = next(line for line in lines if line.startswith("  kl_mean"))
    assert row.split() == ["kl_mean", "0.9000!", "ERROR?", "0.4900~", "0.6000*", "-", "<=", "0.5"]
    assert (
        lines[0]
        == "gate: FAILED (1 of 5 checks held, 1 failed, 1 could not run, 1 with a warning, 1 skipped; 60 s)"
    )
    assert "  ! failed, ? could not run, * warning, ~ interval reaches the bound, - not run" in lines


def test_a_warning_is_not_said_to_have_held() -> None:
    warned = check("accuracy", "prefill", 1, "kl_mean", 0.9, outcome="warned")
    warned = warned.model_copy(update={"message": "kl_mean is 0.9; 0.5 is allowed.\nMore."})
    run = result([warned, check("accuracy", "prefill", 3, "kl_mean", 0.1)])
    assert reason(run) == f"nothing failed; {warned.id} warns: kl_mean is 0.9; 0.5 is allowed."
    assert verdict_line(run) == "gate: PASSED (1 of 2 checks held, 1 with a warning; 60 s)"


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        (CELLS, "in every cell: worst 0.9000, at most 0.5"),
        (CELLS[4:], "in decode: worst 0.9000, at most 0.5"),
        ([CELLS[0], CELLS[2], *CELLS[4:]], "in prefill bs 1, 8; decode: worst 0.9000, at most 0.5"),
        (CELLS[:1], "in prefill bs 1: 0.9000, at most 0.5"),
    ],
)
def test_what_failed_is_said_once_with_its_cells(bad: list[tuple[str, int]], where: str) -> None:
    checks = [
        check(
            "accuracy",
            *cell,
            "kl_mean",
            0.9 if cell in bad else 0.1,
            outcome="failed" if cell in bad else "passed",
        )
        for cell in CELLS
    ]
    lines = texts(render(result(checks, verdict="failed"), report="out/report.html"))
    assert lines[1] == f"  failed     kl_mean {where}"
    assert lines[2] == "  report     out/report.html"


def test_checks_that_could_not_run_for_one_reason_are_one_line() -> None:
    checks = [
        check("accuracy", *cell, "kl_mean", None, outcome="error", message="no server\nlog") for cell in CELLS
    ]
    lines = texts(render(result(checks, verdict="failed")))
    assert lines[1] == "  error      8 checks: could not run (no server)"
    checks[0] = check("validity", *CELLS[0], "", None, outcome="error", message="no server")
    assert texts(render(result(checks, verdict="failed")))[1] == lines[1], "whatever the kinds of checks"


def test_columns_are_ordered_and_aligned_with_their_values() -> None:
    lines = texts(render(result(list(reversed(TABLE))), width=120))
    sizes = next(line for line in lines if "bs32" in line)
    row = next(line for line in lines if "kl_mean" in line)
    assert sizes.split()[:8] == ["bs1", "bs3", "bs8", "bs32"] * 2
    ends = [index + len("bs8") for index in range(len(sizes)) if sizes.startswith("bs8", index)]
    assert all(row[end - 6 : end] == "0.4123" for end in ends)


def test_bounds_that_differ_are_shown_as_a_range() -> None:
    checks = [
        check("accuracy", "prefill", 1, "kl_mean", 0.1),
        check("accuracy", "decode", 1, "kl_mean", 0.1, bound=0.7),
    ]
    assert any(line.endswith("<= 0.5..0.7") for line in texts(render(result(checks))))


def test_a_run_that_ended_early_says_so() -> None:
    lines = texts(render(result([], verdict="incomplete", partial=True)))
    assert lines[0] == "gate: INCOMPLETE (0 of 0 checks held, the run ended early; 60 s)"


def test_verbose_shows_the_grounds_of_what_held() -> None:
    checks = [
        check("accuracy", "prefill", 1, "kl_mean", 0.1, message="kl_mean 0.1 is within its upper bound 0.5")
    ]
    assert not any("within its upper bound" in line for line in texts(render(result(checks))))
    assert any("within its upper bound" in line for line in texts(render(result(checks), verbosity=1)))


def test_quiet_keeps_verdict_failures_and_report() -> None:
    checks = [check("accuracy", *cell, "kl_mean", 0.9, outcome="failed") for cell in CELLS]
    quiet = texts(render(result(checks, verdict="failed", notes=["a note"]), verbosity=-1, report="here"))
    assert [line.split()[0] for line in quiet] == ["gate:", "failed", "report"]


@pytest.mark.parametrize(
    ("verbosity", "watched", "seconds"),
    [(0, True, 10), (0, False, 30), (1, False, 10), (2, False, 0), (3, True, 0)],
)
def test_progress_is_rarer_in_a_log(verbosity: int, watched: bool, seconds: float) -> None:
    assert seconds_between(verbosity, watched=watched) == seconds


def test_throttled_lines_pass_on_the_first_and_then_one_in_a_while() -> None:
    now, written = [0.0], []
    lines = ThrottledLines(written.append, seconds=10, clock=lambda: now[0])
    for second in (0, 1, 9, 10, 15):
        now[0] = float(second)
        lines(str(second))
    assert written == ["0", "10"]
    lines.always("15 again")
    now[0] = 24.0
    lines("24")
    now[0] = 25.0
    lines("25")
    assert written == ["0", "10", "15 again", "25"]
