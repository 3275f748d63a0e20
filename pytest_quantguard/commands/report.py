"""`quantguard report`: the report of a run, made anew from its result.json."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_quantguard.commands import ExitCode, print_json

NAME = "report"
ELSEWHERE = "another folder with --output=DIR"
SUMMARY = "make the HTML and Markdown report of a result.json"
DESCRIPTION = """\
Write report.html (one file, opens offline) and summary.md from the
result.json of a run, which may lie in another folder, come from another
machine, or be that of a run that ended early: its report says so. Runs write
both by themselves. Exits 0 whatever the verdict."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument(
        "result", type=Path, metavar="RESULT", help="a result.json, or the folder that holds it"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="where to write (default: beside the result.json)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print the Markdown; write nothing")
    form.add_argument("--json", action="store_true", help="print what was written as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Read, render, write; raises `QuantguardError` for a file that is no result, or of a newer schema."""
    from pytest_quantguard.errors import QuantguardError

    try:
        return _make(arguments)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise QuantguardError(
            f"No report can be made of {arguments.result}: it holds values that no run writes "
            f"({type(error).__name__}: {str(error)[:200]}). Run the gate again."
        ) from error


def _make(arguments: argparse.Namespace) -> int:
    from pytest_quantguard.report.files import (
        REPORT_FILE,
        SUMMARY_FILE,
        changes_of,
        write_report,
        write_summary,
    )
    from pytest_quantguard.report.headline import verdict_line
    from pytest_quantguard.report.markdown import render_markdown
    from pytest_quantguard.report.visible import visible
    from pytest_quantguard.results import read_result

    path: Path = arguments.result
    result = read_result(path)
    source = path if path.is_dir() else path.parent
    changes = changes_of(source, result)
    if arguments.markdown:
        print(render_markdown(result, changes=changes), end="")
        return ExitCode.DONE
    folder = arguments.output or source
    report = write_report(folder / REPORT_FILE, result, changes, ELSEWHERE)
    summary = write_summary(folder / SUMMARY_FILE, result, changes, ELSEWHERE)
    if arguments.json:
        about = {"verdict": result.verdict, "partial": result.partial}
        print_json({"report": str(report), "summary": str(summary), **about})
    else:
        print(f"{visible(verdict_line(result))}\n{report}\n{summary}")
    return ExitCode.DONE
