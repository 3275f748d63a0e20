"""`quantguard analyze`: say what is in a prompt set."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_quantguard.commands import ExitCode, positive, print_json, require_other_file, tell

if TYPE_CHECKING:
    from pytest_quantguard.prompts.analysis import Analysis, Encode, MixDistance

NAME = "analyze"
SUMMARY = "say what is in a prompt set"
DESCRIPTION = """Count the tasks of a prompt set (JSONL, or "builtin" for the built-in suite) and measure
lengths, low-meaning text (random words, identifiers, digits, repetition), languages, duplicates, shared
beginnings and vocabulary. With --against, also how far its mix is from another set's.
Needs: pip install 'pytest-quantguard[analysis]'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument(
        "prompts", metavar="FILE|builtin", help="JSONL with text, prompt or question in each line"
    )
    parser.add_argument("--against", metavar="FILE|builtin", help="compare the mix with this set's")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="model folder; lengths are then counted, not estimated",
    )
    parser.add_argument(
        "--size", type=positive, default=32, help="number of built-in prompts (default: %(default)s)"
    )
    parser.add_argument(
        "--max-prompt-tokens", type=positive, default=512, help="their longest (default: %(default)s)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with plots")
    parser.add_argument("--json", action="store_true", help="print the analysis as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Analyze; raises `QuantguardError` for a file that holds no prompts, or without the extra."""
    from pytest_quantguard.prompts.analysis import distance
    from pytest_quantguard.prompts.analysis_text import format_analysis

    if arguments.html is not None:
        files = [
            Path(name) for name in (arguments.prompts, arguments.against) if name not in (None, "builtin")
        ]
        require_other_file("--html", arguments.html, *files)
    encode = _encoder(arguments.tokenizer)
    analysis = _analyze(arguments.prompts, arguments, encode)
    other = _analyze(arguments.against, arguments, encode) if arguments.against else None
    against = None if other is None else (other, distance(analysis, other))
    if arguments.html is not None:
        _write_html(arguments.html, analysis, against)
    if arguments.json:
        found = analysis.to_json()
        if against is not None:
            found["against"] = {"name": against[0].name, **against[1].to_json()}
        print_json(found)
    else:
        print(format_analysis(analysis, None if against is None else (against[0].name, against[1])))
    return ExitCode.DONE


def _analyze(prompts: str, arguments: argparse.Namespace, encode: Encode | None) -> Analysis:
    from pytest_quantguard.prompts.analysis import analyze
    from pytest_quantguard.prompts.builtin import builtin_prompts
    from pytest_quantguard.prompts.suite import read_prompts

    if prompts == "builtin":
        found = builtin_prompts(size=arguments.size, max_prompt_tokens=arguments.max_prompt_tokens)
    else:
        found = read_prompts(Path(prompts), remedy="Give a JSONL file of prompts, or 'builtin'.")
    return analyze(found, name=prompts, encode=encode)


def _write_html(path: Path, analysis: Analysis, against: tuple[Analysis, MixDistance] | None) -> None:
    from pytest_quantguard.report.html_analysis import render_analysis
    from pytest_quantguard.results import write_whole

    write_whole(path, render_analysis(analysis, against).encode(), "The page", "another FILE")
    tell(f"page written to {path}")


def _encoder(folder: Path | None) -> Encode | None:
    if folder is None:
        return None
    from pytest_quantguard.prompts.tokenizer import ChatTokenizer

    return ChatTokenizer(folder).encode
