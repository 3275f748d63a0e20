"""The text of a failed check: what was found, where it is worst, what it may be, and which key changes it.

Written for a terminal, or a CI log of 80 columns.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pytest_quantguard.baseline.recording import Cell, PromptRecord
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.logprobs.buckets import by_task
from pytest_quantguard.logprobs.divergence import Divergence
from pytest_quantguard.logprobs.metrics import Metric
from pytest_quantguard.paths import shown_path, with_short_paths
from pytest_quantguard.report.visible import part_of_character, visible
from pytest_quantguard.report.wrapping import command_lines, text_width
from pytest_quantguard.results import RELATIVE, CheckResult

LABEL = 19
CONTEXT_TOKENS = 12
SHOWN_TOKENS = 3
WORST_PROMPTS = 3
SHOWN_TASKS = 10
NO_BREAK = "\u00a0"
REST = tuple(
    f"  {label}" for label in ("by task", "diagnosis", "worst positions", "server", "log", "result", "bound")
)
"""How the lines of a message begin that are not about the check's own figures."""
SHOWN_ID = 60


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a cell: prompt number, position in its scored span, and the metric's value there."""

    prompt: int
    position: int
    value: float


def describe_failure(trial: Trial, result: CheckResult, headline: str, details: Sequence[str] = ()) -> str:
    """The whole message of a check that failed. details: further lines, already laid out."""
    lines = [*textwrap.wrap(headline, text_width())]
    if result.interval is not None:
        low, high = result.interval
        lines += labelled("95 % interval", f"{shown(result, low)} to {shown(result, high)}, by prompt")
    if result.noise_floor is not None:
        lines += labelled("noise floor", f"{number(result.noise_floor)} (the reference against itself)")
    if result.detectable_change is not None:
        lines += labelled("detectable change", f"{shown(result, result.detectable_change)} with this suite")
    lines += details
    lines += describe_place(trial)
    lines += describe_key(trial, result)
    return "\n".join(lines)


def shortened(trial: Trial, result: CheckResult, first: str) -> str:
    """The figures of a check that failed; for the rest it refers to `first`, the check that told of the same
    metric in full, and to the result.
    """
    lines = result.message.split("\n")
    end = next((at for at, line in enumerate(lines) if line.startswith(REST)), len(lines))
    path = shown_path(trial.options.output / "result.json")
    rest = labelled("in full", f"{first} above; this one in {path}, or with -v")
    return "\n".join([*lines[:end], *rest])


def describe_place(trial: Trial) -> list[str]:
    """The server's command line, and where the files are."""
    server = trial.running_server()
    lines = []
    if server is not None and server.command:
        command = visible(with_short_paths(shlex.join(server.command)))
        lines += command_lines(command, text_width(), before=f"  {'server':<{LABEL}}", indent=4)
        lines += labelled("log", shown_path(trial.server_log))
    elif server is not None:
        lines += labelled("server", server.url)
    return [*lines, *labelled("result", shown_path(trial.options.output / "result.json"))]


def describe_key(trial: Trial, result: CheckResult) -> list[str]:
    """Which key of which file holds the bound."""
    keys = {
        "accuracy": f"accuracy.{result.metric}, or an entry of accuracy.overrides",
        "drift": f"accuracy.drift.{result.metric}",
        "generation": _generation_key(result),
        "self_consistency": f"self_consistency.{result.extra.get('comparison')}",
        "validity": "validity",
    }
    key = keys.get(result.kind)
    return labelled("bound", f"{key} in {shown_path(trial.config_path)}") if key else []


def _generation_key(result: CheckResult) -> str:
    task = result.extra.get("task")
    return f"generation.{result.metric}" if task == "all" else f"generation.tasks.{task}.{result.metric}"


