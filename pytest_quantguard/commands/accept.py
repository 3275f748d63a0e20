"""`quantguard accept`: make this candidate the one that drift is judged against."""

from __future__ import annotations

import argparse

from pytest_quantguard.commands import run

NAME = "accept"
SUMMARY = "store the candidate's answers and times as the accepted run"
DESCRIPTION = """Run the gate and, if every check holds, store the candidate's answers beside the baseline.
Later runs are compared with them position by position (accuracy.drift). The times of a config with `speed`
are stored too, and later ones held against them (speed.max_slowdown); --no-times keeps those that are stored.

The same as: pytest --quantguard-config=CONFIG --quantguard-accept"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The same as those of `run`."""
    run.add_arguments(parser)
    parser.add_argument(
        "--push", action="store_true", help="store it at the URL that CONFIG names as its baseline"
    )
    parser.add_argument("--no-times", action="store_true", help="time nothing and keep the accepted times")


def execute(arguments: argparse.Namespace) -> int:
    """Run the gate, then accept."""
    push = ("--quantguard-push",) if arguments.push else ()
    untimed = ("-m", "not timed") if arguments.no_times else ()
    return run.run_gate(arguments, ("--quantguard-accept", *push, *untimed))
