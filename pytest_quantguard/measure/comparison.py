"""Compares two cells prompt by prompt, and turns repeated cells into a noise floor.

The arithmetic is that of `logprobs`; here is only what needs to know that rows belong to prompts and cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from pytest_quantguard.baseline.recording import Cell, CellKey, NoiseFloor
from pytest_quantguard.errors import InvalidAnswerError
from pytest_quantguard.logprobs.arrays import TopLogprobs
from pytest_quantguard.logprobs.belonging import match_vocabularies
from pytest_quantguard.logprobs.divergence import Divergence, compare
from pytest_quantguard.logprobs.guards import Violation
from pytest_quantguard.logprobs.metrics import METRICS


@dataclass(frozen=True, slots=True)
class CellComparison:
    """Two cells compared: all prompts' positions one after the other, and what had to be said about it."""

    divergence: Divergence
    notes: tuple[str, ...] = ()


def compare_cells(baseline: Cell, candidate: Cell) -> CellComparison:
    """Compare the rows of every prompt, in prompt order.

    Raises `InvalidAnswerError` where the cells are not about the same prompts, for zero positions, and for
    vocabularies that differ by more than padding rows.
    """
    if len(baseline.rows) != len(candidate.rows):
        raise InvalidAnswerError(
            f"{candidate.key}: {len(candidate.rows)} prompts cannot be compared with {len(baseline.rows)} "
            f"prompts of {baseline.key}."
        )
    match = match_vocabularies(baseline.rows, candidate.rows, cell=str(candidate.key))
    if isinstance(match, Violation):
        raise InvalidAnswerError(f"{match.message}: quantguard capture CONFIG, for its own `reference`.")
    parts = []
    for index, (left, right) in enumerate(zip(baseline.rows, candidate.rows, strict=True)):
        try:
            parts.append(compare(_of_size(left, match.size), _of_size(right, match.size)))
        except InvalidAnswerError as error:
            raise InvalidAnswerError(f"{candidate.key}, prompt number {index}: {error}") from error
    return CellComparison(Divergence.concatenate(parts), () if match.note is None else (match.note,))


def noise_floor(recordings: Mapping[CellKey, Sequence[Cell]]) -> NoiseFloor:
    """The worst value of each metric between two recordings that should be equal, for each cell.

    recordings[key] are repeats of one cell. Compared are the first with every other repeat of the same
    cell, and with the first repeat of the same phase at every other batch size; each pair both ways, since
    most metrics are not symmetric. A cell with nothing to compare has no entry.
    """
    worst: dict[CellKey, dict[str, float]] = {}
    for key, repeats in recordings.items():
        for repeat in repeats[1:]:
            _note_worst(worst, (key,), repeats[0], repeat)
    for one, other in combinations(recordings, 2):
        if one.phase == other.phase:
            _note_worst(worst, (one, other), recordings[one][0], recordings[other][0])
    return worst


def _note_worst(
    worst: dict[CellKey, dict[str, float]], keys: Sequence[CellKey], one: Cell, other: Cell
) -> None:
    for comparison in (compare_cells(one, other), compare_cells(other, one)):
        for name, value in comparison.divergence.aggregates().items():
            pick = max if METRICS[name].better == "lower" else min
            for key in keys:
                values = worst.setdefault(key, {})
                values[name] = pick(values.get(name, value), value)


def _of_size(rows: TopLogprobs, vocab_size: int) -> TopLogprobs:
    return rows if rows.vocab_size == vocab_size else replace(rows, vocab_size=vocab_size)
