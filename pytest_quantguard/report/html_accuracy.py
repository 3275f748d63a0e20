"""Sections of the HTML report about log-probabilities: where the candidate is far from BF16, and what it says
there. Each returns None where the run measured nothing of the kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from pytest_quantguard.report import charts
from pytest_quantguard.report.headline import (
    PHASES,
    bound_text,
    cell_name,
    figure,
    first_cells,
    label,
    use_of_bound,
)
from pytest_quantguard.report.markup import Child, Html, foreign, join, tag
from pytest_quantguard.report.visible import part_of_character
from pytest_quantguard.results import (
    CellDetail,
    CellResult,
    CheckResult,
    RunResult,
    TokenProbability,
    WorstPosition,
)

HEAT_EDGES = (0.4, 0.7, 0.9, 1.0, 1.5)
"""Shares of a bound from which a cell's colour is the next warmer one."""
MARKS = {"failed": "!", "error": "?", "warned": "*", "skipped": "-"}
LEGEND = (
    "! failed, ? could not run, * warning, ~ interval reaches the bound, - not run. The warmer the colour, "
    "the more of the bound is used."
)
GROUPS = (
    ("validity", "Validity"),
    ("accuracy", "Budget: against BF16"),
    ("drift", "Drift: against the accepted run"),
    ("self_consistency", "Self-consistency"),
)
LLAMA_ROWS = (
    ("Mean KLD", "kl_mean", 1.0, ""),
    ("Maximum KLD", "kl_max", 1.0, ""),
    ("99.9 % KLD", "kl_p999", 1.0, ""),
    ("99.0 % KLD", "kl_p99", 1.0, ""),
    ("95.0 % KLD", "kl_p95", 1.0, ""),
    ("90.0 % KLD", "kl_p90", 1.0, ""),
    ("Median KLD", "kl_median", 1.0, ""),
    ("Mean Δp", "probability_shift_mean", 100.0, " %"),
    ("RMS Δp", "probability_shift_rms", 100.0, " %"),
    ("Same top p", "agreement", 100.0, " %"),
    ("Mean ln(PPL(Q)/PPL(base))", "log_perplexity_ratio", 1.0, ""),
)
NAMED_OUTLIERS = 3
SHOWN_PROMPTS = 40


def budget(result: RunResult) -> Html | None:
    """Checks by phase and batch size, coloured by how much of the bound is used."""
    columns = sorted(
        {
            (check.phase, check.batch_size)
            for check in result.checks
            if check.phase is not None and check.batch_size is not None and check.kind != "speed"
        },
        key=lambda column: (PHASES.index(column[0]), column[1]),
    )
    if not columns:
        return None
    bodies = []
    for kind, title in GROUPS:
        rows: dict[str, dict[tuple[object, object], CheckResult]] = {}
        for check in result.checks:
            if check.kind == kind and (check.phase, check.batch_size) in columns:
                rows.setdefault(label(check), {})[(check.phase, check.batch_size)] = check
        if rows:
            heading = tag("tr", tag("th", title, scope="rowgroup", colspan=len(columns) + 2))
            lines = [
                _heat_row(name, [cells.get(column) for column in columns]) for name, cells in rows.items()
            ]
            bodies.append(tag("tbody", heading, lines))
    phases = [phase for phase in PHASES if any(column[0] == phase for column in columns)]
    spans = [
        tag("th", phase, scope="colgroup", colspan=sum(column[0] == phase for column in columns))
        for phase in phases
    ]
    corner = tag("th", "check", scope="col", rowspan=2, class_="text")
    head = tag(
        "thead",
        tag("tr", corner, spans, tag("th", "bound", scope="col", rowspan=2)),
        tag("tr", [tag("th", f"bs {size}", scope="col") for _, size in columns]),
    )
    return join([scrolled("Checks by phase and batch size", tag("caption", LEGEND), head, *bodies)])


def _heat_row(name: str, checks: Sequence[CheckResult | None]) -> Html:
    bounds = list(dict.fromkeys(bound_text(check) for check in checks if check is not None))
    cells = [_heat_cell(check) for check in checks]
    return tag("tr", tag("th", name, scope="row"), cells, tag("td", ", ".join(filter(None, bounds))))


