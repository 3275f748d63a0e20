"""The section of the HTML report about speed: every timed scenario with its figures, intervals, and what it
was held against.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pytest_quantguard.report.headline import bound_text, figure, first_line
from pytest_quantguard.report.html_accuracy import scrolled
from pytest_quantguard.report.markup import Child, Html, block, join, tag
from pytest_quantguard.results import CheckResult, RunResult, SpeedResult, SpeedVerdict

AGAINST = {
    "errors": "errors",
    "bound": "the bound of the config",
    "accepted": "the accepted record",
    "reference": "the reference, in this session",
}
SHOWN_FIGURES = (
    ("duration", "duration, s", 3),
    ("output_throughput", "output tokens/s", 1),
    ("input_throughput", "input tokens/s", 1),
    ("median_ttft_ms", "TTFT median, ms", 1),
    ("p99_ttft_ms", "TTFT p99, ms", 1),
    ("median_tpot_ms", "TPOT median, ms", 2),
    ("p99_itl_ms", "ITL p99, ms", 2),
    ("request_goodput", "goodput, requests/s", 2),
)


def cards(result: RunResult) -> Iterator[tuple[str, str, str]]:
    """The composite score, or the change that stands out most; name, value, remark."""
    for check in result.checks:
        if check.kind == "speed" and check.metric == "score" and check.value is not None:
            yield "speed score", figure(check.value), bound_text(check)
            return
    found = [
        (verdict, timed)
        for timed in _timed(result.checks)
        for verdict in timed.verdicts
        if verdict.against in ("accepted", "reference") and verdict.value is not None
    ]
    if found:
        verdict, timed = max(found, key=lambda pair: abs((pair[0].value or 1.0) - 1.0))
        name = "time now / accepted" if verdict.against == "accepted" else "speed-up over the reference"
        yield name, f"{verdict.value:.3f}", f"{timed.scenario}, {timed.shown_level}: {verdict.status}"


def speed(result: RunResult) -> Html | None:
    """Figures of all scenarios, verdicts with their intervals, rounds and machine."""
    checks = [check for check in result.checks if check.kind == "speed"]
    if not checks:
        return None
    timed = _timed(checks)
    parts: list[Child] = []
    if timed:
        parts += [_figures(timed), _verdicts(timed), _every_figure(timed)]
    scores = [check for check in checks if check.metric == "score"]
    parts += [_score(check) for check in scores]
    others = [check for check in checks if check.speed is None and check not in scores]
    parts += [tag("p", f"{check.id}: {check.outcome}. {first_line(check.message)}") for check in others]
    return join(parts)


def _timed(checks: Sequence[CheckResult]) -> list[SpeedResult]:
    return [check.speed for check in checks if check.speed is not None]


def _name(timed: SpeedResult) -> str:
    return f"{timed.scenario}, {timed.shown_level}"


def _figures(timed: Sequence[SpeedResult]) -> Html:
    """Medians over the rounds, with their 95 % intervals."""
    columns = [column for column in SHOWN_FIGURES if any(column[0] in one.figures for one in timed)]
    rows = []
    for one in timed:
        asked = f"{one.requests}: {one.input_tokens} in, {one.output_tokens} out"
        cells = [_with_interval(one, name, digits) for name, _, digits in columns]
        errors = tag("td", one.errors, class_="h5" if one.errors else None)
        steady = "" if one.steady else ", warm-up not steady"
        rounds = f"{one.rounds}, scatter {one.scatter:.1%}{steady}"
        rows.append(
            tag(
                "tr",
                tag("th", _name(one), scope="row"),
                tag("td", asked, class_="text"),
                cells,
                tag("td", rounds),
                errors,
            )
        )
    names = ["scenario, level", "requests: tokens", *(title for _, title, _ in columns), "rounds", "errors"]
    head = tag("thead", tag("tr", [tag("th", name, scope="col") for name in names]))
    caption = tag("caption", "Median over the rounds; in brackets its 95 % interval")
    return scrolled("Speed figures", caption, head, tag("tbody", rows))


def _with_interval(one: SpeedResult, name: str, digits: int) -> Html:
    if name not in one.figures:
        return tag("td", "")
    value = f"{one.figures[name]:.{digits}f}"
    interval = one.intervals.get(name)
    if interval is None:
        return tag("td", value)
    low, high = (f"{end:.{digits}f}" for end in interval)
    return tag("td", value, tag("span", f" [{low}, {high}]", class_="soft small"))


def _verdicts(timed: Sequence[SpeedResult]) -> Html | None:
    """What each scenario was held against."""
    rows = [
        tag(
            "tr",
            tag("th", _name(one), scope="row"),
            tag("td", AGAINST[verdict.against], class_="text"),
            tag("td", verdict.figure, class_="text"),
            tag("td", "" if verdict.value is None else f"{verdict.value:.4g}"),
            tag("td", _interval(verdict)),
            tag("td", _bound(verdict)),
            tag("td", _noise(verdict)),
            tag("td", verdict.status, class_="h5" if verdict.failed else None),
            tag("td", "; ".join([first_line(verdict.sentence), *verdict.reasons]), class_="wrap"),
        )
        for one in timed
        for verdict in one.verdicts
    ]
    if not rows:
        return None
    names = (
        "scenario, level",
        "against",
        "figure",
        "value",
        "95 % interval",
        "bound",
        "noise of the record",
        "status",
        "in words",
    )
    head = tag("thead", tag("tr", [tag("th", name, scope="col") for name in names]))
    caption = tag(
        "caption",
        "Against the record, the value is time now / time accepted; against the reference, its time / ours. "
        "Noise: what the time may differ by when nothing changed; in brackets how the record's runs differ",
    )
    return scrolled("Speed verdicts", caption, head, tag("tbody", rows))


def _interval(verdict: SpeedVerdict) -> str:
    return "" if verdict.interval is None else " to ".join(f"{end:.4g}" for end in verdict.interval)


def _noise(verdict: SpeedVerdict) -> str:
    if verdict.noise is None:
        return ""
    differing = "1 run" if verdict.spread is None else f"{verdict.runs} runs, by {verdict.spread:.1%}"
    return f"{verdict.noise:.1%} ({differing})"


def _bound(verdict: SpeedVerdict) -> str:
    if verdict.bound is None:
        return ""
    return f"{'≤' if verdict.bound_side == 'max' else '≥'} {verdict.bound:g}"


def _every_figure(timed: Sequence[SpeedResult]) -> Html:
    """All figures and rounds, and what the machine did meanwhile."""
    names = list(dict.fromkeys(name for one in timed for name in one.figures))
    rows = [
        tag(
            "tr",
            tag("th", name, scope="row"),
            [tag("td", f"{one.figures[name]:.5g}" if name in one.figures else "") for one in timed],
        )
        for name in names
    ]
    heads = [tag("th", _name(one), scope="col") for one in timed]
    head = tag("thead", tag("tr", tag("th", "figure", scope="col", class_="text"), heads))
    table = scrolled("All speed figures", head, tag("tbody", rows))
    rounds = "\n".join(_rounds(one) for one in timed if one.compared in one.by_round)
    machines = "\n".join(f"{_name(one)}: {_flat(one.machine)}" for one in timed if one.machine)
    text = tag("pre", block(f"{rounds}\n{machines}".strip()), tabindex=0, role="region", aria_label="Rounds")
    return tag("details", tag("summary", "All figures, rounds and machine"), table, text, class_="paper")


def _rounds(one: SpeedResult) -> str:
    values = ", ".join(f"{value:.5g}" for value in one.by_round[one.compared])
    return f"{_name(one)}: {one.compared} by round: {values}"


def _flat(machine: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in machine.items() if value not in (None, [], {}))


def _score(check: CheckResult) -> Html:
    value = "none" if check.value is None else figure(check.value)
    facts = "; ".join(f"{key.replace('_', ' ')}: {item}" for key, item in check.extra.items())
    return tag("p", f"Composite score {value} {bound_text(check)}, {check.outcome}. {facts}")
