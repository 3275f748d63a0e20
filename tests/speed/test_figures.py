"""Figures of a round against their definitions, computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_quantguard.stats.figures import FIGURES, RequestTiming, canonical, round_figures


def timing(sent: float, arrivals: list[float], error: str | None = None) -> RequestTiming:
    """One token per arrival."""
    counted = tuple((time, number) for number, time in enumerate(arrivals, 1))
    return RequestTiming(sent, counted, arrivals[-1] if arrivals else sent, 10, len(arrivals), error=error)


ROUND = [timing(0.0, [0.1, 0.2, 0.4]), timing(0.5, [0.8, 0.9, 1.0, 1.5]), timing(0.0, [], error="boom")]


def test_closed_forms() -> None:
    figures = round_figures(ROUND, 2.0)
    assert figures["duration"] == 2.0
    assert figures["request_throughput"] == 1.0
    assert figures["input_throughput"] == 10.0
    assert figures["output_throughput"] == 3.5
    assert figures["total_throughput"] == 13.5
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    assert figures["median_ttft_ms"] == pytest.approx(200)
    assert figures["p99_ttft_ms"] == pytest.approx(np.percentile([100, 300], 99))
    assert figures["mean_tpot_ms"] == pytest.approx((0.3 / 2 + 0.7 / 3) / 2 * 1000)
    assert figures["mean_itl_ms"] == pytest.approx(1000 * (0.1 + 0.2 + 0.1 + 0.1 + 0.5) / 5)
    assert figures["p90_itl_ms"] == pytest.approx(np.percentile([100, 200, 100, 100, 500], 90))
    assert figures["mean_e2e_latency_ms"] == pytest.approx((400 + 1000) / 2)
    assert "request_goodput" not in figures


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ({"ttft": 100.1}, 1),
        ({"ttft": 300.1}, 2),
        ({"ttft": 300.1, "itl": 250}, 1),
        ({"tpot": 150.1}, 1),
        ({"e2e_latency": 399}, 0),
    ],
)
def test_goodput_counts_requests_within_every_limit(slo: dict[str, float], good: int) -> None:
    figures = round_figures(ROUND, 2.0, slo_ms=slo)
    assert figures["request_goodput"] == good / 2
    assert figures["slo_attainment"] == pytest.approx(good / 3)


def test_answers_of_one_token_have_no_time_between_tokens() -> None:
    figures = round_figures([timing(0.0, [0.25])], 0.25)
    assert figures["p99_ttft_ms"] == 250
    assert not any("tpot" in name or "itl" in name for name in figures)


def test_every_figure_has_a_name_with_unit_and_direction() -> None:
    assert set(round_figures(ROUND, 2.0, slo_ms={"ttft": 1})) == set(FIGURES)


def test_the_duration_must_be_a_time() -> None:
    with pytest.raises(ValueError, match="lasts longer"):
        round_figures(ROUND, 0.0)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("ttft_p99_ms", "p99_ttft_ms"),
        ("e2e_latency_mean_ms", "mean_e2e_latency_ms"),
        ("output_tokens_per_s", "output_throughput"),
        ("input_tokens_per_s", "input_throughput"),
        ("requests_per_s", "request_throughput"),
        ("p99_ttft_ms", "p99_ttft_ms"),
        ("duration", "duration"),
    ],
)
def test_figures_may_be_written_figure_first(written: str, meant: str) -> None:
    assert canonical(written) == meant
    assert meant in FIGURES
