"""`quantguard calibration-set`: compose what a quantizer is calibrated with."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_quantguard.commands import ExitCode, positive, print_json, require_other_file, tell

NAME = "calibration-set"
SUMMARY = "compose a calibration set for a quantizer"
DESCRIPTION = """Write a calibration set that has the mix of an evaluation set (tasks, languages, low-meaning
text, lengths), with the corrections given by --scale, and none of its prompts: exact and near duplicates are
removed and reported. Texts come from --pool first and are generated then. ModelOpt and llm-compressor scripts
that read the file are in examples/calibration/ of the source.
Needs: pip install 'pytest-quantguard[analysis]'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("--like", required=True, type=Path, metavar="FILE", help="the evaluation set, JSONL")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="JSONL to write")
    parser.add_argument("--size", type=positive, default=512, help="number of prompts (default: %(default)s)")
    parser.add_argument(
        "--max-tokens", type=positive, default=2048, help="longest prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--scale",
        action="append",
        default=[],
        type=_scale,
        metavar="NAME=FACTOR",
        help="multiply the share of a task, or of all low-meaning prompts (low_meaning=0.3); repeatable",
    )
    parser.add_argument(
        "--pool", type=Path, metavar="FILE", help="JSONL of texts to use before generated ones"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="model folder; lengths are then counted, not estimated",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the mix and what was removed as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Compose and write; raises `QuantguardError` where the mix cannot be met."""
    from pytest_quantguard.prompts.calibration import (
        compose_calibration_set,
        format_calibration_set,
        write_calibration_set,
    )
    from pytest_quantguard.prompts.lengths import estimate_tokens
    from pytest_quantguard.prompts.suite import read_prompts
    from pytest_quantguard.prompts.tokenizer import ChatTokenizer

    require_other_file("--output", arguments.output, arguments.like, arguments.pool)
    count = ChatTokenizer(arguments.tokenizer).count if arguments.tokenizer else estimate_tokens
    calibration = compose_calibration_set(
        read_prompts(arguments.like),
        size=arguments.size,
        max_tokens=arguments.max_tokens,
        scale=dict(arguments.scale),
        seed=arguments.seed,
        count=count,
        pool=read_prompts(arguments.pool) if arguments.pool else (),
    )
    write_calibration_set(arguments.output, calibration)
    if arguments.json:
        print_json({"output": str(arguments.output), **calibration.to_json()})
    else:
        print(format_calibration_set(calibration))
        tell(f"written to {arguments.output}")
    return ExitCode.DONE


def _scale(text: str) -> tuple[str, float]:
    name, _, factor = text.partition("=")
    try:
        return name, float(factor)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FACTOR, such as low_meaning=0.3") from error
