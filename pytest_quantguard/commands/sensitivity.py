"""`quantguard sensitivity`: which modules suffer most from quantization?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_quantguard.commands import ExitCode, positive, positive_or_all, print_json, progress_lines

if TYPE_CHECKING:
    from pytest_quantguard.sensitivity import GroupSensitivity, SensitivityResult

NAME = "sensitivity"
SUMMARY = "rank a model's modules by what quantizing each alone costs"
DESCRIPTION = """Quantize each group of modules of CONFIG's unquantized model alone, weights and activations,
and print the mean KL from the unquantized model on the suite's prompts, most sensitive first: what stands
at the top is what to leave in more bits (quantization: {pattern: format} of the emulator). No server and no
baseline are needed. Needs: pip install 'pytest-quantguard[emulator]'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    add = parser.add_argument
    add("config", type=Path, metavar="CONFIG", help="YAML file of a gate")
    add("--format", metavar="NAME", help="number format (default: the candidate's scheme, else nvfp4)")
    add("--groups", choices=("parts", "kinds", "layers"), default="parts",
        help="parts: q/k/v, o, gate/up, down of each layer; kinds: these over all layers; layers: whole "
        "layers (default: %(default)s)")  # fmt: skip
    add("--prompts", type=positive_or_all, default=8, metavar="N",
        help="prompts of the suite, or all (default: %(default)s)")  # fmt: skip
    add("--top", type=positive, metavar="N", help="print the N most sensitive groups only")
    add("--json", action="store_true", help="print everything as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Measure; raises `QuantguardError` where that is not possible."""
    from pytest_quantguard.emulator.threads import claim_threads

    threads = claim_threads()
    from pytest_quantguard.config_file import load_config
    from pytest_quantguard.emulator.extra import explanation, missing_packages
    from pytest_quantguard.errors import QuantguardError

    missing = missing_packages()
    if missing:
        raise QuantguardError(explanation(missing))
    from pytest_quantguard.sensitivity import SensitivityOptions, measure_sensitivity

    options = SensitivityOptions(
        format=arguments.format,
        grouping=arguments.groups,
        prompts=arguments.prompts,
        threads=threads,
    )
    config = load_config(arguments.config)
    result = measure_sensitivity(config, arguments.config, options, progress_lines())
    if arguments.json:
        print_json(result.model_dump(mode="json"))
    else:
        print("\n".join(_lines(result, arguments.top)))
    return ExitCode.DONE


def _lines(result: SensitivityResult, top: int | None) -> list[str]:
    """The ranking for people."""
    groups = result.groups[:top]
    title = "group, quantized alone"
    width = max(len(title), *(len(group.name) for group in (*groups, result.everything)))
    lines = [
        f"{result.name}: {result.model} in {result.format}, {result.prompts} prompts, {result.positions} "
        f"positions, {result.seconds:.0f} s",
        f"{title:<{width}}   mean KL  95 % interval       agreement  weights    bits  bits if kept*",
        *(_line(group, width, kept=True) for group in groups),
    ]
    if len(groups) < len(result.groups):
        lines.append(f"... and {len(result.groups) - len(groups)} less sensitive groups")
    return [
        *lines,
        _line(result.everything, width, kept=False),
        "* bits per weight of all linear layers but lm_head, were this group and those above left in 16 bits",
    ]


def _line(group: GroupSensitivity, width: int, *, kept: bool) -> str:
    interval = "-" if group.interval is None else f"{group.interval[0]:.4f} to {group.interval[1]:.4f}"
    last = f"{group.bits_if_kept:13.2f}" if kept else ""
    return (
        f"{group.name:<{width}}  {group.kl_mean:8.5f}  {interval:<18}  {group.agreement:9.3f}  "
        f"{group.weights / 1e6:6.2f}M  {group.bits_per_weight:6.3f}{last}"
    ).rstrip()