def _heat_cell(check: CheckResult | None) -> Html:
    if check is None:
        return tag("td", "")
    used = use_of_bound(check)
    mark = MARKS.get(check.outcome, "~" if check.near_bound else "")
    value = {"passed": "ok", "failed": "fail", "error": "error"}.get(check.outcome, check.outcome)
    if check.value is not None:
        value = figure(check.value, check.unit)
    heat = "h5" if check.outcome in ("failed", "error") and used is None else None
    if used is not None:
        heat = f"h{sum(used > edge for edge in HEAT_EDGES)}"
    interval = check.interval
    tip = None
    if interval is not None:
        low, high = (figure(value, check.unit) for value in interval)
        tip = f"95 % interval {low} to {high}"
    return tag("td", f"{value}{' ' if mark else ''}{mark}", class_=heat, title=tip)


def along_span(result: RunResult) -> Html | None:
    """Mean KL by position in the span, a line for each batch size."""
    details = result.details.cells
    if not details:
        return None
    top = max((part.kl_mean for cell in details for part in cell.along_span), default=0.0)
    figures = []
    for phase in PHASES:
        cells = [cell for cell in details if cell.phase == phase]
        if not cells:
            continue
        series = [
            charts.Series(
                f"batch size {cell.batch_size}",
                tuple(((part.begin + part.end - 1) / 2, part.kl_mean) for part in cell.along_span),
            )
            for cell in cells
        ]
        figures.append(
            charts.lines(
                f"{phase}: mean KL by position",
                f"{len(series)} lines between "
                f"{_range(part.kl_mean for c in cells for part in c.along_span)} nats",
                series,
                labels=("position in the scored span", "mean KL, nats"),
                top=top or None,
            )
        )
    return join([tag("div", figures, class_="figures"), _span_table(details)])


def _range(values: Iterable[float]) -> str:
    found = list(values)
    return f"{figure(min(found))} and {figure(max(found))}" if found else "nothing"


def _span_table(details: Sequence[CellDetail]) -> Html:
    """The same as figures, for readers who cannot see the lines; in at most sixteen columns."""
    parts = details[0].along_span
    step = math.ceil(len(parts) / 16)
    chosen = range(0, len(parts), step)
    heads = [tag("th", f"{parts[i].begin}", scope="col") for i in chosen]
    rows = [
        tag(
            "tr",
            tag("th", f"{cell.phase}-bs{cell.batch_size}", scope="row"),
            [tag("td", figure(cell.along_span[i].kl_mean)) for i in chosen if i < len(cell.along_span)],
        )
        for cell in details
    ]
    corner = tag("th", "mean KL from position", scope="col", class_="text")
    table = scrolled("Mean KL by position", tag("thead", tag("tr", corner, heads)), tag("tbody", rows))
    return tag("details", tag("summary", "As a table"), table, class_="paper")


def distribution(result: RunResult) -> Html | None:
    """How positions are distributed over KL, beside the reference against itself."""
    details = result.details.cells
    if not details:
        return None
    figures = []
    for phase in PHASES:
        cells = [cell for cell in details if cell.phase == phase]
        if not cells:
            continue
        shares = [("candidate against BF16", _shares([cell.histogram.candidate for cell in cells]))]
        noises = [cell.histogram.noise for cell in cells if cell.histogram.noise is not None]
        if noises:
            shares.append(("BF16 against itself at another batch size", _shares(noises)))
        figures.append(
            charts.histogram(
                f"{phase}: positions by KL",
                "; ".join(f"{name}: most positions at {_mode(cells[0], values)}" for name, values in shares),
                cells[0].histogram.edges,
                shares,
                labels=("KL, nats (logarithmic)", "share of positions"),
            )
        )
    return join([tag("div", figures, class_="figures"), _noise_table(result)])


def _shares(counts: Sequence[Sequence[int]]) -> list[float]:
    sums = [sum(column) for column in zip(*counts, strict=True)]
    total = sum(sums) or 1
    return [count / total for count in sums]


def _mode(cell: CellDetail, shares: Sequence[float]) -> str:
    index = max(range(len(shares)), key=shares.__getitem__)
    low, high = cell.histogram.edges[index : index + 2]
    return f"{figure(low)} to {figure(high)} nats"


def _noise_table(result: RunResult) -> Html | None:
    """Every bounded metric with its interval, the noise floor and the smallest change that could be seen."""
    checks = [check for check in result.checks if check.kind == "accuracy" and check.value is not None]
    if not checks:
        return None
    rows = []
    for check in checks:
        low, high = check.interval or (None, None)
        cells = (check.value, low, high, check.noise_floor, check.detectable_change)
        name = tag("th", f"{check.phase}-bs{check.batch_size} {check.metric}", scope="row")
        rows.append(tag("tr", name, [tag("td", "" if value is None else figure(value)) for value in cells]))
    heads = ("check", "value", "95 % from", "to", "noise floor", "detectable change")
    head = tag("thead", tag("tr", [tag("th", name, scope="col") for name in heads]))
    table = scrolled("Values with their intervals and the noise floor", head, tag("tbody", rows))
    return tag("details", tag("summary", "Values, intervals, noise floor"), table, class_="paper")


