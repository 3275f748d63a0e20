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
from pytest_quantguard.logprobs.divergence import Divergence, compare
from pytest_quantguard.logprobs.metrics import METRICS

MOST_PADDING = 1024
"""Vocabularies are padded to a multiple of 64 to 512; a difference of more rows is another model."""


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
    ours, theirs, notes = _same_vocabulary(baseline, candidate)
    parts = []
    for index, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        try:
            parts.append(compare(left, right))
        except InvalidAnswerError as error:
            raise InvalidAnswerError(f"{candidate.key}, prompt number {index}: {error}") from error
    return CellComparison(Divergence.concatenate(parts), notes)


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


def _same_vocabulary(
    baseline: Cell, candidate: Cell
) -> tuple[Sequence[TopLogprobs], Sequence[TopLogprobs], tuple[str, ...]]:
    """The rows as they are, or over the smaller vocabulary where the larger has only padding rows more."""
    sizes = {rows.vocab_size for cell in (baseline, candidate) for rows in cell.rows}
    if len(sizes) <= 1:
        return baseline.rows, candidate.rows, ()
    small, large = min(sizes), max(sizes)
    highest = max(int(rows.token_ids.max(initial=0)) for cell in (baseline, candidate) for rows in cell.rows)
    if large - small >= MOST_PADDING or highest >= small:
        why = (
            f"token {highest} is among the most likely ones"
            if highest >= small
            else f"{large - small} rows are more than padding"
        )
        raise InvalidAnswerError(
            f"{candidate.key}: the candidate's vocabulary has {candidate.rows[0].vocab_size} entries, the "
            f"baseline's {baseline.rows[0].vocab_size}, and {why}: these are different models. Compare a "
            "candidate with a baseline of its own model (`reference.model_path`, then `quantguard "
            "capture CONFIG`)."
        )
    note = (
        f"vocabularies of {small} and {large} entries compared over the first {small}: the others are "
        "padding rows that appear in no top-K"
    )
    return (
        [replace(rows, vocab_size=small) for rows in baseline.rows],
        [replace(rows, vocab_size=small) for rows in candidate.rows],
        (note,),
    )
