"""Bit-identical positions and the first affected one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pytest_quantguard.errors import InvalidAnswerError
from pytest_quantguard.logprobs.arrays import TopLogprobs
from pytest_quantguard.logprobs.identity import compare_bits, identical_positions

from .distributions import log_softmax, top


def rows(seed: int, positions: int = 10) -> TopLogprobs:
    return top(log_softmax(np.random.default_rng(seed).normal(size=(positions, 60)) * 2), 12)


def nudged(own: TopLogprobs, start: int) -> TopLogprobs:
    values = own.logprobs.copy()
    values[start:, 3] = np.nextafter(values[start:, 3], np.float32(-100))
    return dataclasses.replace(own, logprobs=values)


def test_one_unit_in_the_last_place_is_seen_and_placed() -> None:
    accepted = [rows(0), rows(1), rows(2)]
    candidate = [rows(0), nudged(accepted[1], 7), nudged(accepted[2], 4)]
    found = compare_bits(accepted, candidate)
    assert found.first_affected == (None, 7, 4)
    assert found.earliest == (2, 4)
    assert found.share == (10 + 7 + 4) / 30
    same = compare_bits(accepted, accepted)
    assert (same.share, same.earliest) == (1.0, None)


def test_the_order_of_equal_logprobs_is_no_difference() -> None:
    own = rows(3)
    values = own.logprobs.copy()
    values[:, 5] = values[:, 4]
    tied = dataclasses.replace(own, logprobs=values)
    ids = tied.token_ids.copy()
    ids[:, [4, 5]] = ids[:, [5, 4]]
    assert identical_positions(tied, dataclasses.replace(tied, token_ids=ids)).all()
    ids[2, 4] = (set(range(60)) - set(ids[2].tolist())).pop()
    other = identical_positions(tied, dataclasses.replace(tied, token_ids=ids))
    assert np.flatnonzero(~other).tolist() == [2]


def test_swapped_unequal_ids_are_a_difference() -> None:
    own = rows(4)
    ids = own.token_ids.copy()
    ids[:, [0, 1]] = ids[:, [1, 0]]
    assert not identical_positions(own, dataclasses.replace(own, token_ids=ids)).any()


def test_another_width_is_a_difference() -> None:
    full = log_softmax(np.random.default_rng(0).normal(size=(4, 30)))
    assert not identical_positions(top(full, 10), top(full, 9)).any()


def test_other_shapes_are_refused() -> None:
    with pytest.raises(InvalidAnswerError, match="1 prompts where the accepted run has 2"):
        compare_bits([rows(0), rows(1)], [rows(0)])
    with pytest.raises(InvalidAnswerError, match="prompt 0: 9 positions where the accepted run has 10"):
        compare_bits([rows(0)], [rows(0, 9)])
    with pytest.raises(InvalidAnswerError, match="zero positions"):
        compare_bits([], [])
