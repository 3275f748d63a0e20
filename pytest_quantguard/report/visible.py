"""Text of models, servers and users, made safe to show: what cannot be seen or would command a terminal
becomes a visible escape.

Every output (terminal, Markdown, HTML, annotations) passes foreign text through here first, and through its
own escaping afterwards.
"""

from __future__ import annotations

import unicodedata

HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Controls (ESC among them), format characters (all bidi controls, zero widths), surrogates, private and
unassigned ones, line and paragraph separators.
"""
WORKFLOW_COMMANDS = ("::", "##[")
"""What GitHub Actions obeys at the start of a line of output, spaces before it or not."""


NO_CHARACTER = "\ufffd"


def visible(text: str, *, longest: int | None = None) -> str:
    """`text` on one line with every character that hides or commands as an escape such as \\x1b or \\u202e.

    longest: cut to this many characters, in the middle, with the number of those left out.
    """
    if longest is not None and len(text) > longest:
        half = longest // 2
        left_out = len(text) - 2 * half
        return f"{visible(text[:half])} [... {left_out} characters ...] {visible(text[len(text) - half :])}"
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(character) for character in text)


def visible_lines(text: str) -> str:
    """The same for text of several lines: line breaks stay, and no line can command a CI runner."""
    return "\n".join(_powerless(visible(line)) for line in text.replace("\r\n", "\n").split("\n"))


def _escaped(character: str) -> str:
    if unicodedata.category(character) not in HIDDEN_CATEGORIES:
        return character
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character)
    code = ord(character)
    return short or (
        f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    )


def _powerless(line: str) -> str:
    start = line.lstrip()
    if not start.startswith(WORKFLOW_COMMANDS):
        return line
    return f"{line[: len(line) - len(start)]}\\{start}"


def part_of_character(text: str, token_id: int) -> str:
    """The id of a token that is only a part of a character, to be put behind its text; empty for others."""
    return f" <{token_id}>" if NO_CHARACTER in text else ""
