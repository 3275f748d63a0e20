"""`quantguard compare`: two results or two recordings side by side."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_quantguard.commands import ExitCode, print_json
from pytest_quantguard.report.visible import visible

if TYPE_CHECKING:
    from pytest_quantguard.baseline.compatibility import Difference
    from pytest_quantguard.compare import Figure, RecordingComparison, ResultComparison
    from pytest_quantguard.results import RunResult

NAME = "compare"
SUMMARY = "compare two results, or two baselines or accepted runs"
DESCRIPTION = """Compare without a server. Two results (result.json or its folder): figures side by side,
verdicts that changed, what differs in config and server; figures that are the same in both are counted only.
Two recordings (folders of baselines or accepted runs): the divergence of B from A, position by position.
Compares only; exit 0 whatever is found."""

DIGITS = 4
"""Significant ones of a figure."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("first", type=Path, metavar="A", help="a result or the folder of a recording")
    parser.add_argument("second", type=Path, metavar="B", help="another one of the same kind")
    parser.add_argument("--metrics", metavar="NAME,..", help="of results: which (default: those bounded)")
    parser.add_argument("--all", action="store_true", help="also list figures that are the same in both")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Compare; raises `QuantguardError` where that makes no sense."""
    from pytest_quantguard.compare import kind_of
    from pytest_quantguard.errors import ConfigError, QuantguardError
    from pytest_quantguard.logprobs.metrics import METRICS

    kinds = [kind_of(path) for path in (arguments.first, arguments.second)]
    if kinds[0] != kinds[1]:
        raise QuantguardError(
            f"{arguments.first} is a {kinds[0]} and {arguments.second} is a {kinds[1]}; two of one kind "
            "can be compared."
        )
    metrics = arguments.metrics.split(",") if arguments.metrics else []
    unknown = [name for name in metrics if name not in METRICS]
    if unknown:
        raise ConfigError(f"--metrics: {', '.join(unknown)} unknown. Known are: {', '.join(METRICS)}.")
    if kinds[0] == "result":
        return _compare_results(arguments, metrics)
    return _compare_recordings(arguments)


def _compare_results(arguments: argparse.Namespace, metrics: list[str]) -> int:
    from pytest_quantguard.compare import compare_results
    from pytest_quantguard.results import read_result

    first, second = read_result(arguments.first), read_result(arguments.second)
    compared = compare_results(first, second, metrics)
    if arguments.json:
        figures = [{**asdict(figure), "change": figure.change} for figure in compared.figures]
        print_json({"kind": "result", **asdict(compared), "figures": figures})
    else:
        heads = [_head(letter, result) for letter, result in (("A", first), ("B", second))]
        _tell([*heads, *_result_lines(compared, everything=arguments.all)])
    return ExitCode.DONE


def _compare_recordings(arguments: argparse.Namespace) -> int:
    from pytest_quantguard.baseline.store import read_recording
    from pytest_quantguard.compare import compare_recordings

    compared = compare_recordings(read_recording(arguments.first), read_recording(arguments.second))
    if arguments.json:
        print_json({"kind": "recording", **asdict(compared)})
    else:
        _tell([f"A  {arguments.first}", f"B  {arguments.second}", *_recording_lines(compared)])
    return ExitCode.DONE


def _tell(lines: list[str]) -> None:
    """What servers and other people's files say must not command the terminal."""
    print("\n".join(map(visible, lines)))


def _head(letter: str, result: RunResult) -> str:
    partial = ", partial" if result.partial else ""
    return f"{letter}  {result.name}, {result.verdict.upper()}{partial}, {result.finished}"


def _result_lines(compared: ResultComparison, *, everything: bool) -> list[str]:
    listed = [figure for figure in compared.figures if everything or figure.first != figure.second]
    lines = []
    if listed:
        width = max(len(_label(figure)) for figure in listed)
        lines += ["", f"{'':{width}}  {'A':>10} {'B':>10}    change"]
        lines += [_figure_line(figure, width) for figure in listed]
    same = len(compared.figures) - len(listed)
    if same:
        told = "1 figure is the same in both" if same == 1 else f"{same} figures are the same in both"
        lines += ["", f"{told}; --all shows {'it' if same == 1 else 'them'}"]
    lines += ["", "verdicts: the same" if not compared.verdicts else "verdicts that changed"]
    lines += [f"  {name}: {before} -> {now}" for name, before, now in compared.verdicts]
    return [*lines, *_difference_lines(compared.differences)]


def _label(figure: Figure) -> str:
    return f"{figure.name} {figure.cell}".strip()


def _figure_line(figure: Figure, width: int) -> str:
    change = "" if figure.change is None else f"{figure.change:+9.1%}"
    word = {True: "worse", False: "better", None: ""}[figure.worse]
    sides = " ".join(
        "-".rjust(10) if v is None else f"{_number(v):>10}" for v in (figure.first, figure.second)
    )
    return f"{_label(figure):{width}}  {sides} {change:>9} {word}".rstrip()


def _number(value: float) -> str:
    """Always as many significant digits, zeros at the end too: 0.5000, 12.30, 1234, 56789, 1.000e-05."""
    if value == 0 or 10**DIGITS <= abs(value) < 1e9:
        return f"{value:.0f}"
    return f"{value:#.{DIGITS}g}".rstrip(".")


def _recording_lines(compared: RecordingComparison) -> list[str]:
    metrics = list(compared.cells[0].metrics)
    width = max(len(cell.cell) for cell in compared.cells)
    lines = ["", f"{'B against A':{width}}  {'  '.join(f'{name:>10}' for name in metrics)}  equal rows"]
    for cell in compared.cells:
        values = "  ".join(f"{_number(cell.metrics[name]):>10}" for name in metrics)
        lines.append(f"{cell.cell:{width}}  {values}  {cell.identical_share:10.1%}")
    for letter, cells in (("A", compared.only_first), ("B", compared.only_second)):
        lines += [f"only in {letter}: {', '.join(cells)}"] if cells else []
    return [*lines, *_difference_lines(compared.differences)]


def _difference_lines(differences: tuple[Difference, ...]) -> list[str]:
    width = shutil.get_terminal_size().columns
    lines = ["", "config, server and machine: the same" if not differences else "what differs"]
    for key, before, now in differences:
        lines += textwrap.wrap(
            f"{key}: {before} -> {now}",
            width,
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
    return lines
