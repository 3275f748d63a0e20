"""Compares a server with itself: two ways of asking that ought to give the same distributions.

No judgement here. With quantized activations two correct kernels differ a lot from each other, position by
position, while both stay equally far from BF16; so what a check judges first is the change of the
divergence *from the baseline*, position by position (`before` and `after`), and the divergence between the
two ways (`between`) only where the candidate repeats itself closely.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pytest_quantguard.baseline.recording import Cell, CellKey, Cells
from pytest_quantguard.errors import InvalidAnswerError
from pytest_quantguard.logprobs.divergence import Divergence
from pytest_quantguard.logprobs.identity import BitComparison, compare_bits
from pytest_quantguard.measure.cells import CellMeasurement
from pytest_quantguard.measure.comparison import compare_cells

SelfCheckName = Literal["decode_against_prefill", "batch", "warm_cache", "repeat"]
"""Decode against prefill of the same batch size; a batch size against the smallest; prompts met in the
prefix cache against cold ones; the same question asked again.
"""


@dataclass(frozen=True, slots=True)
class SelfComparison:
    """Two measurements of one server, `one` being what `other` is held against.

    between: divergence of `other` from `one`.
    before, after: divergence of `one` and of `other` from the baseline; None without a baseline. Their
        positions correspond, so that the change is paired.
    bits: which rows are equal bit by bit.
    evidence: what proves that the two ways were really taken.
    """

    check: SelfCheckName
    one: CellKey
    other: CellKey
    between: Divergence
    before: Divergence | None
    after: Divergence | None
    bits: BitComparison
    evidence: tuple[str, ...]


def compare_with_itself(
    check: SelfCheckName, one: CellMeasurement, other: CellMeasurement, *, baseline: Cells | None = None
) -> SelfComparison:
    """Compare two measurements of the same prompts by the same server.

    baseline: the reference's cells. Each measurement is held against the cell of its own phase and batch
        size; a batch size that was not recorded is held against that of the other measurement.
    """
    before = after = None
    if baseline is not None:
        before = compare_cells(_reference(baseline, one, other), one.cell).divergence
        after = compare_cells(_reference(baseline, other, one), other.cell).divergence
    return SelfComparison(
        check=check,
        one=one.key,
        other=other.key,
        between=compare_cells(one.cell, other.cell).divergence,
        before=before,
        after=after,
        bits=compare_bits(one.cell.rows, other.cell.rows),
        evidence=_evidence(check, one, other),
    )


def _reference(baseline: Cells, measurement: CellMeasurement, instead: CellMeasurement) -> Cell:
    for key in (measurement.key, CellKey(measurement.key.phase, instead.key.batch_size), instead.key):
        if key in baseline:
            return baseline[key]
    # Any cell of the phase is BF16 of the same positions; the smallest batch is the plainest.
    same_phase = sorted(key for key in baseline if key.phase == measurement.key.phase)
    if not same_phase:
        raise InvalidAnswerError(f"the baseline has no {measurement.key.phase} cell")
    return baseline[same_phase[0]]


def _evidence(check: SelfCheckName, one: CellMeasurement, other: CellMeasurement) -> tuple[str, ...]:
    facts = [f"{_way(one)} against {_way(other)}"]
    if check == "decode_against_prefill":
        facts.append(f"{other.decoded_share:.0%} of the positions came out of decode steps ({other.mode})")
    if check == "warm_cache":
        facts.append(
            f"{other.cost.cached_tokens} cached tokens when warm, {one.cost.cached_tokens} when cold"
        )
    if check == "batch":
        sizes = sorted({len(batch) for batch in other.cell.batches}, reverse=True)
        facts.append(f"requests of {', '.join(map(str, sizes))} prompts")
    return tuple(facts)


def _way(measurement: CellMeasurement) -> str:
    return f"{measurement.key}{' warm' if measurement.warm else ''}"
