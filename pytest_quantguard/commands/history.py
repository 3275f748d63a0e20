"""`quantguard history`: how the figures of a gate moved from run to run."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_quantguard.commands import ExitCode, print_json, tell

NAME = "history"
SHOWN_PROBLEMS = 5
SUMMARY = "show how figures moved from run to run, and when they shifted"
DESCRIPTION = """\
Read history.jsonl, to which every run of a gate adds a line, and print the
last runs, a sparkline for each figure, and the first run after which a figure
had shifted: where the medians before and after differ by more than four times
the scatter of the runs and by more than 2 % (3 runs before and 2 after are
needed). Runs that scored other texts start a new series. With --log, the
experiment log: for each run what changed in the config since the run before,
and what it did to accuracy and speed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument(
        "history",
        type=Path,
        metavar="HISTORY",
        help="a history.jsonl, or the folder that holds it (.quantguard/<name>)",
    )
    parser.add_argument("--name", help="only the runs of the config of this name")
    parser.add_argument(
        "--last", type=int, default=30, metavar="N", help="runs to show (default: %(default)s)"
    )
    parser.add_argument(
        "--figure",
        action="append",
        default=[],
        metavar="TEXT",
        help="only figures whose name contains TEXT, such as kl_mean or decode-bs8; repeatable",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--log", action="store_true", help="print the experiment log")
    form.add_argument("--json", action="store_true", help="print runs, series and shifts as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Print; raises `QuantguardError` where there is no history, or none of that name."""
    from pytest_quantguard.errors import ConfigError
    from pytest_quantguard.report.history import read_history
    from pytest_quantguard.report.history_text import as_json, log_lines, trend_lines, trends, with_unicode

    if arguments.last < 1:
        raise ConfigError(f"--last={arguments.last}: at least 1 is needed.")
    history = read_history(arguments.history)
    for problem in history.problems[:SHOWN_PROBLEMS]:
        tell(f"quantguard: {problem}")
    if len(history.problems) > SHOWN_PROBLEMS:
        tell(f"quantguard: and {len(history.problems) - SHOWN_PROBLEMS} more lines are left out")
    entries = history.entries
    if arguments.name is not None:
        entries = tuple(entry for entry in entries if entry.name == arguments.name)
        if not entries:
            names = ", ".join(sorted({entry.name for entry in history.entries})) or "none"
            raise ConfigError(
                f"{arguments.history} has no run of '{arguments.name}'; it has runs of: {names}."
            )
    known = [trend.name for trend in trends(entries)]
    for text in arguments.figure:
        if not any(text in name for name in known):
            raise ConfigError(
                f"--figure={text}: no figure's name contains that. There are: {', '.join(known) or 'none'}."
            )
    if arguments.json:
        print_json(as_json(entries, arguments.last, arguments.figure))
    elif arguments.log:
        print("\n".join(log_lines(entries[-arguments.last :])))
    else:
        print("\n".join(trend_lines(entries, arguments.last, arguments.figure, unicode=with_unicode())))
    return ExitCode.DONE
