"""What a prompt set is made of, as parts of an HTML page: of `quantguard analyze`, and of a run's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_quantguard.prompts.analysis import Composition, GroupAnalysis, MixDistance
from pytest_quantguard.prompts.duplicates import INSTALL
from pytest_quantguard.report.charts import bars, histogram
from pytest_quantguard.report.html_accuracy import scrolled
from pytest_quantguard.report.markup import Child, Html, foreign, join, tag
from pytest_quantguard.results import RunResult

MOST_ROWS = 12
MOST_GROUPS = 50

Against = tuple[Composition, MixDistance]
"""Another set, and how far it is."""


def prompts(result: RunResult) -> Html | None:
    """The prompts of a run's suite, folded: they are the same in every run of a config."""
    found = result.prompts
    if found is None:
        return None
    tokens = found.total.lengths
    summary = (
        f"{found.total.prompts} prompts of {len(found.tasks)} tasks, {tokens.least} to {tokens.most} tokens, "
        f"{found.total.low_meaning:.0%} of the text of little meaning"
    )
    parts = [part for _, title, body in composition_parts(found) for part in (tag("h3", title), body)]
    return tag("details", tag("summary", summary), parts, class_="paper")


def composition_parts(found: Composition, against: Against | None = None) -> list[tuple[str, str, Html]]:
    """(anchor, title, body) of each part. against: another set to show beside it."""
    parts = [
        ("mix", "The mix", _mix(found, against)),
        ("meaning", "Low-meaning text", _meaning(found, against)),
        ("duplicates", "Duplicates and shared beginnings", _duplicates(found)),
    ]
    return [*parts, ("distance", "Distance from the other set", _distance(against))] if against else parts


def _sets(analysis: Composition, against: Against | None) -> list[Composition]:
    return [analysis, *([against[0]] if against is not None else [])]


def _mix(analysis: Composition, against: Against | None) -> Html:
    groups = sorted(analysis.tasks.items(), key=lambda item: -item[1].prompts)
    columns = (
        *("task", "prompts", "share", "tokens: median", "p90", "most", "low meaning", "flagged"),
        *("zlib", "bits/char"),
    )
    head = tag(
        "thead",
        tag(
            "tr",
            [
                tag("th", column, scope="col", class_="text" if column == "task" else None)
                for column in columns
            ],
        ),
    )
    rows = [_row(task, group) for task, group in (*groups, ("all", analysis.total))]
    sets, names = _sets(analysis, against), _names(analysis, against)
    tasks = [{task: group.share for task, group in one.tasks.items()} for one in sets]
    charts = (
        _shares("Share of each task", tasks, names),
        _shares("Share of each language", [one.languages for one in sets], names),
        _lengths(analysis, against),
        _meaning_by_task(analysis),
    )
    lengths = tag("p", f"Tokens are {analysis.tokens_are}; {analysis.total.lengths.total} in all.")
    return join([scrolled("Tasks", head, tag("tbody", rows)), lengths, tag("div", charts, class_="figures")])


def _row(name: str, group: GroupAnalysis) -> Html:
    lengths = group.lengths
    cells = (
        group.prompts,
        f"{group.share:.1%}",
        f"{lengths.median:.0f}",
        f"{lengths.p90:.0f}",
        lengths.most,
        f"{group.low_meaning:.0%}",
        f"{group.flagged:.0%}",
        f"{group.compression:.2f}",
        f"{group.class_entropy:.2f}",
    )
    return tag("tr", tag("th", foreign(name, longest=60), scope="row"), [tag("td", cell) for cell in cells])


def _lengths(analysis: Composition, against: Against | None) -> Html:
    sets = _sets(analysis, against)
    starts = sorted({start for one in sets for start in one.length_histogram})
    edges = [float(starts[0])]
    while edges[-1] <= starts[-1]:
        edges.append(edges[-1] * 2)
    shares = [
        (name, [one.length_histogram.get(int(edge), 0.0) for edge in edges[:-1]])
        for name, one in zip(_names(analysis, against), sets, strict=True)
    ]
    lengths = analysis.total.lengths
    said = f"From {lengths.least} to {lengths.most} tokens, half of the prompts up to {lengths.median:.0f}"
    return histogram("Tokens of a prompt", said, edges, shares, labels=("tokens", "share of prompts"))


