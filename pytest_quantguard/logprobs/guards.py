"""Whether rows may be believed at all: found before any number is computed, each with where and what.

A guard that fires means that the answers are broken (or not what was asked for), not that the model is bad,
so no divergence of that cell may be called passed. Guards return violations; what becomes of them is the
caller's affair.

A log-probability of -inf is refused as well: greedy scoring masks no token, and a server that returns one has
either masked or overflowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from pytest_quantguard.logprobs.arrays import Int32, TopLogprobs
from pytest_quantguard.logprobs.lookup import Lookup

Bool = npt.NDArray[np.bool_]

GUARDS: Mapping[str, str] = MappingProxyType(
    {
        "positions": "every prompt has one row per scored position, and there is at least one",
        "finite": "no log-probability is NaN or infinite",
        "sentinel": "no log-probability is a stand-in for minus infinity such as -3.4e38",
        "at_most_zero": "no log-probability is above 1e-6",
        "token_ids": "every token id lies in the vocabulary",
        "unique_ids": "no row names a token twice",
        "order": "every row is in order of probability, best first",
        "normalized": "no row's probabilities sum to more than 1",
        "captured_mass": "the top-K holds at least a minimum of probability",
        "reference_tokens": "the scored tokens are the reference's",
        "reference_logprob": "the scored token's own log-probability agrees with the row",
        "row_identity": "rows match their own prompt better than any other",
        "vocabulary": "both sides have the same vocabulary, but for padding",
        "quantized": "a candidate that should be quantized differs from the reference by more than noise",
    }
)
"""Every guard by name, with what holds when it is silent, in the order in which they are checked."""

MAX_LOGPROB = 1e-6
SENTINEL = -1e30
MAX_MASS = 1.01
"""Log-probabilities computed in BF16 miss 1 by up to about a percent."""

LOGPROB_TOLERANCE = 0.01
"""Both are read from one distribution; a real server states them equal to the bit."""

CAPTURED_MASS_FLOOR = 0.05
"""A flat distribution (a dead output layer) holds K / V in its top-K: 0.005 for 256 of 49,152."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One guard that fired for one prompt (or for all, where `prompt` is None).

    guard: a key of GUARDS. cell: phase and batch size as the caller writes them. position: in the scored
    span, the first that is affected; affected: how many are. values: what was found there. message: complete,
    for a log.
    """

    guard: str
    cell: str
    prompt: str | None
    position: int | None
    affected: int
    message: str
    values: Mapping[str, float | int | str] = field(default_factory=dict)


def check_rows(
    rows: Sequence[TopLogprobs],
    *,
    prompt_ids: Sequence[str],
    reference_ids: Sequence[Int32],
    cell: str,
    captured_mass_floor: float = CAPTURED_MASS_FLOOR,
) -> list[Violation]:
    """Every guard that needs one server's rows only; at most one violation per guard and prompt.

    rows: one per prompt. prompt_ids: their names. reference_ids: int32 [positions], the reference's tokens of
    each scored span. cell: for messages, such as "decode-bs8".
    """
    if not len(rows) == len(prompt_ids) == len(reference_ids):
        raise ValueError(
            f"{len(rows)} rows, {len(prompt_ids)} names and {len(reference_ids)} spans do not match"
        )
    if not rows:
        return [_nothing(cell)]
    violations: list[Violation] = []
    for prompt, own, expected in zip(prompt_ids, rows, reference_ids, strict=True):
        place = _Place(cell, prompt)
        violations.extend(_check_prompt(own, expected, place, captured_mass_floor))
    return violations


@dataclass(frozen=True, slots=True)
class _Place:
    cell: str
    prompt: str

    def violation(self, guard: str, bad: Bool, what: str, **values: float | int | str) -> Violation:
        """bad: bool [T], the affected positions; at least one."""
        position, affected = int(np.argmax(bad)), int(bad.sum())
        return Violation(
            guard,
            self.cell,
            self.prompt,
            position,
            affected,
            f"{self.cell}: prompt {self.prompt!r}, position {position}: {what} "
            f"({affected} of {bad.size} positions of this prompt are affected)",
            values,
        )


def _nothing(cell: str) -> Violation:
    return Violation(
        "positions", cell, None, None, 0, f"{cell}: zero positions: a comparison over nothing is not a pass"
    )


def _rows_with(bad: Bool) -> Bool:
    """bool [T]: rows of bool [T, K] in which anything is bad."""
    return np.asarray(bad.any(axis=1), bool)


def _check_prompt(
    rows: TopLogprobs, expected: Int32, place: _Place, captured_mass_floor: float
) -> Iterator[Violation]:
    if rows.positions != expected.size or rows.positions == 0 or rows.width == 0:
        yield Violation(
            "positions",
            place.cell,
            place.prompt,
            None,
            rows.positions,
            f"{place.cell}: prompt {place.prompt!r}: {rows.positions} rows of {rows.width} log-probabilities "
            f"where {expected.size} scored positions are expected",
            {"found": rows.positions, "expected": int(expected.size), "width": rows.width},
        )
        return
    usable = True
    for violation in _check_values(rows, place):
        usable = False
        yield violation
    for violation in _check_ids(rows, place):
        usable = False
        yield violation
    if usable:
        yield from _check_mass(rows, place, captured_mass_floor)
        yield from _check_chosen(rows, place)
    other = rows.chosen_ids != expected
    if other.any():
        at = int(np.argmax(other))
        found, wanted = int(rows.chosen_ids[at]), int(expected[at])
        yield place.violation(
            "reference_tokens",
            other,
            f"the server scored token {found} where the reference has {wanted}",
            found=found,
            expected=wanted,
        )


def _check_values(rows: TopLogprobs, place: _Place) -> Iterator[Violation]:
    values, chosen = rows.logprobs, rows.chosen_logprobs
    tests: tuple[tuple[str, Bool, Bool, str], ...] = (
        (
            "finite",
            ~np.isfinite(values),
            np.isinf(chosen),
            "is not finite: the model computed NaN or infinity, or masked a token",
        ),
        (
            "sentinel",
            np.isfinite(values) & (values < SENTINEL),
            np.isfinite(chosen) & (chosen < SENTINEL),
            "stands for minus infinity: the server masked or lost this token",
        ),
        ("at_most_zero", values > MAX_LOGPROB, chosen > MAX_LOGPROB, "is above 0: no probability exceeds 1"),
    )
    for guard, bad, bad_chosen, meaning in tests:
        affected = _rows_with(bad) | bad_chosen
        if not affected.any():
            continue
        row = int(np.argmax(affected))
        if bad[row].any():
            rank = int(np.argmax(bad[row]))
            token, value = int(rows.token_ids[row, rank]), float(values[row, rank])
            what = f"log-probability {value:g} of token {token} (rank {rank})"
        else:
            token, value = int(rows.chosen_ids[row]), float(chosen[row])
            what = f"log-probability {value:g} of the scored token {token}"
        yield place.violation(guard, affected, f"{what} {meaning}", token=token, value=value)


def _check_ids(rows: TopLogprobs, place: _Place) -> Iterator[Violation]:
    ids = rows.token_ids
    outside = (ids < 0) | (ids >= rows.vocab_size)
    if outside.any():
        affected = _rows_with(outside)
        row = int(np.argmax(affected))
        token = int(ids[row, int(np.argmax(outside[row]))])
        yield place.violation(
            "token_ids",
            affected,
            f"token id {token} lies outside the vocabulary of {rows.vocab_size}",
            token=token,
        )
    else:
        repeated = Lookup(rows.vocab_size).repeated(ids)
        if repeated.any():
            affected = _rows_with(repeated)
            row = int(np.argmax(affected))
            token = int(ids[row, int(np.argmax(repeated[row]))])
            yield place.violation(
                "unique_ids", affected, f"token {token} is named twice in one row", token=token
            )
    rising = rows.logprobs[:, 1:] > rows.logprobs[:, :-1]
    if rising.any():
        affected = _rows_with(rising)
        row = int(np.argmax(affected))
        rank = int(np.argmax(rising[row])) + 1
        first, second = (float(rows.logprobs[row, at]) for at in (rank - 1, rank))
        yield place.violation(
            "order",
            affected,
            f"rank {rank} is more probable than rank {rank - 1} ({second:g} after {first:g})",
            rank=rank,
        )


def _check_chosen(rows: TopLogprobs, place: _Place) -> Iterator[Violation]:
    """The scored token's value against its entry in the row, or the row's end where it has none."""
    hits = rows.token_ids == rows.chosen_ids[:, None]
    in_top = _rows_with(hits)
    listed = np.take_along_axis(rows.logprobs, hits.argmax(axis=1)[:, None], axis=1)[:, 0]
    stated, least = rows.chosen_logprobs, rows.logprobs[:, -1]
    off = np.where(in_top, np.abs(stated - listed), stated - least)
    bad = np.asarray(off > LOGPROB_TOLERANCE, bool)  # NaN, not stated, is not above
    if bad.any():
        row = int(np.argmax(bad))
        token, value = int(rows.chosen_ids[row]), float(stated[row])
        entry = f"{listed[row]:g} in the row"
        if not in_top[row]:
            entry = f"not in the row, which ends at {least[row]:g}"
        yield place.violation(
            "reference_logprob",
            bad,
            f"the scored token {token} has log-probability {value:g} but is {entry}: the row is another "
            "position's, or a logit processor changed the distribution",
            token=token,
            value=value,
        )


def _check_mass(rows: TopLogprobs, place: _Place, floor: float) -> Iterator[Violation]:
    mass = np.exp(rows.logprobs.astype(np.float64)).sum(axis=1)
    above, below = mass > MAX_MASS, mass < floor
    if above.any():
        found = float(mass[np.argmax(above)])
        yield place.violation(
            "normalized", above, f"the top {rows.width} probabilities sum to {found:.4g}", mass=found
        )
    if below.any():
        found = float(mass[np.argmax(below)])
        yield place.violation(
            "captured_mass",
            below,
            f"the top {rows.width} tokens hold {found:.4g} of the probability, less than {floor:g}: the "
            "distribution is nearly flat",
            mass=found,
            floor=floor,
        )