def describe_tasks(trial: Trial, metric: Metric, divergence: Divergence) -> list[str]:
    """The metric over the prompts of each task, worst first; nothing for a suite of one task."""
    tasks = [prompt.task for prompt in trial.baseline().prompts]
    values = {task: metric.of(part) for task, part in by_task(divergence, tasks).items()}
    if len(values) < 2:
        return []
    ranked = sorted(values.items(), key=lambda item: item[1], reverse=metric.better == "lower")
    told = [f"{visible(task, longest=SHOWN_ID)}{NO_BREAK}{number(value)}" for task, value in ranked]
    more = len(told) - SHOWN_TASKS
    text = ", ".join(told[:SHOWN_TASKS]) + (f" and {more} more" if more > 0 else "")
    return [line.replace(NO_BREAK, " ") for line in labelled("by task", text)]


def describe_worst(
    trial: Trial,
    metric: Metric,
    divergence: Divergence,
    baseline: Cell,
    candidate: Cell,
    names: tuple[str, str],
) -> list[str]:
    """The worst position of the worst prompts, with the tokens as text. names: of the two sides."""
    prompts = trial.baseline().prompts
    lines = labelled("worst positions", f"by {metric.array}")
    for place in worst_positions(metric, divergence):
        prompt = prompts[place.prompt]
        named = visible(prompt.id, longest=SHOWN_ID)
        lines.append(
            f"    prompt {named}, position {place.position} of {prompt.span_ids.size}: {metric.array} "
            f"{number(place.value)}"
        )
        lines += _shown("after", repr(_context(trial, prompt, place.position)))
        lines += _shown("reference", repr(trial.text([int(prompt.span_ids[place.position])])))
        for name, cell in zip(names, (baseline, candidate), strict=True):
            lines += _shown(name, _best_tokens(trial, cell, place))
    return lines


def worst_positions(metric: Metric, divergence: Divergence, prompts: int = WORST_PROMPTS) -> list[Position]:
    """The worst position of each of the worst prompts, worst first."""
    values = metric.values(divergence)
    badness = np.nan_to_num(values if metric.better == "lower" else -values, nan=-np.inf)
    found: list[Position] = []
    for index in np.argsort(-badness, kind="stable"):
        if len(found) == prompts or not np.isfinite(badness[index]):
            break
        prompt = int(divergence.prompt[index])
        if all(place.prompt != prompt for place in found):
            found.append(Position(prompt, int(divergence.position[index]), float(values[index])))
    return found


def labelled(label: str, text: str) -> list[str]:
    """A label with text beside it, wrapped under itself."""
    return textwrap.wrap(
        text,
        text_width(),
        initial_indent=f"  {label:<{LABEL}}",
        subsequent_indent=" " * (LABEL + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def bullets(label: str, sentences: Iterable[str]) -> list[str]:
    """The label beside the first sentence, the others under it."""
    return [
        line for index, text in enumerate(sentences) for line in labelled(label if index == 0 else "", text)
    ]


def shown(result: CheckResult, value: float) -> str:
    """A value of the result's kind: changes relative to what was are percentages."""
    return percent(value) if result.unit == RELATIVE else number(value)


def percent(value: float) -> str:
    """A share as a percentage of three digits."""
    return f"{value * 100:.3g} %"


def number(value: float) -> str:
    """Four significant digits; small ones in powers of ten."""
    return f"{value:.4g}"


def _context(trial: Trial, prompt: PromptRecord, position: int) -> str:
    end = prompt.span_start + position
    tokens = [int(token) for token in prompt.token_ids[max(0, end - CONTEXT_TOKENS) : end]]
    return trial.text(tokens)


def _best_tokens(trial: Trial, cell: Cell, place: Position) -> str:
    rows, told = cell.rows[place.prompt], ""
    for rank in range(min(SHOWN_TOKENS, rows.width)):
        token = int(rows.token_ids[place.position, rank])
        text, probability = trial.text([token]), np.exp(rows.logprobs[place.position, rank])
        shown = f"{text!r}{part_of_character(text, token)} {probability:.3f}"
        if told and len(told) + 2 + len(shown) > _room():
            break
        told = f"{told}, {shown}" if told else shown
    return told


def _room() -> int:
    """Columns beside the label of a line about a position."""
    return text_width() - 17


def _shown(label: str, text: str) -> list[str]:
    room = _room()
    return [f"      {label:<11}{text if len(text) <= room else '...' + text[len(text) - room + 3 :]}"]
