"""`quantguard accept`: make this candidate the one that drift is judged against."""

from __future__ import annotations

import argparse

from pytest_quantguard.commands import run

NAME = "accept"
SUMMARY = "store the candidate's answers as the accepted run"
DESCRIPTION = """Run the gate without timing and, if every check holds, store the candidate's answers beside
the baseline. Later runs are compared with them position by position (accuracy.drift).

The same as: pytest --quantguard-config=CONFIG --quantguard-accept -k 'not speed'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The same as those of `run`."""
    run.add_arguments(parser)
    parser.add_argument(
        "--push", action="store_true", help="store it at the URL that CONFIG names as its baseline"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Run the gate, then accept."""
    push = ("--quantguard-push",) if arguments.push else ()
    return run.run_gate(arguments, ("--quantguard-accept", *push, "-k", "not speed"))
