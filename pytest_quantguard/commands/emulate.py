"""`quantguard emulate`: the emulator in the foreground."""

from __future__ import annotations

import argparse

from pytest_quantguard.commands import ExitCode
from pytest_quantguard.emulator.options import add_arguments as add_emulator_arguments
from pytest_quantguard.emulator.options import options_from

NAME = "emulate"
SUMMARY = "serve a model on the CPU, in SGLang's protocol"
DESCRIPTION = """Serve a Llama-family model on this machine's CPU with bit-exact NVFP4, FP8 or BF16
arithmetic, until Ctrl-C. Needs: pip install 'pytest-quantguard[emulator]'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `python -m pytest_quantguard.emulator`."""
    add_emulator_arguments(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    from pytest_quantguard.emulator.launch import serve

    return ExitCode.DONE if serve(options_from(arguments)) == 0 else ExitCode.IMPOSSIBLE