def phases(result: RunResult) -> Html | None:
    """Mean KL of each prompt in prefill and in decode, one chart for each batch size."""
    prompts = result.details.prompts
    sizes = sorted({cell.batch_size for cell in result.details.cells})
    figures = []
    for size in sizes:
        names = f"prefill-bs{size}", f"decode-bs{size}"
        both = [prompt for prompt in prompts if all(name in prompt.kl_mean for name in names)]
        if not both:
            continue
        apart = sorted(both, key=lambda p: -_apart(p.kl_mean[names[0]], p.kl_mean[names[1]]))[:NAMED_OUTLIERS]
        marks = [
            charts.Mark(
                prompt.kl_mean[names[0]],
                prompt.kl_mean[names[1]],
                f"{prompt.id} ({prompt.task}): prefill {figure(prompt.kl_mean[names[0]])}, "
                f"decode {figure(prompt.kl_mean[names[1]])}",
                prompt.id[:24] if prompt in apart else "",
            )
            for prompt in both
        ]
        above = sum(mark.y > mark.x for mark in marks)
        figures.append(
            charts.scatter(
                f"batch size {size}: {len(marks)} prompts",
                f"{above} prompts are worse in decode than in prefill",
                marks,
                labels=("mean KL in prefill, nats", "mean KL in decode, nats"),
            )
        )
    if not figures:
        return None
    remark = (
        "Each point is a prompt. Points above the line are worse in decode than in prefill of the same "
        "positions: KV cache and decode kernels show there."
    )
    return join([tag("p", remark), tag("div", figures, class_="figures"), _prompt_table(result)])


def _apart(one: float, other: float) -> float:
    return abs(math.log((one + 1e-9) / (other + 1e-9)))


def _prompt_table(result: RunResult) -> Html:
    names = [f"{cell.phase}-bs{cell.batch_size}" for cell in result.details.cells]
    prompts = result.details.prompts[:SHOWN_PROMPTS]
    rows = [
        tag(
            "tr",
            tag("th", foreign(prompt.id, longest=60), scope="row"),
            tag("td", foreign(prompt.task, longest=40), class_="text"),
            tag("td", prompt.tokens),
            [tag("td", figure(prompt.kl_mean[name]) if name in prompt.kl_mean else "") for name in names],
        )
        for prompt in prompts
    ]
    heads = [tag("th", name, scope="col") for name in ("prompt", "task", "tokens", *names)]
    table = scrolled("Mean KL of each prompt", tag("thead", tag("tr", heads)), tag("tbody", rows))
    hidden = len(result.details.prompts) + result.details.prompts_left_out - len(prompts)
    more = tag("p", f"{hidden} prompts with a smaller KL are left out.") if hidden else None
    summary = tag("summary", "Prompts with the largest KL, as a table")
    return tag("details", summary, table, more, class_="paper")


def tasks(result: RunResult) -> Html | None:
    """Mean KL and agreement by task and by part of the span."""
    cells = first_cells(result)
    tables = [
        _parts_table(cells, "task", [cell.by_task for cell in cells]),
        _parts_table(cells, "positions", [cell.by_position for cell in cells]),
    ]
    return join(tables) if any(tables) else None


def _parts_table(
    cells: Sequence[CellResult], kind: str, parts: Sequence[dict[str, dict[str, float]]]
) -> Html | None:
    labels = list(dict.fromkeys(name for part in parts for name in part))
    if not labels:
        return None
    values = [part[name]["kl_mean"] for part in parts for name in part if "kl_mean" in part[name]]
    most = max(values, default=0.0) or 1.0
    rows = [
        tag(
            "tr",
            tag("th", foreign(name, longest=60), scope="row"),
            [_part_cell(part.get(name, {}), most) for part in parts],
        )
        for name in labels
    ]
    heads = [tag("th", cell_name(cell), scope="col") for cell in cells]
    head = tag("thead", tag("tr", tag("th", kind, scope="col", class_="text"), heads))
    caption = tag("caption", f"By {kind}: mean KL in nats, and agreement")
    return scrolled(f"Mean KL and agreement by {kind}", caption, head, tag("tbody", rows))


def _part_cell(values: dict[str, float], most: float) -> Html:
    if "kl_mean" not in values:
        return tag("td", "")
    width = 100 * values["kl_mean"] / most
    bar = tag("i", style=f"width: {width:.0f}%")
    agreement = tag("span", f" {values.get('agreement', math.nan):.0%}", class_="soft")
    return tag("td", figure(values["kl_mean"]), agreement, bar, class_="bar")


