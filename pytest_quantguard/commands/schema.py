"""`quantguard schema`: JSON Schema of the config, for editors."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_quantguard.commands import ExitCode, print_json

NAME = "schema"
SUMMARY = "print the JSON Schema of configs, or check configs"
DESCRIPTION = """Print the JSON Schema of a gate's config, for the completion and checks of editors. With
files, check them instead: exit 0 if all are right, 2 and every mistake with its line if not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("config", type=Path, nargs="*", metavar="CONFIG", help="configs to check")
    parser.add_argument("--markdown", action="store_true", help="print the reference of all keys as Markdown")
    parser.add_argument("--json", action="store_true", help="print the configs, with all defaults, as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Print, or check."""
    from pytest_quantguard.config_file import load_configs
    from pytest_quantguard.config_schema import json_schema

    if arguments.markdown:
        from pytest_quantguard.config_reference import render_reference

        print(render_reference(json_schema()), end="")
        return ExitCode.DONE
    if not arguments.config:
        print_json(json_schema())
        return ExitCode.DONE
    configs = load_configs(arguments.config)
    if arguments.json:
        print_json([config.model_dump(mode="json") for config in configs])
        return ExitCode.DONE
    for config, path in zip(configs, arguments.config, strict=True):
        print(f"{path}: {config.name} is valid")
    return ExitCode.DONE
