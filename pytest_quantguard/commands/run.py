"""`quantguard run`: the gate, for people who do not think in pytest."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_quantguard.commands import ExitCode, print_json, tell

if TYPE_CHECKING:
    import pytest

NAME = "run"
SUMMARY = "run the gate of one or several configs"
DESCRIPTION = """Start the candidate of each CONFIG, compare its answers with the stored baseline, time it,
and write .quantguard/<name>/result.json. What follows -- goes to pytest.

The same as: pytest --quantguard-config=CONFIG ..."""

QUIET = ("-W", "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning")
"""This package is imported before pytest starts here, and has no assertions to rewrite."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("config", type=Path, nargs="+", metavar="CONFIG", help="YAML file of a gate")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where results and logs go")
    parser.add_argument("--repeats", type=int, metavar="N", help="measure each cell N times")
    parser.add_argument(
        "--json", action="store_true", help="print the results as JSON; the report goes to stderr"
    )
    parser.set_defaults(pytest_arguments=[])


def execute(arguments: argparse.Namespace) -> int:
    """Run pytest in this process."""
    return run_gate(arguments, ())


def run_gate(arguments: argparse.Namespace, extra: Sequence[str]) -> int:
    """pytest with the configs and further options; its exit code in our terms."""
    import pytest

    from pytest_quantguard.config_file import load_configs
    from pytest_quantguard.results import RESULT_FILE, read_result

    configs = load_configs(arguments.config)
    words = [f"--quantguard-config={path}" for path in arguments.config]
    words += [f"--quantguard-output={arguments.output}"] if arguments.output else []
    words += [f"--quantguard-repeats={arguments.repeats}"] if arguments.repeats is not None else []
    output = arguments.output or Path(".quantguard")
    before = {config.name: _version(output / config.name / RESULT_FILE) for config in configs}
    ending = _Ending()
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        code = pytest.main([*QUIET, *words, *extra, *arguments.pytest_arguments], plugins=[ending])
    if arguments.json:
        results = []
        for name, old in before.items():
            if _version(output / name / RESULT_FILE) == old:
                tell(f"quantguard: {name}: this run wrote no result, so none of it is printed")
            else:
                results.append(read_result(output / name).model_dump(mode="json"))
        print_json(results)
    return {
        pytest.ExitCode.OK: ExitCode.DONE,
        pytest.ExitCode.TESTS_FAILED: ExitCode.FAILED,
        pytest.ExitCode.INTERRUPTED: ExitCode.INTERRUPTED if ending.interrupted else ExitCode.USAGE,
        pytest.ExitCode.USAGE_ERROR: ExitCode.USAGE,
    }.get(pytest.ExitCode(code), ExitCode.IMPOSSIBLE)


class _Ending:
    """Whether somebody stopped pytest. Tests that cannot be collected end it with the same exit code."""

    interrupted = False

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Called for both."""
        import pytest

        self.interrupted = not isinstance(excinfo.value, pytest.Session.Interrupted)


def _version(file: Path) -> tuple[int, int] | None:
    """Differs for every writing of a file: results are renamed into place."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
