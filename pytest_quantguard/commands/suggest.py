"""`quantguard suggest`: bounds from measurements, with a stated margin."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_quantguard.commands import ExitCode, print_json, tell

if TYPE_CHECKING:
    from pytest_quantguard.config import GateConfig
    from pytest_quantguard.suggest import Observed

NAME = "suggest"
SUMMARY = "propose accuracy bounds from what is measured"
DESCRIPTION = """Run the candidate of CONFIG, or take results of earlier runs, and propose bounds: the worst
value of all cells plus a margin, which is a share of it and at least twice the candidate's run-to-run spread
and the reference's noise floor. Printed as YAML that extends CONFIG, with the reason beside each bound.
A candidate that you do not trust yet gives bounds that hide its faults: look at its values first, and compare
them with what is published for the format."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    add = parser.add_argument
    add("config", type=Path, metavar="CONFIG", help="YAML file of the gate")
    add("--from", dest="results", type=Path, nargs="+", metavar="RESULT", help="results of runs of CONFIG "
        "(result.json or its folder), instead of running the candidate")  # fmt: skip
    add("--metrics", metavar="NAME,..", help="which to bound (default: those that CONFIG bounds)")
    add("--margin", type=_share, default=0.25, metavar="SHARE", help="of the measured value (default: 25%%)")
    add(
        "--repeats", type=int, default=2, metavar="N", help="measurements of each cell (default: %(default)s)"
    )
    add("--write", type=Path, metavar="FILE", help="write the YAML there instead of printing it")
    add("--output", type=Path, default=Path(".quantguard"), metavar="DIR", help="where the server's log goes")
    add("--json", action="store_true", help="print the proposal as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Propose; raises `QuantguardError` where there is nothing to propose from."""
    import os

    from pytest_quantguard.config_file import load_config
    from pytest_quantguard.errors import ConfigError
    from pytest_quantguard.logprobs.metrics import METRICS
    from pytest_quantguard.suggest import as_yaml, propose

    config = load_config(arguments.config)
    metrics = arguments.metrics.split(",") if arguments.metrics else list(config.accuracy.bounds)
    unknown = [name for name in metrics if name not in METRICS]
    if unknown:
        raise ConfigError(f"--metrics: {', '.join(unknown)} unknown. Known are: {', '.join(METRICS)}.")
    if arguments.repeats < 1:
        raise ConfigError(f"--repeats: at least 1 is needed, found {arguments.repeats}.")
    observed, floors = _observe(arguments, config)
    proposal = propose(observed, floors, name=config.name, metrics=metrics, margin=arguments.margin)
    folder = (arguments.write or arguments.config).absolute().parent
    text = as_yaml(proposal, os.path.relpath(arguments.config.absolute(), folder))
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
        tell(f"written to {arguments.write}")
    if arguments.json:
        print_json({**asdict(proposal), "yaml": text})
    elif not arguments.write:
        print(text, end="")
    return ExitCode.DONE


def _observe(
    arguments: argparse.Namespace, config: GateConfig
) -> tuple[Observed, Mapping[str, Mapping[str, float]]]:
    """What is measured or was, and the noise floors of the baseline."""
    from pytest_quantguard.gate.trial import Trial, TrialOptions
    from pytest_quantguard.report.progress import ThrottledLines
    from pytest_quantguard.results import read_result
    from pytest_quantguard.suggest import measure, observed_in

    options = TrialOptions((arguments.output / config.name).absolute(), repeats=arguments.repeats)
    trial = Trial(config, arguments.config, options, ThrottledLines(tell, seconds=3))
    floors = {str(key): values for key, values in trial.baseline().noise_floor.items()}
    if arguments.results:
        return observed_in([read_result(path) for path in arguments.results], config), floors
    try:
        return measure(trial), floors
    finally:
        trial.close()


def _share(text: str) -> float:
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 < share <= 10:
        raise argparse.ArgumentTypeError(f"expected a share such as 25% or 0.25, found {text!r}")
    return share
