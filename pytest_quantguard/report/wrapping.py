"""Lines of text as wide as the terminal: sentences break between words, commands where a shell lets them.

The texts themselves stay as they are: results, JUnit XML and pipes hold them unbroken.
"""

from __future__ import annotations

import re
import shlex
import shutil
import textwrap

NARROWEST = 60
WIDEST = 80
COMMAND = re.compile(r"^(?P<before>\s*(?:command: |\$ ))(?P<command>\S.*)$")
"""A line of a message that holds a command and nothing else."""
REMEDY = re.compile(r"^(?P<sentence>.*\S:) (?P<command>(?:quantguard|pytest|pip) \S.*)$")
"""One that ends with the command that helps."""


def text_width() -> int:
    """Columns for texts: the terminal's, with a margin; no wider than a CI log is read."""
    return min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST) - 2


def fitted(text: str, width: int) -> str:
    """`text` with its long lines broken: what continues a line stands two columns further in."""
    return "\n".join(part for line in text.split("\n") for part in _fitted_line(line, width))


def command_lines(command: str, width: int, *, before: str = "", indent: int | None = None) -> list[str]:
    """A shell command over several lines that can be pasted into a shell: all but the last end with ` \\`.

    command: as `shlex.join` writes it; an option keeps its value beside it. before: what the first line
    begins with. indent: of the others, by default two columns beyond `before`. A single word may be wider.
    """
    begin = " " * (len(before) + 2 if indent is None else indent)
    lines, line = [], before
    for part in _parts(command):
        if line.strip() and line != before and len(line) + 1 + len(part) > width - 2:
            lines.append(f"{line} \\")
            line = f"{begin}{part}"
        else:
            line = f"{line}{part}" if line == before else f"{line} {part}"
    return [*lines, line]


def _parts(command: str) -> list[str]:
    """The words that must not be torn apart: an option with its value, else every word alone."""
    try:
        words = [shlex.quote(word) for word in shlex.split(command)]
    except ValueError:  # An unbalanced quote: no shell would take it either.
        return [command]
    parts: list[str] = []
    for word in words:
        previous = parts[-1] if parts else ""
        if previous.startswith("-") and " " not in previous and not word.startswith("-"):
            parts[-1] = f"{previous} {word}"
        else:
            parts.append(word)
    return parts


def _fitted_line(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    found = COMMAND.match(line)
    if found is not None:
        return command_lines(found["command"], width, before=found["before"], indent=4)
    indent = len(line) - len(line.lstrip())
    remedy = REMEDY.match(line)
    if remedy is not None:
        before = " " * (indent + 4)
        return [
            *_fitted_line(remedy["sentence"], width),
            *command_lines(remedy["command"], width, before=before),
        ]
    broken = textwrap.wrap(
        line.strip(),
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return broken or [line]
