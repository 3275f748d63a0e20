"""What an examination finds, as data: one finding for each thing looked at."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "problem", "skipped"]
SHOWN = {"ok": "ok", "warning": "WARNING", "problem": "PROBLEM", "skipped": "-"}
MARGIN = 9


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    status: "problem" means that a gate will not run; "warning" that it may not, or not as meant; "skipped"
    that it was not looked at or does not matter here, and why. remedy: what to do about it.
    """

    name: str
    status: Status
    text: str
    remedy: str = ""


def render(findings: Sequence[Finding], width: int) -> list[str]:
    """The findings for people, wrapped to `width` columns, and their count."""
    lines: list[str] = []
    label = max((len(finding.name) for finding in findings), default=0)
    for finding in findings:
        head = f"{SHOWN[finding.status]:<{MARGIN}}{finding.name:<{label}} "
        lines += _paragraphs(finding.text, head, width)
        if finding.remedy:
            lines += _paragraphs(finding.remedy, " " * (MARGIN + label - 2) + "-> ", width)
    counts = {word: sum(finding.status == word for finding in findings) for word in ("problem", "warning")}
    named = [f"{count} {word}{'' if count == 1 else 's'}" for word, count in counts.items() if count]
    return [*lines, "", ", ".join(named) if named else "Nothing stands in the way."]


def _paragraphs(text: str, head: str, width: int) -> list[str]:
    """Each line of `text` wrapped by itself; the first begins with `head`."""
    lines: list[str] = []
    for line in text.splitlines():
        indent = head if not lines else " " * len(head)
        lines += textwrap.wrap(
            line,
            max(width, len(head) + 20),
            initial_indent=indent,
            subsequent_indent=" " * len(head),
            break_on_hyphens=False,
            break_long_words=False,
        )
    return lines
