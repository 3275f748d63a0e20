"""Compares a candidate with the last accepted run of the same candidate, position by position.

A fault that raises the divergence from BF16 by a few percent is lost in it, but against the last good run
it is often exactly zero before the place where it sets in and not zero after it. No judgement here, and
nothing is asked of a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pytest_quantguard.baseline.recording import Cell, CellKey, PromptRecord, Recording
from pytest_quantguard.errors import BaselineError
from pytest_quantguard.logprobs.divergence import Divergence
from pytest_quantguard.logprobs.identity import BitComparison, compare_bits
from pytest_quantguard.measure.asking import shorten
from pytest_quantguard.measure.comparison import compare_cells


@dataclass(frozen=True, slots=True)
class FirstAffected:
    """Where the candidate first leaves the accepted run.

    span_position: the smallest position within a scored span. text_position: the smallest number of tokens
        before an affected row, over all prompts. prompt_id: a prompt that shows `text_position`. prompts:
        how many are affected.
    """

    prompt_id: str
    span_position: int
    text_position: int
    prompts: int


@dataclass(frozen=True, slots=True)
class DriftMeasurement:
    """One cell of a candidate against the same cell of its accepted run.

    between: divergence of the candidate from the accepted run.
    before, after: divergence from BF16 of the accepted run and of the candidate; positions correspond.
    bits: which rows are equal bit by bit. first: None where all are.
    """

    key: CellKey
    between: Divergence
    before: Divergence
    after: Divergence
    bits: BitComparison
    first: FirstAffected | None


def measure_drift(candidate: Cell, *, accepted: Recording, baseline: Recording) -> DriftMeasurement:
    """Hold a candidate's cell against the accepted one; `BaselineError` where there is no such cell."""
    key = candidate.key
    for recording, command in ((accepted, "quantguard accept"), (baseline, "quantguard capture")):
        if key not in recording.cells:
            raise BaselineError(
                f"The {'accepted run' if recording is accepted else 'baseline'} has no cell {key}. Its "
                f"cells: {', '.join(map(str, recording.cells))}. Record it anew with: {command} CONFIG"
            )
    bits = compare_bits(accepted.cells[key].rows, candidate.rows)
    return DriftMeasurement(
        key=key,
        between=compare_cells(accepted.cells[key], candidate).divergence,
        before=compare_cells(baseline.cells[key], accepted.cells[key]).divergence,
        after=compare_cells(baseline.cells[key], candidate).divergence,
        bits=bits,
        first=_first_affected(bits, baseline.prompts),
    )


def require_same_texts(accepted: Recording, baseline: Recording) -> None:
    """Raise `BaselineError` for an accepted run that scored other texts than the baseline has."""
    ours, theirs = baseline.prompts, accepted.prompts
    if len(ours) != len(theirs):
        found = f"it has {len(theirs)} prompts, the baseline {len(ours)}"
    else:
        other = [a.id for a, b in zip(ours, theirs, strict=True) if not _same_text(a, b)]
        if not other:
            return
        found = f"these prompts have other tokens or spans: {shorten(other)}"
    raise BaselineError(
        f"The accepted run belongs to another suite or to an older baseline: {found}. Look at this run "
        "against the budget alone, then accept it: quantguard accept CONFIG (or pytest "
        "--quantguard-config=CONFIG --quantguard-accept)."
    )


def _same_text(one: PromptRecord, other: PromptRecord) -> bool:
    return one.span_start == other.span_start and np.array_equal(one.token_ids, other.token_ids)


def _first_affected(bits: BitComparison, prompts: Sequence[PromptRecord]) -> FirstAffected | None:
    affected = [
        (prompt.span_start + position, position, prompt.id)
        for prompt, position in zip(prompts, bits.first_affected, strict=True)
        if position is not None
    ]
    if not affected:
        return None
    text_position, _, prompt_id = min(affected)
    return FirstAffected(
        prompt_id=prompt_id,
        span_position=min(position for _, position, _ in affected),
        text_position=text_position,
        prompts=len(affected),
    )
