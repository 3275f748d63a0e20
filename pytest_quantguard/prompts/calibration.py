"""Composes a calibration set for a quantizer: like an evaluation set, with corrections, and without its
prompts.

A quantizer sets its scales from the activations of a few hundred prompts. They should resemble what the model
will be asked, but must not be what it is judged by. The set takes over an evaluation set's mix of tasks,
languages, low-meaning text and lengths; any share can be scaled. The texts come from a pool of the user's
own, or are generated.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from pytest_quantguard.errors import ConfigError
from pytest_quantguard.prompts.builtin import apportion
from pytest_quantguard.prompts.duplicates import NearDuplicates, exact_key
from pytest_quantguard.prompts.freeform import FREEFORM, make_text
from pytest_quantguard.prompts.lengths import TokenCounter, TooShortError, cut_text, estimate_tokens
from pytest_quantguard.prompts.measures import LOW_MEANING, measure_text
from pytest_quantguard.prompts.prompt import Prompt
from pytest_quantguard.prompts.tasks import TASKS
from pytest_quantguard.prompts.words import Language
from pytest_quantguard.whole_files import replace_file

LOW_MEANING_SCALE = "low_meaning"
"""The key of `scale` that applies to all low-meaning prompts; every other one is a task."""
ATTEMPTS = 60
"""Tries at a prompt of the right language and meaning, before one of another is taken."""
GIVE_UP = 600
"""Tries at a prompt that resembles no other."""


class Kind(NamedTuple):
    """Prompts that are alike for the mix."""

    task: str
    language: Language
    low_meaning: bool


@dataclass(frozen=True, slots=True)
class Removal:
    """A text that was not used, because it is or nearly is a prompt of the evaluation set."""

    evaluation_id: str
    task: str
    exact: bool


@dataclass(frozen=True, slots=True)
class CalibrationSet:
    """The composed prompts. wanted: the number of each kind that the mix asks for. removed: what would have
    leaked.
    """

    prompts: tuple[Prompt, ...]
    wanted: Mapping[Kind, int]
    removed: tuple[Removal, ...]

    def found(self) -> dict[Kind, int]:
        """The number of each kind that the prompts are, measured anew."""
        return dict(Counter(kind_of(prompt) for prompt in self.prompts))

    def to_json(self) -> dict[str, Any]:
        """The mix as wanted and found, and what was removed."""
        found = self.found()
        kinds = sorted(self.wanted.keys() | found.keys())
        return {
            "prompts": len(self.prompts),
            "kinds": [
                {**kind._asdict(), "wanted": self.wanted.get(kind, 0), "found": found.get(kind, 0)}
                for kind in kinds
            ],
            "removed": [asdict(removal) for removal in self.removed],
        }


def kind_of(prompt: Prompt) -> Kind:
    """The kind of a prompt, by its task and by what its text is like."""
    measures = measure_text(prompt.text or "")
    language: Language = "zh" if measures.language == "zh" else "en"
    return Kind(prompt.task, language, measures.low_meaning >= LOW_MEANING)


def compose_calibration_set(
    evaluation: Sequence[Prompt],
    *,
    size: int,
    max_tokens: int,
    scale: Mapping[str, float] | None = None,
    seed: int = 0,
    count: TokenCounter = estimate_tokens,
    pool: Sequence[Prompt] = (),
) -> CalibrationSet:
    """`size` prompts of at most `max_tokens` tokens, mixed like `evaluation`.

    scale: factors of single tasks' shares, and of all low-meaning prompts under "low_meaning"; what is left
    is shared out anew. pool: texts that are used before any are generated. No prompt is, or nearly is, one of
    `evaluation` or another of the set. Raises ConfigError for scales that name nothing, and for tasks that
    can neither be generated nor found in the pool; QuantguardError without the `analysis` extra.
    """
    by_kind: dict[Kind, list[int]] = defaultdict(list)
    for prompt in evaluation:
        if prompt.text is None:
            raise ConfigError(
                f"Prompt {prompt.id} has token ids only; a calibration set needs texts to compare with."
            )
        by_kind[kind_of(prompt)].append(count(prompt.text))
    wanted = apportion(_weights({kind: len(lengths) for kind, lengths in by_kind.items()}, scale or {}), size)
    guard = _Guard(evaluation)
    prompts: list[Prompt] = []
    rng = random.Random(f"calibration/{seed}")
    for kind, number in wanted.items():
        lengths = by_kind[kind]
        candidates = [prompt for prompt in pool if prompt.task == kind.task and prompt.text]
        rng.shuffle(candidates)
        supply = _supply(kind, lengths, max_tokens, count, candidates, rng)
        prompts += _take(kind, number, supply, guard, len(prompts))
    rng.shuffle(prompts)
    return CalibrationSet(tuple(prompts), wanted, tuple(guard.removed))


def write_calibration_set(path: Path, calibration: CalibrationSet) -> None:
    """Write JSON lines with `text`, `id`, `task` and `language`, whole or not at all. Raises ConfigError."""
    lines = [
        orjson.dumps({"id": prompt.id, "task": prompt.task, "language": prompt.language, "text": prompt.text})
        for prompt in calibration.prompts
    ]
    try:
        replace_file(path, b"\n".join(lines) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


def format_calibration_set(calibration: CalibrationSet) -> str:
    """What was composed, as plain text: the mix as wanted and found, and what was removed."""
    found = calibration.found()
    size = max(len(calibration.prompts), 1)
    lines = [f"{len(calibration.prompts)} prompts", f"  {'kind':32} {'wanted':>8} {'found':>8}"]
    for kind in sorted(calibration.wanted.keys() | found.keys()):
        name = f"{kind.task}, {kind.language}" + (", low meaning" if kind.low_meaning else "")
        wanted = calibration.wanted.get(kind, 0)
        lines.append(f"  {name:32} {wanted / size:8.1%} {found.get(kind, 0) / size:8.1%}")
    exact = sum(removal.exact for removal in calibration.removed)
    lines.append(
        f"removed because they are prompts of the evaluation set: {exact} exactly, "
        f"{len(calibration.removed) - exact} nearly"
    )
    return "\n".join(lines)


def _weights(counts: Mapping[Kind, int], scale: Mapping[str, float]) -> dict[Kind, float]:
    tasks = {kind.task for kind in counts}
    for name, factor in scale.items():
        if name != LOW_MEANING_SCALE and name not in tasks:
            raise ConfigError(
                f"There is nothing to scale by {name!r}; give {LOW_MEANING_SCALE} or a task of the "
                f"evaluation set: {', '.join(sorted(tasks))}."
            )
        if not 0 <= factor < float("inf"):
            raise ConfigError(f"{name} cannot be scaled by {factor}; give a number of at least 0.")
    weights = {
        kind: count
        * scale.get(kind.task, 1.0)
        * (scale.get(LOW_MEANING_SCALE, 1.0) if kind.low_meaning else 1.0)
        for kind, count in counts.items()
    }
    if not sum(weights.values()):
        raise ConfigError("The evaluation set is empty, or every share of it is scaled to 0.")
    return {kind: weight for kind, weight in weights.items() if weight}


class _Guard:
    """Knows the evaluation set and what was taken; lets nothing through that resembles either."""

    def __init__(self, evaluation: Sequence[Prompt]) -> None:
        self.removed: list[Removal] = []
        self._evaluation = evaluation
        self._exact = {exact_key(prompt.text or ""): prompt.id for prompt in evaluation}
        self._near_evaluation = NearDuplicates()
        self._near_taken = NearDuplicates()
        for prompt in evaluation:
            self._near_evaluation.add(prompt.text or "")

    def leaks(self, text: str, task: str) -> bool:
        """Is this a prompt of the evaluation set? If so it is noted."""
        exact = self._exact.get(exact_key(text))
        near = self._near_evaluation.find(text) if exact is None else None
        if exact is not None:
            self.removed.append(Removal(exact, task, exact=True))
        elif near is not None:
            self.removed.append(Removal(self._evaluation[near].id, task, exact=False))
        return exact is not None or near is not None

    def repeats(self, text: str) -> bool:
        """Does this resemble a text that was taken?"""
        return self._near_taken.find(text) is not None

    def take(self, text: str) -> None:
        self._near_taken.add(text)


def _take(kind: Kind, number: int, supply: Iterator[Prompt], guard: _Guard, first: int) -> Iterator[Prompt]:
    """`number` prompts of the supply that are of this kind; of another low-meaning share if there are no
    others.
    """
    taken = failures = 0
    for prompt in supply:
        if taken == number or failures > GIVE_UP:
            break
        text = prompt.text or ""
        failures += 1
        if guard.leaks(text, kind.task) or guard.repeats(text):
            continue
        if kind_of(prompt) != kind and failures <= ATTEMPTS:
            continue
        failures = 0
        guard.take(text)
        yield replace(prompt, id=f"calibration-{first + taken:05}", language=kind.language)
        taken += 1
    if taken < number:
        raise ConfigError(
            f"There are too few texts for {number} prompts of the task {kind.task!r}: {taken} were found "
            "that are neither in the evaluation set nor alike. Add texts of this task to the pool, or lower "
            "its scale or the size."
        )


def _supply(
    kind: Kind,
    lengths: Sequence[int],
    max_tokens: int,
    count: TokenCounter,
    pool: Sequence[Prompt],
    rng: random.Random,
) -> Iterator[Prompt]:
    """First the pool's texts, then generated ones whose lengths are those of the evaluation set."""
    for prompt in pool:
        yield replace(prompt, text=cut_text(prompt.text or "", max_tokens, count), gold=(), token_ids=None)
    while kind.task in TASKS or kind.task in FREEFORM:
        tokens = min(rng.choice(lengths), max_tokens)
        yield Prompt("generated", kind.task, _generate(kind, rng, tokens, max_tokens, count))


def _generate(kind: Kind, rng: random.Random, tokens: int, max_tokens: int, count: TokenCounter) -> str:
    """A text of the task, longer than `tokens` where its shortest form is."""
    if kind.task in FREEFORM:
        return make_text(kind.task, rng, tokens, count)
    for limit in [tokens, *([max_tokens] * ATTEMPTS)]:
        try:
            return TASKS[kind.task](random.Random(rng.getrandbits(64)), limit, kind.language, count).text
        except TooShortError as error:
            least = error.least
    raise ConfigError(
        f"{max_tokens} tokens are too few for the task {kind.task!r} ({kind.language}), which needs about "
        f"{least}. Allow more, or scale {kind.task} by 0."
    )