def worst(result: RunResult) -> Html | None:
    """Where it is worst: the text, and both distributions side by side."""
    places = result.details.worst
    if not places:
        return None
    remark = (
        "The positions with the largest KL, first one of each prompt. The marked token is the one that "
        "stands in the scored text; probabilities in brackets are those of the same token on the other "
        "side, and – means outside its top K."
    )
    return join([tag("p", remark), *(_position(place, number) for number, place in enumerate(places, 1))])


def _position(place: WorstPosition, number: int) -> Html:
    title = tag(
        "h3",
        f"{number}. ",
        foreign(place.prompt, longest=80),
        f", position {place.position} of {place.span}: KL {figure(place.kl)} in "
        f"{place.phase}-bs{place.batch_size} ",
        _flag(place),
    )
    context = tag(
        "p",
        foreign(place.before),
        tag("mark", foreign(place.reference)),
        foreign(place.after),
        class_="context",
    )
    tables = tag(
        "div",
        _top("BF16", place.baseline, place),
        _top("candidate", place.candidate, place),
        class_="sides",
    )
    cells = ", ".join(f"{name} {figure(value)}" for name, value in place.kl_by_cell.items())
    return tag(
        "article",
        title,
        context,
        tables,
        tag("p", f"KL here: {cells}", class_="soft small"),
        class_="position",
    )


def _flag(place: WorstPosition) -> Html | None:
    if not place.flip:
        return None
    return tag("span", "confident flip" if place.confident else "flip", class_="flag")


def _top(side: str, tokens: Sequence[TokenProbability], place: WorstPosition) -> Html:
    rows = []
    for rank, token in enumerate(tokens, start=1):
        elsewhere = "–" if token.elsewhere is None else f"{token.elsewhere:.3f}"
        bar = tag("i", style=f"width: {100 * token.probability:.0f}%")
        cells = (
            tag("td", rank),
            tag("td", tag("bdi", _token(token), class_="token"), class_="text", title=f"id {token.id}"),
            tag("td", f"{token.probability:.3f}", bar, class_="bar"),
            tag("td", f"({elsewhere})", class_="soft"),
        )
        rows.append(tag("tr", cells, class_="flip" if place.flip and rank == 1 else None))
    names = (("#", None), ("token", "text"), ("p", None), ("other", None))
    heads = [tag("th", name, scope="col", class_=kind) for name, kind in names]
    columns = tag("colgroup", tag("col"), tag("col", class_="token"), tag("col"), tag("col"))
    head = tag("thead", tag("tr", heads))
    return tag("table", tag("caption", f"{side}, top {len(tokens)}"), columns, head, tag("tbody", rows))


def _token(token: TokenProbability) -> str:
    """The text; with the id where the token is only part of a character."""
    return token.text + part_of_character(token.text, token.id)


def llama_cpp(result: RunResult) -> Html | None:
    """The rows of `llama-perplexity --kl-divergence`, with standard errors where they are known."""
    cells = [cell for cell in first_cells(result) if cell.metrics]
    if not cells:
        return None
    rows: list[Child] = []
    for name, metric, scale, unit in LLAMA_ROWS:
        values = [tag("td", _with_error(cell, metric, scale, unit)) for cell in cells]
        rows.append(tag("tr", tag("th", name, scope="row"), values))
    heads = [tag("th", cell_name(cell), scope="col") for cell in cells]
    head = tag("thead", tag("tr", tag("th", "statistic", scope="col", class_="text"), heads))
    remark = (
        "The statistics of llama.cpp's perplexity tool, so that figures can be compared: Q is the "
        "candidate, base is BF16. KLD is a lower bound from the top K of both sides here, and over the "
        "whole vocabulary there. Errors are by prompt, and therefore larger than errors by token."
    )
    return join([tag("p", remark), scrolled("Statistics as in llama.cpp", head, tag("tbody", rows))])


def _with_error(cell: CellResult, metric: str, scale: float, unit: str) -> str:
    if metric not in cell.metrics:
        return ""
    value = f"{cell.metrics[metric] * scale:.4g}"
    error = cell.standard_errors.get(metric)
    return f"{value} ± {error * scale:.2g}{unit}" if error is not None else f"{value}{unit}"


def scrolled(name: str, *parts: Child) -> Html:
    """A table that scrolls by itself on a narrow screen, by keyboard too."""
    return tag("div", tag("table", *parts), class_="scroll", tabindex=0, role="region", aria_label=name)
