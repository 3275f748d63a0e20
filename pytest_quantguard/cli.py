"""The `quantguard` command: one parser; each command is a small module of `commands/`."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import groupby
from types import ModuleType

import pytest_quantguard
from pytest_quantguard.commands import (
    ExitCode,
    accept,
    analyze,
    calibration_set,
    capture,
    check_checkpoint,
    compare,
    doctor,
    emulate,
    history,
    init,
    report,
    run,
    schema,
    selftest,
    sensitivity,
    suggest,
    tell,
)
from pytest_quantguard.errors import ConfigError, QuantguardError

COMMANDS: tuple[ModuleType, ...] = (
    init,
    doctor,
    capture,
    run,
    accept,
    suggest,
    compare,
    report,
    history,
    emulate,
    check_checkpoint,
    selftest,
    sensitivity,
    analyze,
    calibration_set,
    schema,
)
"""In the order of --help. Each has NAME, SUMMARY, DESCRIPTION, add_arguments(parser), execute(arguments)."""

EXIT_CODES = """exit codes:
  0    done; every check held
  1    a check failed
  2    wrong use, or a config that is wrong
  3    could not be done: server, model, baseline, disk
  130  interrupted"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="quantguard",
        description=_laid_out(
            "A gate for quantized LLM servers: accuracy against a stored BF16 baseline, and speed."
        ),
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=pytest_quantguard.__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for module in COMMANDS:
        command = commands.add_parser(
            module.NAME,
            help=module.SUMMARY,
            description=_laid_out(module.DESCRIPTION),
            epilog=EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(execute=module.execute)
    return parser


def _laid_out(text: str) -> str:
    """Paragraphs wrapped to the terminal; indented lines stay as they are."""
    width = min(shutil.get_terminal_size().columns, 100) - 1
    blocks = [list(lines) for _, lines in groupby(text.splitlines(), key=lambda line: line[:1] in ("", " "))]
    return "\n".join(
        "\n".join(block)
        if block[0][:1] in ("", " ")
        else textwrap.fill(" ".join(block), width, break_on_hyphens=False)
        for block in blocks
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code. A user's mistake is a message on stderr, never a traceback.

    What follows "--" belongs to pytest.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # A locale without UTF-8 is no reason to fail.
    words = list(sys.argv[1:] if argv is None else argv)
    ours, theirs = (
        (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    )
    parser = build_parser()
    arguments = parser.parse_args(ours)
    if theirs and not hasattr(arguments, "pytest_arguments"):
        parser.error(f"'{arguments.command}' passes nothing to pytest, so '--' has no place here")
    arguments.pytest_arguments = theirs
    try:
        code = int(arguments.execute(arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # Who reads our output has seen enough.
        _write_no_more()
        return ExitCode.IMPOSSIBLE
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _write_no_more()
        where = f"{error.filename}: " if error.filename is not None else ""
        tell(f"quantguard: {where}{error.strerror or error}. Free space or permissions there.")
        return ExitCode.IMPOSSIBLE
    except ConfigError as error:
        tell(f"quantguard: {error}")
        return ExitCode.USAGE
    except QuantguardError as error:
        tell(f"quantguard: {error}")
        return ExitCode.IMPOSSIBLE
    except KeyboardInterrupt:
        print("quantguard: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    return code


def _write_no_more() -> None:
    """What waits in stdout's buffer cannot be written; Python would try again when it ends, and complain."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
