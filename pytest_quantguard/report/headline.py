"""What every form of a report says first: the verdict in words, what failed, and the figures that matter
most.

Pure functions over a result; they know neither terminal nor markup.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pytest_quantguard.logprobs.metrics import METRICS
from pytest_quantguard.results import NOT_RUN, RELATIVE, CellResult, CheckResult, RunResult

PHASES = ("prefill", "decode")
OUTCOME_WORDS = (
    ("failed", "failed"),
    ("error", "could not run"),
    ("warned", "with a warning"),
    ("skipped", "skipped"),
)
HEADLINE_METRICS = ("kl_mean", "kl_p99", "agreement", "log_perplexity_ratio")


@dataclass(frozen=True, slots=True)
class FailedGroup:
    """Checks of one kind and metric that failed or could not run.

    where: their cells in short. worst: the one farthest beyond its bound.
    """

    label: str
    outcome: str
    where: str
    checks: tuple[CheckResult, ...]
    worst: CheckResult

    @property
    def sentence(self) -> str:
        """One line: what, where, how bad."""
        worst = self.worst
        if self.outcome == "error":
            return f"{self.label}: could not run ({first_line(worst.message)})"
        if worst.value is None or worst.bound is None:
            return f"{self.label}{self.where}: {first_line(worst.message)}"
        allowed = "at most" if worst.bound_side == "max" else "at least"
        which = "" if len(self.checks) == 1 else "worst "
        value, bound = figure(worst.value, worst.unit), bound_text(worst)[2:]
        return f"{self.label}{self.where}: {which}{value}, {allowed} {bound}"


@dataclass(frozen=True, slots=True)
class Headline:
    """The worst value of a metric over all cells, with the bound of its check."""

    metric: str
    value: float
    where: str
    bound: str = ""


def first_line(message: str) -> str:
    """The first sentence of a message, as far as it is one line."""
    return message.strip().split("\n", 1)[0]


def verdict_line(result: RunResult) -> str:
    """Name, verdict, counts, time."""
    held = sum(check.outcome == "passed" for check in result.checks)
    parts = [f"{held} of {len(result.checks)} checks held"]
    for outcome, words in OUTCOME_WORDS:
        count = sum(check.outcome == outcome for check in result.checks)
        if count:
            parts.append(f"{count} {words}")
    if result.unselected:
        parts.append(f"{result.unselected} not selected")
    if result.partial:
        parts.append("the run ended early")
    return f"{result.name}: {result.verdict.upper()} ({', '.join(parts)}; {result.seconds:.0f} s)"


def label(check: CheckResult) -> str:
    """The row of a table that a check belongs to."""
    if check.phase is None:
        return check.id
    if check.kind == "accuracy":
        return check.metric or check.id
    way = str(check.extra.get("comparison", check.metric or ""))
    kind = {"self_consistency": "self", "validity": "validity"}.get(check.kind, check.kind)
    return f"{kind} {way}".strip()


def failed_groups(result: RunResult) -> list[FailedGroup]:
    """What failed, then what could not run, each in the order of the run."""
    groups: dict[tuple[str, str], list[CheckResult]] = {}
    for check in result.failures:
        common = first_line(check.message).removeprefix(NOT_RUN) if check.outcome == "error" else label(check)
        groups.setdefault((check.outcome, common), []).append(check)
    found = [_group(outcome, checks, result.checks) for (outcome, _), checks in groups.items()]
    return sorted(found, key=lambda group: group.outcome != "failed")


def reason(result: RunResult) -> str:
    """Why the verdict is what it is, in one line."""
    groups = failed_groups(result)
    if groups:
        more = f"; and {len(groups) - 1} more" if len(groups) > 1 else ""
        return groups[0].sentence + more
    if result.partial:
        return "the run ended before every check had a result"
    if result.verdict == "incomplete":
        return "no check ran"
    warned = [check for check in result.checks if check.outcome == "warned"]
    if warned:
        return f"nothing failed; {warned[0].id} warns: {first_line(warned[0].message)}"
    near = [check.id for check in result.checks if check.near_bound]
    return f"every check held; the interval of {len(near)} reaches the bound" if near else "every check held"


def headlines(result: RunResult) -> list[Headline]:
    """The worst values over all cells."""
    found = []
    for name in HEADLINE_METRICS:
        metric = METRICS[name]
        cells = [cell for cell in first_cells(result) if name in cell.metrics]
        if not cells:
            continue
        pick = max if metric.better == "lower" else min
        worst = pick(cells, key=lambda cell: cell.metrics[name])
        checks = [
            check
            for check in result.checks
            if check.kind == "accuracy" and check.metric == name and in_cell(check, worst)
        ]
        bound = bound_text(checks[0]) if checks else ""
        found.append(Headline(name, worst.metrics[name], cell_name(worst), bound))
    return found


def first_cells(result: RunResult) -> list[CellResult]:
    """Cells as first measured, cold, in the order of tables."""
    cells = [cell for cell in result.cells if not cell.warm and cell.repeat == 0]
    return sorted(cells, key=lambda cell: (PHASES.index(cell.phase), cell.batch_size))


def cell_name(cell: CellResult) -> str:
    """As in test ids: prefill-bs8."""
    return f"{cell.phase}-bs{cell.batch_size}"


def in_cell(check: CheckResult, cell: CellResult) -> bool:
    """Whether a check is about this cell."""
    return (check.phase, check.batch_size) == (cell.phase, cell.batch_size)


def bound_text(check: CheckResult) -> str:
    """The bound with its side; empty where there is none."""
    if check.bound is None:
        return ""
    limit = f"{check.bound * 100:+g} %" if check.unit == RELATIVE else f"{check.bound:g}"
    return f"{'≤' if check.bound_side == 'max' else '≥'} {limit}"


def figure(value: float, unit: str | None = None) -> str:
    """A value for people: relative changes as percentages, everything else with four digits."""
    if unit == RELATIVE:
        return f"{value * 100:+.1f} %" if abs(value) < 1 else f"{value * 100:+.0f} %"
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.4f}" if abs(value) < 1 else f"{value:.4g}"


def use_of_bound(check: CheckResult) -> float | None:
    """How much of its bound a value uses: 1 at the bound, more beyond it; None without value or bound.

    Metrics whose best value is 1 (agreement, cosine) are counted by what is missing to 1.
    """
    if check.value is None or check.bound is None:
        return None
    value, bound = check.value, check.bound
    if check.bound_side == "min":
        metric = METRICS.get(check.metric or "")
        if metric is not None and metric.limits[1] == 1.0 and bound < 1:
            return max(0.0, 1 - value) / (1 - bound)
        return bound / value if value > 0 else float("inf")
    if bound <= 0:
        return 0.0 if value <= bound else float("inf")
    return max(0.0, value) / bound


def _group(outcome: str, checks: list[CheckResult], everything: Iterable[CheckResult]) -> FailedGroup:
    worst = max(checks, key=lambda check: use_of_bound(check) or 0.0)
    name = label(checks[0])
    if outcome == "error":
        name = checks[0].id if len(checks) == 1 else f"{len(checks)} checks"
    labels = set(map(label, checks))
    alike = [check for check in everything if label(check) in labels]
    return FailedGroup(name, outcome, _where(checks, alike), tuple(checks), worst)


def _where(checks: Iterable[CheckResult], alike: Iterable[CheckResult]) -> str:
    """The cells of `checks` among those of all checks like them: " in decode", " in prefill bs 1, 8"."""
    ours, every = _sizes(checks), _sizes(alike)
    if not ours:
        return ""
    if ours == every and sum(map(len, every.values())) > 1:
        return " in every cell"
    parts = [
        phase
        if ours[phase] == every[phase] and len(every[phase]) > 1
        else f"{phase} bs {_listed(ours[phase])}"
        for phase in PHASES
        if phase in ours
    ]
    return f" in {'; '.join(parts)}"


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(sizes)))


def _sizes(checks: Iterable[CheckResult]) -> dict[str, set[int]]:
    sizes: dict[str, set[int]] = {}
    for check in checks:
        if check.phase is not None and check.batch_size is not None:
            sizes.setdefault(check.phase, set()).add(check.batch_size)
    return sizes
