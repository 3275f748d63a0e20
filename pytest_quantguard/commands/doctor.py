"""`quantguard doctor`: will the gate run on this machine?"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import asdict
from pathlib import Path

from pytest_quantguard.commands import ExitCode, print_json, tell

NAME = "doctor"
SUMMARY = "say whether a gate will run on this machine"
DESCRIPTION = """Look at Python, packages, GPUs and driver, shared memory, disk; with CONFIG also at its
models, ports, SGLang's version and flags (its --help is run), the attached server, and the baseline. Starts
no server and changes nothing. Exit 1 if there is a problem; warnings alone are 0."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="YAML file of a gate")
    parser.add_argument(
        "--offline", action="store_true", help="ask no server, start no --help, fetch no remote baseline"
    )
    parser.add_argument(
        "--output", type=Path, default=Path(".quantguard"), metavar="DIR", help="where results would go"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Examine; raises `ConfigError` for a config that is wrong."""
    from pytest_quantguard.config_file import load_config
    from pytest_quantguard.doctor.finding import render
    from pytest_quantguard.doctor.gate import examine_gate, examine_machine
    from pytest_quantguard.gate.trial import Trial, TrialOptions

    if arguments.config is None:
        findings = examine_machine()
    else:
        config = load_config(arguments.config)
        options = TrialOptions((arguments.output / config.name).absolute())
        trial = Trial(config, arguments.config, options, tell)
        findings = examine_gate(trial, ask_servers=not arguments.offline)
    passed = all(finding.status != "problem" for finding in findings)
    if arguments.json:
        shown = None if arguments.config is None else str(arguments.config)
        print_json({"config": shown, "passed": passed, "findings": [asdict(item) for item in findings]})
    else:
        print("\n".join(render(findings, shutil.get_terminal_size().columns)))
    return ExitCode.DONE if passed else ExitCode.FAILED
