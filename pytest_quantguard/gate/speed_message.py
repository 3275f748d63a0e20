"""The text of a speed check: its verdicts as a table, the figures, and what may have disturbed the times."""

from __future__ import annotations

import textwrap

from pytest_quantguard.gate.message import bullets, describe_place, labelled
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.report.wrapping import text_width
from pytest_quantguard.results import CheckResult, SpeedResult, SpeedVerdict

NAMES = {"accepted": "accepted run", "bound": "bound", "reference": "reference", "errors": "errors"}
LIKELY = (
    "Likely reasons: other work on the machine, clocks that change with temperature or power, a server that "
    "was "
    "not warm (raise speed.warmup_rounds), or rounds too short for a steady time (raise requests or tokens)."
)


def describe_speed(trial: Trial, result: CheckResult, speed: SpeedResult) -> str:
    """Grounds of a check that held in one line; the whole message of one that did not."""
    if result.outcome == "passed":
        return (
            "; ".join(verdict.sentence for verdict in speed.verdicts) or "reported only: nothing is bounded"
        )
    bad = [verdict for verdict in speed.verdicts if verdict.failed or verdict.status == "inconclusive"]
    lines = textwrap.wrap(f"{speed.scenario} at {_level(speed)}: {_headline(bad)}.", text_width())
    lines += verdict_table(speed)
    for verdict in bad:
        lines += _details(verdict)
    if any(verdict.status == "inconclusive" for verdict in bad):
        lines += textwrap.wrap(LIKELY, text_width(), initial_indent="  ", subsequent_indent="  ")
    lines += labelled("figures", _figures(speed))
    lines += labelled("rounds", _rounds(speed))
    lines += bullets("machine", [str(text) for text in speed.machine.get("disturbances", [])])
    lines += labelled("bounds", f"speed, or an entry of speed.overrides in {trial.config_path}")
    lines += describe_place(trial)
    return "\n".join(lines)


def verdict_table(speed: SpeedResult) -> list[str]:
    """One line per verdict: against what, figure, value, what is allowed, interval, verdict."""
    rows = [("against", "figure", "value", "allowed", "95 % interval", "verdict")]
    rows += [
        (
            NAMES[verdict.against] if (verdict.runs or 1) == 1 else f"{verdict.runs} accepted runs",
            verdict.figure,
            _value(verdict, verdict.value),
            _allowed(verdict),
            "" if verdict.interval is None else " to ".join(_value(verdict, end) for end in verdict.interval),
            verdict.status,
        )
        for verdict in speed.verdicts
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


HEADLINES = {
    ("errors", "failed"): "requests failed",
    ("bound", "failed"): "an absolute bound is broken",
    ("bound", "inconclusive"): "inconclusive against an absolute bound",
    ("accepted", "regressed"): "slower than the accepted run",
    ("accepted", "refused"): "cannot be held against the accepted run",
    ("accepted", "inconclusive"): "inconclusive against the accepted run",
    ("reference", "missed"): "not fast enough against the reference",
    ("reference", "refused"): "cannot be held against the reference",
    ("reference", "inconclusive"): "inconclusive against the reference",
}


def _headline(bad: list[SpeedVerdict]) -> str:
    return ", ".join(dict.fromkeys(HEADLINES[verdict.against, verdict.status] for verdict in bad))


def _details(verdict: SpeedVerdict) -> list[str]:
    name = NAMES[verdict.against]
    if "\n" in verdict.sentence:
        return [f"  {name}: {verdict.sentence}"]
    return [
        *textwrap.wrap(
            f"{name}: {verdict.sentence}", text_width(), initial_indent="  ", subsequent_indent="    "
        ),
        *(
            line
            for reason in verdict.reasons
            for line in textwrap.wrap(
                reason, text_width(), initial_indent="    - ", subsequent_indent="      "
            )
        ),
    ]


def _level(speed: SpeedResult) -> str:
    known = speed.shown_level if speed.level != "max" else f"max ({speed.concurrency})"
    return f"level {known}"


def _value(verdict: SpeedVerdict, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}x" if verdict.against in ("accepted", "reference") else f"{value:.4g}"


def _allowed(verdict: SpeedVerdict) -> str:
    if verdict.bound is None:
        return ""
    return f"{'>=' if verdict.bound_side == 'min' else '<='} {_value(verdict, verdict.bound)}"


def _figures(speed: SpeedResult) -> str:
    figures = speed.figures
    parts = [f"{figures['duration']:.3g} s"] if "duration" in figures else []
    shown = (
        ("request_throughput", "requests/s"),
        ("input_throughput", "input tokens/s"),
        ("output_throughput", "output tokens/s"),
        ("median_ttft_ms", "ms TTFT"),
        ("p99_ttft_ms", "ms TTFT p99"),
        ("median_tpot_ms", "ms TPOT"),
        ("p99_itl_ms", "ms ITL p99"),
    )
    parts += [f"{figures[name]:.4g} {text}" for name, text in shown if name in figures]
    return ", ".join(parts) or "none"


def _rounds(speed: SpeedResult) -> str:
    steady = "steady" if speed.steady else "not steady"
    return (
        f"{speed.rounds} of {speed.requests} requests, scatter {speed.scatter:.1%}, after "
        f"{speed.warmup_rounds} "
        f"warm-up rounds ({steady})"
    )
