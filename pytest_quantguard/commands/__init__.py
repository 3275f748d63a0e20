"""The commands of `quantguard`, one module each. A module imports what it needs when it runs."""

from __future__ import annotations

import enum
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_quantguard.report.progress import ThrottledLines


class ExitCode(enum.IntEnum):
    """What every command returns."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    IMPOSSIBLE = 3
    INTERRUPTED = 130


def print_json(value: Any) -> None:
    """One JSON document on stdout, for machines."""
    import orjson

    sys.stdout.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode())


def tell(line: str) -> None:
    """Progress and remarks, on stderr so that stdout stays for results."""
    from pytest_quantguard.report.visible import visible_lines

    print(visible_lines(line), file=sys.stderr, flush=True)


def progress_lines() -> ThrottledLines:
    """Progress of long work: a line every 3 s for who watches, every 30 s in a log."""
    from pytest_quantguard.report.progress import ThrottledLines, seconds_between

    return ThrottledLines(tell, 3.0 if sys.stderr.isatty() else seconds_between(0, watched=False))
