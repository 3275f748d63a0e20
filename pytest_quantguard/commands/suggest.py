"""`quantguard suggest`: bounds from measurements, with a stated margin."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_quantguard.commands import ExitCode, print_json, progress_lines, tell

if TYPE_CHECKING:
    from pytest_quantguard.config import GateConfig
    from pytest_quantguard.results import RunResult
    from pytest_quantguard.suggest import KeyBound, Observed, Proposal
    from pytest_quantguard.suggest_changes import Change

NAME = "suggest"
SUMMARY = "propose bounds from what is measured"
DESCRIPTION = """Run the candidate of CONFIG, or take results of earlier runs, and propose bounds: the worst
value of all cells plus a margin, which is a share of it and at least twice the candidate's run-to-run spread
and the reference's noise floor. Results of whole runs also give bounds of speed and generation. Printed as
YAML that extends CONFIG, with the reason beside each bound, and as a table of what changes.
--apply makes bounds tighter, or adds them; one that would become looser needs --allow-looser, or a yes at a
terminal. A candidate that you do not trust yet gives bounds that hide its faults: look at its values first,
and compare them with what is published for the format."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    add = parser.add_argument
    # As argparse orders it, CONFIG would follow --from, and be taken for one of its results.
    parser.usage = """%(prog)s CONFIG [--from RESULT [RESULT ...]]
                          [--metrics NAME,..] [--margin SHARE] [--repeats N]
                          [--apply [--allow-looser] | --write FILE]
                          [--output DIR] [--json]"""
    add("config", type=Path, metavar="CONFIG", help="YAML file of the gate")
    add("--from", dest="results", type=Path, nargs="+", metavar="RESULT", help="results of runs of CONFIG "
        "(result.json or its folder), instead of running the candidate")  # fmt: skip
    add("--metrics", metavar="NAME,..", help="which to bound (default: those that CONFIG bounds)")
    add("--margin", type=_share, default=0.25, metavar="SHARE", help="of the measured value (default: 25%%)")
    add(
        "--repeats", type=int, default=2, metavar="N", help="measurements of each cell (default: %(default)s)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--apply", action="store_true", help="put the bounds into CONFIG itself; comments stay")
    add("--allow-looser", action="store_true", help="with --apply: also bounds that become looser")
    form.add_argument(
        "--write", type=Path, metavar="FILE", help="write the YAML there instead of printing it"
    )
    add("--output", type=Path, default=Path(".quantguard"), metavar="DIR", help="where the server's log goes")
    add("--json", action="store_true", help="print the proposal as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Propose; raises `QuantguardError` where there is nothing to propose from."""
    import os

    from pytest_quantguard.config_file import load_config
    from pytest_quantguard.errors import ConfigError
    from pytest_quantguard.logprobs.metrics import METRICS
    from pytest_quantguard.results import read_result
    from pytest_quantguard.suggest import as_yaml, propose
    from pytest_quantguard.suggest_changes import change_lines, changes_of

    config = load_config(arguments.config)
    metrics = arguments.metrics.split(",") if arguments.metrics else list(config.accuracy.bounds)
    unknown = [name for name in metrics if name not in METRICS]
    if unknown:
        raise ConfigError(f"--metrics: {', '.join(unknown)} unknown. Known are: {', '.join(METRICS)}.")
    if arguments.repeats < 1:
        raise ConfigError(f"--repeats: at least 1 is needed, found {arguments.repeats}.")
    if arguments.allow_looser and not arguments.apply:
        raise ConfigError("--allow-looser goes with --apply: nothing else changes CONFIG.")
    results = [read_result(path) for path in arguments.results or ()]
    observed, floors = _observe(arguments, config, results)
    proposal = propose(observed, floors, name=config.name, metrics=metrics, margin=arguments.margin)
    keys, notes = _of_runs(config, results, arguments.margin)
    proposal = replace(proposal, keys=tuple(keys), notes=tuple(notes))
    changes = changes_of(proposal, config)
    folder = (arguments.write or arguments.config).absolute().parent
    text = as_yaml(proposal, os.path.relpath(arguments.config.absolute(), folder))
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
        tell(f"written to {arguments.write}")
    for line in (*change_lines(changes), *notes):
        tell(line)
    if arguments.apply:
        _apply(arguments.config, proposal, changes, allow_looser=arguments.allow_looser)
    if arguments.json:
        shown = [{**asdict(change), "direction": change.direction} for change in changes]
        print_json({**asdict(proposal), "changes": shown, "yaml": text})
    elif not arguments.write and not arguments.apply:
        print(text, end="")
    return ExitCode.DONE


def _of_runs(
    config: GateConfig, results: Sequence[RunResult], margin: float
) -> tuple[list[KeyBound], list[str]]:
    """Bounds of speed and generation, and why there are none."""
    from pytest_quantguard.suggest_runs import propose_from_runs

    if results:
        return propose_from_runs(results, config, margin)
    sections = [name for name in ("speed", "generation") if getattr(config, name) is not None]
    if not sections:
        return [], []
    return [], [
        f"bounds of {' and '.join(sections)} are proposed from results of whole runs: --from "
        f".quantguard/{config.name}"
    ]


def _apply(path: Path, proposal: Proposal, changes: Sequence[Change], *, allow_looser: bool) -> None:
    """Rewrite the config; what was there stays if the outcome is no config.

    Raises `ConfigError` where a bound would become looser and that is not allowed.
    """
    from pytest_quantguard.config_file import load_config
    from pytest_quantguard.errors import ConfigError
    from pytest_quantguard.suggest_apply import apply_to

    looser = [change.key for change in changes if change.direction == "looser"]
    if looser and not (allow_looser or _agreed(looser)):
        raise ConfigError(
            f"{path}: nothing was written, since {', '.join(looser)} would become looser: what fails now "
            "could pass then. If the candidate is as it should be (look at its figures, and at what its "
            "format usually costs), say --apply --allow-looser."
        )
    before = path.read_text(encoding="utf-8")
    after = apply_to(before, proposal)
    path.write_text(after, encoding="utf-8")
    try:
        load_config(path)
    except BaseException:
        path.write_text(before, encoding="utf-8")
        raise
    tell(f"written to {path}")


def _agreed(looser: Sequence[str]) -> bool:
    """What the user says at a terminal; without one, no."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    tell(
        f"{', '.join(looser)} would become looser: what fails now could pass then. Apply all the same? [y/N]"
    )
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _observe(
    arguments: argparse.Namespace, config: GateConfig, results: Sequence[RunResult]
) -> tuple[Observed, Mapping[str, Mapping[str, float]]]:
    """What is measured or was, and the noise floors of the baseline."""
    from pytest_quantguard.gate.trial import Trial, TrialOptions
    from pytest_quantguard.suggest import measure, observed_in

    options = TrialOptions((arguments.output / config.name).absolute(), repeats=arguments.repeats)
    trial = Trial(config, arguments.config, options, progress_lines())
    floors = {str(key): values for key, values in trial.baseline().noise_floor.items()}
    if results:
        return observed_in(results, config), floors
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
