"""What a result keeps for its report: the right places, bounded in size."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_quantguard.baseline.recording import CellKey
from pytest_quantguard.gate.details import EDGES, _along_span, _counts, worst_places
from pytest_quantguard.logprobs.divergence import Divergence


def divergence(kl: np.ndarray) -> Divergence:
    """kl: float64 [prompts, positions]."""
    prompts, positions = kl.shape
    flat, ones = kl.reshape(-1), np.ones(kl.size)
    return Divergence(
        prompt=np.repeat(np.arange(prompts), positions),
        position=np.tile(np.arange(positions), prompts),
        kl=flat,
        kl_bucket=flat,
        kl_uniform=flat,
        js=flat,
        cosine=ones,
        agreement=flat < 1,
        confident_flip=flat > 2,
        probability_shift=ones,
        log_probability_drop=ones,
        captured_mass_baseline=ones,
        captured_mass_candidate=ones,
        missing_mass=ones,
        baseline_width=4,
        candidate_width=4,
    )


@pytest.mark.parametrize("prompts", [2, 5, 40])
def test_worst_places_are_those_of_a_search_by_hand(prompts: int) -> None:
    values = np.random.default_rng(prompts).exponential(size=(2, prompts, 12))
    keys = CellKey("prefill", 1), CellKey("decode", 8)
    places = worst_places({key: divergence(kl) for key, kl in zip(keys, values, strict=True)})
    worst = values.max(axis=0)
    best_of_prompt = {(row, int(worst[row].argmax())): worst[row].max() for row in range(prompts)}
    firsts = sorted(best_of_prompt, key=lambda place: -best_of_prompt[place])[:10]
    rest = sorted(
        ((row, at) for row in range(prompts) for at in range(12) if (row, at) not in firsts),
        key=lambda place: -worst[place],
    )
    chosen = {*firsts, *rest[: 10 - len(firsts)]}
    assert {place for place, _ in places} == chosen
    found = [worst[place] for place, _ in places]
    assert found == sorted(found, reverse=True)
    for place, key in places:
        assert values[keys.index(key)][place] == worst[place]


@pytest.mark.parametrize("length", [1, 7, 32, 33, 1000])
def test_parts_cover_the_span_once_and_weigh_right(length: int) -> None:
    kl = np.random.default_rng(length).exponential(size=(3, length))
    parts = _along_span(divergence(kl))
    assert len(parts) <= 32
    assert [part.begin for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == length
    for part in parts:
        assert part.kl_mean == pytest.approx(kl[:, part.begin : part.end].mean())
        assert part.agreement == pytest.approx((kl[:, part.begin : part.end] < 1).mean())


def test_no_position_falls_out_of_the_histogram() -> None:
    kl = np.array([0.0, 1e-9, 2e-6, 1.0, 99.0, 1e5])
    counts = _counts(kl)
    assert sum(counts) == kl.size
    assert (counts[0], counts[-1]) == (2, 2)
    at = int(np.searchsorted(EDGES, 2e-6)) - 1
    assert counts[at] >= 1