def _meaning_by_task(analysis: Composition) -> Html | None:
    if not any(group.low_meaning for group in analysis.tasks.values()):
        return None
    groups = sorted(analysis.tasks.items(), key=lambda item: -item[1].low_meaning)[:MOST_ROWS]
    kinds = [(task, (group.opaque, group.word_list, group.repetition)) for task, group in groups]
    said = ", ".join(f"{task} {group.low_meaning:.0%}" for task, group in groups)
    names = ("opaque", "word list", "repetition")
    return bars("Low-meaning text by task", said, kinds, names=names, label="share of the task's text")


def _meaning(analysis: Composition, against: Against | None) -> Html:
    total = analysis.total
    said = (
        f"{total.low_meaning:.1%} of the text has little meaning: opaque {total.opaque:.1%}, word lists "
        f"{total.word_list:.1%}, repetition {total.repetition:.1%}. Of "
        f"{_counted(len(analysis.low_meaning_ids), 'prompt')} it is 40 % or more."
    )
    other = None
    if against is not None:
        share = f": {against[0].total.low_meaning:.1%} of the text."
        other = tag("p", "In ", foreign(against[0].name), share)
    ids = analysis.low_meaning_ids
    flagged = tag(
        "details", tag("summary", _counted(len(ids), "flagged prompt")), tag("p", foreign(", ".join(ids)))
    )
    return join([tag("p", said), other, flagged if ids else None])


def _duplicates(analysis: Composition) -> Html:
    unit = "token ids" if analysis.tokens_are == "counted" else "words"
    parts: list[Child] = [
        tag("p", f"{analysis.shared_prefix:.1%} of the text is a beginning that another prompt has too."),
        tag("p", f"{analysis.distinct_tokens} distinct {unit}."),
    ]
    for name, groups in (
        ("exact duplicates", analysis.exact_duplicates),
        ("near duplicates", analysis.near_duplicates),
    ):
        if groups is None:
            parts.append(tag("p", f"Nobody looked for {name}: that needs {INSTALL}."))
            continue
        shown = [tag("li", foreign(", ".join(group))) for group in groups[:MOST_GROUPS]]
        more = f", the first {MOST_GROUPS} are shown" if len(groups) > MOST_GROUPS else ""
        parts.append(tag("p", f"{_counted(len(groups), 'group')} of {name}{more}."))
        parts.append(tag("ul", shown) if shown else None)
    return join(parts)


def _distance(against: Against) -> Html:
    other, distance = against
    rows = [
        tag("tr", tag("th", name.replace("_", " "), scope="row"), tag("td", f"{value:.3f}"))
        for name, value in distance.to_json().items()
    ]
    head = tag("thead", tag("tr", tag("th", "of", scope="col"), tag("th", "distance", scope="col")))
    said = tag("p", "From ", foreign(other.name), ": 0 is the same mix, 1 has nothing in common.")
    return join([said, scrolled("Distance", head, tag("tbody", rows))])


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def _names(analysis: Composition, against: Against | None) -> list[str]:
    return [one.name for one in _sets(analysis, against)]


def _shares(title: str, sets: Sequence[Mapping[str, float]], names: Sequence[str]) -> Html:
    """Bars of the largest shares in any of the sets."""
    everything = {name for one in sets for name in one}
    largest = sorted(everything, key=lambda name: (-max(one.get(name, 0.0) for one in sets), name))[
        :MOST_ROWS
    ]
    rows = [(name, [one.get(name, 0.0) for one in sets]) for name in largest]
    said = ", ".join(f"{name} {values[0]:.1%}" for name, values in rows)
    return bars(title, said, rows, names=names, label="share")
