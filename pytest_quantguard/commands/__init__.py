"""The commands of `quantguard`, one module each. A module imports what it needs when it runs."""

from __future__ import annotations

import argparse
import enum
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

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
    _write(line, sys.stderr)


def say(line: str) -> None:
    """A sentence that is the result of a command, on stdout."""
    _write(line, sys.stdout)


def _write(line: str, stream: TextIO) -> None:
    """For who watches as wide as the terminal; elsewhere, where programs read, line by line as it is."""
    from pytest_quantguard.paths import with_short_paths
    from pytest_quantguard.report.visible import visible_lines
    from pytest_quantguard.report.wrapping import fitted, text_width

    text = visible_lines(with_short_paths(line))
    print(fitted(text, text_width()) if stream.isatty() else text, file=stream, flush=True)


def progress_lines() -> ThrottledLines:
    """Progress of long work: a line every 3 s for who watches, every 30 s in a log."""
    from pytest_quantguard.report.progress import ThrottledLines, seconds_between

    return ThrottledLines(tell, 3.0 if sys.stderr.isatty() else seconds_between(0, watched=False))


def positive(text: str) -> int:
    """The type of an argument that counts something."""
    if not re.fullmatch("0*[1-9][0-9]{0,17}", text):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text[:40]!r}")
    return int(text)


def positive_or_all(text: str) -> int:
    """The same, or `all`, for which 0 stands."""
    return 0 if text == "all" else positive(text)


def require_other_file(flag: str, output: Path, *inputs: Path | None) -> None:
    """Raise `ConfigError` where what is to be written would replace what is to be read."""
    from pytest_quantguard.errors import ConfigError

    for path in inputs:
        if path is not None and path.exists() and output.exists() and output.samefile(path):
            raise ConfigError(f"{flag} {output} would replace {path}, which is read. Name another file.")
