"""`quantguard accept`: make this candidate the one that drift is judged against."""

from __future__ import annotations

import argparse

from pytest_quantguard.commands import ExitCode, run, tell

NAME = "accept"
SUMMARY = "store the candidate's answers and times as the accepted run"
DESCRIPTION = """Run the gate and, if every check holds, store the candidate's answers beside the baseline.
Later runs are compared with them position by position (accuracy.drift). The times of a config with `speed`
are stored too, and later ones held against them (speed.max_slowdown); --no-times keeps those that are stored,
--add-times adds a further run to them, in a server started anew, so that verdicts know how runs differ.

The same as: pytest --quantguard-config=CONFIG --quantguard-accept (or --quantguard-add-times)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The same as those of `run`."""
    run.add_arguments(parser)
    parser.add_argument(
        "--push", action="store_true", help="store it at the URL that CONFIG names as its baseline"
    )
    times = parser.add_mutually_exclusive_group()
    times.add_argument("--no-times", action="store_true", help="time nothing and keep the accepted times")
    times.add_argument(
        "--add-times",
        type=_count,
        nargs="?",
        const=1,
        metavar="N",
        help="only time, and add this run to the accepted times; N: N runs, each in a server started anew",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Run the gate, then accept; or time it as often as asked, until a run cannot be added."""
    push = ("--quantguard-push",) if arguments.push else ()
    if arguments.add_times is not None:
        return _add_times(arguments, push)
    untimed = ("-m", "not timed") if arguments.no_times else ()
    return run.run_gate(arguments, ("--quantguard-accept", *push, *untimed))


def _add_times(arguments: argparse.Namespace, push: tuple[str, ...]) -> int:
    wanted: int = arguments.add_times
    if arguments.json and wanted > 1:
        tell("quantguard: --json prints the results of one run: use --add-times without a number")
        return ExitCode.USAGE
    for number in range(1, wanted + 1):
        if wanted > 1:
            tell(f"quantguard: run {number} of {wanted}")
        code = run.run_gate(arguments, ("--quantguard-add-times", *push))
        if code != ExitCode.DONE:
            return code
    return ExitCode.DONE


def _count(text: str) -> int:
    """A number of runs; argparse gives --add-times the word after it, which may have been meant as CONFIG."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of runs; write CONFIG before --add-times")
    return int(text)
