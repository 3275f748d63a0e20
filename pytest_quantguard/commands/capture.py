"""`quantguard capture`: record the baseline of a config."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_quantguard.commands import ExitCode, print_json, progress_lines, say

NAME = "capture"
SUMMARY = "record the BF16 baseline of a config"
DESCRIPTION = """Start the reference server of CONFIG, let it continue every prompt greedily, record its
log-probabilities in each phase and batch size (suite.repeats times, for the noise floor), and store them in
the folder that CONFIG names as its baseline. The old baseline stays until the new one is whole.

The same as: pytest --quantguard-config=CONFIG --quantguard-update-baseline"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file of the gate")
    parser.add_argument(
        "--output", type=Path, default=Path(".quantguard"), metavar="DIR", help="where the server's log goes"
    )
    parser.add_argument(
        "--push", action="store_true", help="upload it to the URL that CONFIG names as its baseline"
    )
    parser.add_argument(
        "--generation",
        action="store_true",
        help="record only the reference's answers to the generation questions, into the baseline there is",
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Capture; raises `QuantguardError` with the cause where that is not possible."""
    from pytest_quantguard.baseline.store import read_manifest
    from pytest_quantguard.config_file import load_config
    from pytest_quantguard.gate.capture import record_baseline, record_generation, recorded_folder
    from pytest_quantguard.gate.trial import Trial, TrialOptions

    config = load_config(arguments.config)
    options = TrialOptions((arguments.output / config.name).absolute(), push=arguments.push)
    trial = Trial(config, arguments.config, options, progress_lines())
    done = record_generation(trial) if arguments.generation else record_baseline(trial)
    if arguments.json:
        manifest = read_manifest(recorded_folder(trial))
        print_json({"baseline": str(config.baseline), "manifest": manifest.model_dump(mode="json")})
    else:
        say(done)
    return ExitCode.DONE
