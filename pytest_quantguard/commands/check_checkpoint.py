"""`quantguard check-checkpoint`: read a quantized checkpoint and say what is wrong with it."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_quantguard.commands import ExitCode, print_json, tell

if TYPE_CHECKING:
    from pytest_quantguard.emulator.check_checkpoint import CheckpointReport

NAME = "check-checkpoint"
SUMMARY = "check a quantized checkpoint without running it"
DESCRIPTION = """Read the quantized checkpoint in FOLDER and report scales that are missing, zero, not finite
or constant, fused projections whose scales differ, tensors of the wrong shape, and modules quantized against
the config. With --reference, also the signal-to-noise ratio of each tensor. Exit 1 if there are errors.
Needs: pip install 'pytest-quantguard[emulator]'"""
NOISIEST = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="Hugging Face folder of the checkpoint")
    parser.add_argument("--reference", type=Path, metavar="FOLDER", help="the unquantized checkpoint")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Check; raises `QuantguardError` where there is nothing to check."""
    from pytest_quantguard.emulator.check_checkpoint import check_checkpoint

    report = check_checkpoint(arguments.folder, arguments.reference, progress=tell)
    if arguments.json:
        print_json(report.to_json())
    else:
        print("\n".join(_lines(report)))
    return ExitCode.DONE if report.passed else ExitCode.FAILED


def _lines(report: CheckpointReport) -> list[str]:
    """The report for people: findings, then the noisiest tensors, then the verdict."""
    counts = Counter(finding.severity for finding in report.findings)
    formats = ", ".join(f"{count} {name}" for name, count in report.formats.items())
    noisiest = sorted(report.noise, key=lambda item: item.decibels)[:NOISIEST]
    return [
        f"{report.folder}: {report.method}, linear layers: {formats}",
        *(f"  {finding}" for finding in report.findings),
        *(f"  {item.decibels:5.1f} dB  {item.tensor} ({item.format})" for item in noisiest),
        f"{'PASSED' if report.passed else 'FAILED'}: {counts['error']} errors, {counts['warning']} warnings",
    ]
