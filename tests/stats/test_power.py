"""Detectable change against a simulation and a table; McNemar against enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from pytest_quantguard.stats.power import mcnemar_exact, smallest_detectable_change
from pytest_quantguard.stats.student import student_quantile


def test_many_clusters_give_the_textbook_multiple() -> None:
    """(1.960 + 0.842) standard errors."""
    assert smallest_detectable_change(standard_error=0.01, clusters=100_000) == pytest.approx(
        0.02802, abs=1e-5
    )
    assert smallest_detectable_change(standard_error=0.0, clusters=8) == 0.0


def test_a_change_of_that_size_is_found_four_times_in_five() -> None:
    rng = np.random.default_rng(0)
    clusters, repetitions = 20, 20_000
    size = smallest_detectable_change(standard_error=1 / math.sqrt(clusters), clusters=clusters)
    samples = rng.normal(size=(repetitions, clusters)) + size
    t = samples.mean(axis=1) / (samples.std(axis=1, ddof=1) / math.sqrt(clusters))
    found = np.mean(np.abs(t) > student_quantile(0.975, clusters - 1))
    assert found == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"standard_error": -1.0, "clusters": 5}, "standard_error must be finite and not negative"),
        ({"standard_error": math.nan, "clusters": 5}, "standard_error must be finite and not negative"),
        ({"standard_error": 1.0, "clusters": 1}, "one prompt says nothing"),
        ({"standard_error": 1.0, "clusters": 5, "power": 1.0}, "alpha and power must lie between 0 and 1"),
    ],
)
def test_impossible_arguments_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        smallest_detectable_change(**options)


def test_mcnemar_equals_the_enumeration_of_all_outcomes() -> None:
    for flips in range(1, 11):
        outcomes = [sum(sides) for sides in itertools.product((0, 1), repeat=flips)]
        for lost in range(flips + 1):
            extreme = abs(lost - flips / 2)
            exact = sum(abs(heads - flips / 2) >= extreme for heads in outcomes) / len(outcomes)
            assert mcnemar_exact(lost=lost, won=flips - lost) == pytest.approx(exact)


def test_mcnemar_of_known_cases() -> None:
    assert mcnemar_exact(lost=0, won=0) == 1.0
    assert mcnemar_exact(lost=6, won=0) == 2 / 64
    assert mcnemar_exact(lost=3, won=3) == 1.0
    assert mcnemar_exact(lost=900, won=1100) == pytest.approx(8.4e-6, rel=0.05)
    with pytest.raises(ValueError, match="flips cannot be negative"):
        mcnemar_exact(lost=-1, won=2)
