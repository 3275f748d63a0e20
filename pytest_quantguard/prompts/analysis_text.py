"""An analysis as plain text, for a terminal or a log."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_quantguard.prompts.analysis import Analysis, GroupAnalysis, MixDistance

SHOWN_GROUPS = 5
SHOWN_IDS = 6


def format_analysis(analysis: Analysis, against: tuple[str, MixDistance] | None = None) -> str:
    """Tables of an analysis, and if given its distance from the set of that name."""
    parts = [_tasks(analysis), _facts(analysis)]
    if against is not None:
        parts.append(_distance(*against))
    return "\n\n".join(parts)


def _tasks(analysis: Analysis) -> str:
    head = [
        "task",
        "prompts",
        "share",
        "tokens: median",
        "p90",
        "most",
        "low meaning",
        "flagged",
        "zlib",
        "bits/char",
    ]
    groups = sorted(analysis.tasks.items(), key=lambda item: -item[1].prompts)
    rows = [_row(task, group) for task, group in [*groups, ("all", analysis.total)]]
    return f"{analysis.name}: {analysis.total.prompts} prompts, tokens {analysis.tokens_are}\n" + _table(
        head, rows
    )


def _row(name: str, group: GroupAnalysis) -> list[str]:
    lengths = group.lengths
    return [
        name,
        str(group.prompts),
        f"{group.share:.1%}",
        f"{lengths.median:.0f}",
        f"{lengths.p90:.0f}",
        str(lengths.most),
        f"{group.low_meaning:.0%}",
        f"{group.flagged:.0%}",
        f"{group.compression:.2f}",
        f"{group.class_entropy:.2f}",
    ]


def _facts(analysis: Analysis) -> str:
    total = analysis.total
    languages = sorted(analysis.languages.items(), key=lambda item: -item[1])
    unit = "token ids" if analysis.tokens_are == "counted" else "words"
    lines = [
        f"low-meaning text    {total.low_meaning:.1%}; {len(analysis.low_meaning_ids)} prompts flagged",
        f"  of it             opaque {total.opaque:.1%}, word lists {total.word_list:.1%}, "
        f"repetition {total.repetition:.1%}",
        "languages           " + ", ".join(f"{language} {share:.1%}" for language, share in languages),
        f"exact duplicates    {_groups(analysis.exact_duplicates)}",
        f"near duplicates     {_groups(analysis.near_duplicates)}",
        f"shared beginnings   {analysis.shared_prefix:.1%} of the text",
        f"vocabulary          {analysis.distinct_tokens} distinct {unit}",
    ]
    return "\n".join(lines)


def _groups(groups: Sequence[Sequence[str]] | None) -> str:
    if groups is None:
        return "not looked for"
    if not groups:
        return "none"
    extra = sum(len(group) - 1 for group in groups)
    shown = "; ".join(_ids(group) for group in groups[:SHOWN_GROUPS])
    more = f"; and {len(groups) - SHOWN_GROUPS} more groups" if len(groups) > SHOWN_GROUPS else ""
    return f"{extra} in {len(groups)} groups: {shown}{more}"


def _ids(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else ""
    return ", ".join(printable(name) for name in ids[:SHOWN_IDS]) + more


def _distance(name: str, distance: MixDistance) -> str:
    rows = [
        ["tasks", f"{distance.tasks:.3f}"],
        ["languages", f"{distance.languages:.3f}"],
        ["lengths", f"{distance.lengths:.3f}"],
        ["low meaning", f"{distance.low_meaning:.3f}"],
        ["vocabulary", f"{distance.vocabulary:.3f}"],
    ]
    return f"distance from {name} (0 the same, 1 nothing in common)\n" + _table(["mix of", "distance"], rows)


def printable(text: str) -> str:
    """Control characters and direction marks written out, so that no prompt can garble a terminal."""
    return "".join(
        character
        if character.isprintable() and not _is_direction_mark(character)
        else f"\\u{ord(character):04x}"
        for character in text
    )


def _is_direction_mark(character: str) -> bool:
    return (
        "\u200e" <= character <= "\u200f"
        or "\u202a" <= character <= "\u202e"
        or "\u2066" <= character <= "\u2069"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [list(head), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return "\n".join(
        "  "
        + "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
