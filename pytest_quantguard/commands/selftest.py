"""`quantguard selftest`: which faults would this gate catch?"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from pytest_quantguard.commands import ExitCode, positive, positive_or_all, print_json, progress_lines

NAME = "selftest"
SUMMARY = "switch known faults on and see which ones the gate of a config catches"
DESCRIPTION = """Start the emulated candidate of CONFIG, judge it clean several times, then with each fault of
the catalogue switched on, by the config's own checks and bounds. Prints a matrix of faults and checks: what
was caught, by what, and what was missed and why. A baseline must have been captured. Exit 1 if the clean
candidate raises an alarm, or a fault that selftest.must_catch names is missed.
Needs: pip install 'pytest-quantguard[emulator]'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    add = parser.add_argument
    add("config", type=Path, metavar="CONFIG", help="YAML file of the gate")
    add("--faults", metavar="NAME,..", help="only these: name or name:key=value,..; default: selftest.faults")
    add("--variants", action="store_true", help="the catalogue also with other parameters than the defaults")
    add(
        "--clean-runs",
        type=positive,
        metavar="N",
        help="runs without a fault (default: selftest.clean_runs)",
    )
    add(
        "--prompts",
        type=positive_or_all,
        metavar="N",
        help="prompts asked, or all (default: selftest.prompts)",
    )
    add(
        "--score-tokens",
        type=positive_or_all,
        metavar="N",
        help="positions scored of each span, or all (default: selftest.score_tokens)",
    )
    add("--full", action="store_true", help="judge every check, also of a fault that was caught already")
    add("--output", type=Path, default=Path(".quantguard"), metavar="DIR", help="where the server's log goes")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print everything as JSON")
    form.add_argument("--markdown", action="store_true", help="print the matrix as Markdown")


def execute(arguments: argparse.Namespace) -> int:
    """Run it; raises `QuantguardError` where the gate cannot be tested."""
    from pytest_quantguard.config_file import load_config
    from pytest_quantguard.emulator.extra import explanation, missing_packages
    from pytest_quantguard.errors import QuantguardError

    missing = missing_packages()
    if missing:
        raise QuantguardError(explanation(missing))
    from pytest_quantguard.selftest.catalogue import split_names
    from pytest_quantguard.selftest.report import render_markdown, render_text
    from pytest_quantguard.selftest.run import SelftestOptions, run_selftest

    config = load_config(arguments.config)
    options = SelftestOptions(
        output=(arguments.output / config.name / "selftest").absolute(),
        faults=tuple(split_names(arguments.faults or "")),
        variants=arguments.variants,
        clean_runs=arguments.clean_runs,
        prompts=arguments.prompts,
        score_tokens=arguments.score_tokens,
        full=arguments.full,
    )
    lines = progress_lines()
    result = run_selftest(config, arguments.config, options, lines, announce=lines.always)
    if arguments.json:
        print_json(result.model_dump(mode="json") | {"passed": result.passed})
    else:
        width = shutil.get_terminal_size().columns
        print("\n".join(render_markdown(result) if arguments.markdown else render_text(result, width)))
    return ExitCode.DONE if result.passed else ExitCode.FAILED
