"""Student's t against printed tables and closed forms."""

from __future__ import annotations

import math

import pytest

from pytest_quantguard.stats.student import NORMAL, student_cdf, student_quantile


@pytest.mark.parametrize(
    ("probability", "degrees", "table"),
    [
        (0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 3, 3.182), (0.975, 10, 2.228), (0.975, 31, 2.040),
        (0.975, 60, 2.000), (0.8, 5, 0.920), (0.8, 30, 0.854), (0.995, 7, 3.499), (0.9995, 20, 3.850),
    ],
)  # fmt: skip
def test_quantiles_are_those_of_the_tables(probability: float, degrees: int, table: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(table, abs=6e-4)
    assert student_quantile(1 - probability, degrees) == pytest.approx(-table, abs=6e-4)


def test_closed_forms_of_one_and_two_degrees() -> None:
    for t in (-3.0, -0.2, 0.0, 1.0, 7.5):
        assert student_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-14)
        assert student_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-14)


def test_many_degrees_are_nearly_normal() -> None:
    assert student_quantile(0.975, 100_000) == pytest.approx(NORMAL.inv_cdf(0.975), abs=1e-4)
    assert student_quantile(0.5, 9) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("probability", "degrees"), [(0.0, 3), (1.0, 3), (0.5, 0)])
def test_impossible_arguments_are_refused(probability: float, degrees: int) -> None:
    with pytest.raises(ValueError, match="must"):
        student_quantile(probability, degrees)
