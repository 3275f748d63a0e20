"""Paths as a person would type them: relative to the working folder where they lie in it."""

from __future__ import annotations

import re
from pathlib import Path


def shown_path(path: object) -> str:
    """`path`, relative to the working folder if it lies in it."""
    try:
        return str(Path(str(path)).relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def with_short_paths(text: str) -> str:
    """`text` of a message, with every path in the working folder relative to it."""
    folder = str(Path.cwd())
    if folder == "/":
        return text
    return re.sub(rf"(?<![\w./~-]){re.escape(folder)}/(?=[\w.-])", "", text)
