"""A self-test as text: a matrix of faults and kinds of checks for people, and the same as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from functools import partial

from pytest_quantguard.results import Kind
from pytest_quantguard.selftest.results import FaultResult, KindStatus, SelftestResult

KIND_NAMES: dict[Kind, str] = {
    "validity": "validity",
    "accuracy": "budget",
    "self_consistency": "self",
    "drift": "drift",
}
WORDS: dict[KindStatus, str] = {
    "caught": "CAUGHT",
    "warned": "warned",
    "missed": "missed",
    "unusable": "refused",
    "not_measured": "-",
}
SHOWN_ALARMS = 3
SHOWN_DIAGNOSIS = 140
"""Characters of a diagnosis that stand in the text; the whole of it is in the Markdown and the JSON."""
LEGEND = (
    "budget: bounds against BF16; self: self-consistency. refused: no usable answers left to judge; -: not "
    "measured any more, an absolute bound had caught it."
)


def render_text(result: SelftestResult, width: int = 80) -> list[str]:
    """Everything, for a terminal: what was run, the matrix, what was missed and why, the summary.

    Where the matrix is wider than `width`, a fault takes two lines.
    """
    before = [f"{result.name}: {result.candidate}", *_plan_lines(result), "", *_clean_lines(result), ""]
    matrix = _aligned([_header(result), *(_row(result, fault) for fault in result.tried)])
    if max(map(len, matrix)) > width:
        matrix = _folded(result, width)
    return [*_wrapped(before, width), *matrix, *_wrapped([LEGEND, *_after(result)], width)]


def _folded(result: SelftestResult, width: int) -> list[str]:
    """The matrix with the columns after those of the kinds on a line of their own."""
    rows = [_header(result), *(_row(result, fault) for fault in result.tried)]
    first_line = _aligned([[row[0], *row[2:-4]] for row in rows])
    folded = [first_line[0]]
    for line, (_, severity, *_, first, judged, moved, seconds) in zip(first_line[1:], rows[1:], strict=True):
        rest = f"    {severity}: {first}, {judged} failed, KL from clean {moved}, {seconds} s"
        folded += [line, *_wrapped([rest], width)]
    return folded


def _after(result: SelftestResult) -> list[str]:
    lines = []
    for title, faults in (
        ("Missed", [fault for fault in result.tried if fault.status != "caught"]),
        ("Not tried", [fault for fault in result.faults if fault.status == "not_tried"]),
    ):
        if faults:
            lines += ["", f"{title}:"]
            lines += [f"  {fault.specification} ({fault.severity}): {fault.advice}" for fault in faults]
    shorten = partial(textwrap.shorten, width=SHOWN_DIAGNOSIS, placeholder=" ...")
    diagnosed = [
        f"  {fault.specification}: {shorten(fault.diagnosis[0])}" for fault in result.tried if fault.diagnosis
    ]
    lines += ["", "What the gate says of them:", *diagnosed] if diagnosed else []
    noted = [f"  {fault.specification}: {fault.note}" for fault in result.tried if fault.note]
    lines += ["", "Tried otherwise than by default:", *noted] if noted else []
    return [*lines, "", *summary_lines(result)]


def _wrapped(lines: Iterable[str], width: int) -> list[str]:
    """Each line within `width`; what it continues with stands further in than it begins."""
    wrapped = []
    for line in "\n".join(lines).split("\n"):
        begin = line[: len(line) - len(line.lstrip())]
        wrapped += textwrap.wrap(
            line.strip(),
            width,
            initial_indent=begin,
            subsequent_indent=f"{begin}  ",
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return wrapped


def render_markdown(result: SelftestResult) -> list[str]:
    """The matrix for a page: with what each fault is, and the diagnosis that the gate gave."""
    lines = [f"Candidate: {result.candidate}. {' '.join(_plan_lines(result))}", ""]
    lines += [*_clean_lines(result), ""]
    lines += [*summary_lines(result), ""]
    header = [*_header(result), "diagnosis"]
    lines += ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for fault in result.tried:
        cells = [*_row(result, fault), fault.diagnosis[0] if fault.diagnosis else ""]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", LEGEND]
    lines += [f"{fault.specification}: {fault.note}." for fault in result.tried if fault.note]
    others = [fault for fault in result.faults if fault.status != "caught"]
    if others:
        lines += ["", "| missed or not tried | why |", "|---|---|"]
        lines += [f"| {fault.specification} ({fault.severity}) | {fault.advice} |" for fault in others]
    return lines


def summary_lines(result: SelftestResult) -> list[str]:
    """Verdict, caught by severity, false alarms."""
    counts = ", ".join(
        f"{caught} of {tried} {'harmless' if severity == 'none' else severity}"
        for severity, (caught, tried) in result.caught_by_severity().items()
    )
    alarms = len(result.alarms)
    lines = [
        f"caught: {counts or 'nothing tried'}; false alarms: {alarms} in {len(result.clean)} clean runs; "
        f"{result.seconds:.0f} s"
    ]
    missed = [fault.specification for fault in result.must_catch_missed]
    if missed:
        lines.append(f"must be caught and was not: {', '.join(missed)}")
    return [*lines, f"{result.name}: selftest {'PASSED' if result.passed else 'FAILED'}"]


def _plan_lines(result: SelftestResult) -> list[str]:
    plan = result.plan
    cells = ", ".join(plan.cells)
    asked = (
        f"{plan.prompts} of {plan.suite_prompts} prompts, {plan.positions} positions in each cell: {cells}."
    )
    notes = [f"{note[0].upper()}{note[1:]}." for note in plan.notes]
    drift = {
        "stored": "Drift is judged against the stored accepted run.",
        "made from the clean candidate": "Drift is judged against an accepted run made from the clean "
        "candidate for this self-test; nothing is stored.",
        "not asked for": "The config asks for no drift check.",
    }[plan.accepted_run]
    early = (
        ["A fault is not measured any further once validity or an absolute bound has caught it."]
        if plan.stops_early
        else []
    )
    return [asked, *notes, drift, *early]


def _clean_lines(result: SelftestResult) -> list[str]:
    lines = []
    for number, run in enumerate(result.clean, start=1):
        said = f"{len(run.alarms)} FALSE ALARMS" if run.alarms else "no alarm"
        lines.append(
            f"clean run {number} (prompts {run.order}): {said}, {run.checks} checks, {run.seconds:.1f} s"
        )
        lines += [f"  {alarm.id}: {alarm.message}" for alarm in run.alarms[:SHOWN_ALARMS]]
        if len(run.alarms) > SHOWN_ALARMS:
            lines.append(f"  and {len(run.alarms) - SHOWN_ALARMS} more")
    return lines


def _kinds(result: SelftestResult) -> list[Kind]:
    found = {kind for fault in result.tried for kind in fault.kinds}
    return [kind for kind in KIND_NAMES if kind in found]


def _header(result: SelftestResult) -> list[str]:
    kinds = [KIND_NAMES[kind] for kind in _kinds(result)]
    return ["fault", "severity", *kinds, "first caught by", "failed", "KL from clean", "seconds"]


def _row(result: SelftestResult, fault: FaultResult) -> list[str]:
    kinds = [WORDS[fault.kinds.get(kind, "not_measured")] for kind in _kinds(result)]
    judged = f"{fault.failed_checks}/{fault.judged_checks}{'' if fault.complete else '+'}"
    moved = "-" if fault.effect is None else f"{fault.effect.kl_from_clean:.2g}"
    mark = "!" if fault.must_catch and fault.status != "caught" else ""
    return [
        fault.specification,
        fault.severity + mark,
        *kinds,
        fault.first_check or ("harmless" if fault.severity == "none" else fault.status.upper()),
        judged,
        moved,
        f"{fault.seconds:.1f}",
    ]


def _aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    table = [list(row) for row in rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
