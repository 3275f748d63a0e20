"""The registry of metrics: names, aggregates, intervals and paired changes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pytest_quantguard.errors import InvalidAnswerError
from pytest_quantguard.logprobs.buckets import by_position, by_task
from pytest_quantguard.logprobs.divergence import Divergence, compare
from pytest_quantguard.logprobs.metrics import METRICS, metric_change, metric_intervals

from .distributions import log_softmax, top


def divergence(
    *, prompts: int = 8, rows: int = 20, noise: float = 0.5, seed: int = 0, k: int = 30
) -> Divergence:
    parts = []
    for prompt in range(prompts):
        rng = np.random.default_rng([seed, prompt])
        logits = rng.normal(size=(rows, 200)) * 3
        baseline = top(log_softmax(logits), k)
        moved = log_softmax(logits + np.random.default_rng([9, prompt]).normal(size=logits.shape) * noise)
        parts.append(compare(baseline, top(moved, k, baseline.chosen_ids)))
    return Divergence.concatenate(parts)


def test_aggregates_are_numpys() -> None:
    found = divergence()
    expected = {
        "kl_mean": found.kl.mean(),
        "kl_median": np.median(found.kl),
        "kl_p90": np.quantile(found.kl, 0.9),
        "kl_p95": np.quantile(found.kl, 0.95),
        "kl_p99": np.quantile(found.kl, 0.99),
        "kl_p999": np.quantile(found.kl, 0.999),
        "kl_max": found.kl.max(),
        "kl_uniform_mean": found.kl_uniform.mean(),
        "js_mean": found.js.mean(),
        "cosine_mean": found.cosine.mean(),
        "cosine_p01": np.quantile(found.cosine, 0.01),
        "cosine_min": found.cosine.min(),
        "agreement": np.count_nonzero(found.agreement) / found.positions,
        "confident_flips": np.count_nonzero(found.confident_flip) / found.positions,
        "probability_shift_mean": found.probability_shift.mean(),
        "probability_shift_rms": np.sqrt((found.probability_shift**2).mean()),
        "log_perplexity_ratio": found.log_probability_drop.mean(),
        "captured_mass_baseline_min": found.captured_mass_baseline.min(),
        "captured_mass_candidate_mean": found.captured_mass_candidate.mean(),
        "missing_mass_max": found.missing_mass.max(),
    }
    aggregates = found.aggregates()
    assert set(aggregates) == set(METRICS)
    for name, value in expected.items():
        assert found.aggregate(name) == aggregates[name] == pytest.approx(float(value), rel=1e-12), name


def test_every_metric_says_what_it_is() -> None:
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.better in ("lower", "higher")
        assert metric.unit in ("nats", "share", "probability", "1")
        assert metric.description
        assert metric.limits[0] <= divergence(prompts=2).aggregate(name) <= metric.limits[1]


def test_unknown_reference_tokens_leave_the_count_and_then_the_metric_out() -> None:
    found = divergence()
    shift = found.probability_shift.copy()
    shift[::2] = np.nan
    half = dataclasses.replace(found, probability_shift=shift)
    assert METRICS["probability_shift_mean"].known(half) == found.positions / 2
    assert half.aggregate("probability_shift_mean") == pytest.approx(found.probability_shift[1::2].mean())
    none = dataclasses.replace(found, probability_shift=np.full_like(shift, np.nan))
    with pytest.raises(InvalidAnswerError, match="probability_shift_mean: none of 160 positions has a value"):
        none.aggregate("probability_shift_mean")
    assert "probability_shift_mean" not in none.aggregates()
    assert metric_intervals(none, ["probability_shift_mean"]) == {"probability_shift_mean": None}


def test_intervals_hold_the_value_and_stay_within_limits() -> None:
    found = divergence(prompts=12)
    for name, interval in metric_intervals(found, resamples=400).items():
        assert interval is not None
        low, high = METRICS[name].limits
        assert low <= interval.low <= found.aggregate(name) <= interval.high <= high, name
        assert interval.value == pytest.approx(found.aggregate(name))


def test_one_prompt_has_no_interval() -> None:
    intervals = metric_intervals(divergence(prompts=1), ["kl_mean", "kl_p99", "agreement"])
    assert intervals == {"kl_mean": None, "kl_p99": None, "agreement": None}


def test_a_change_is_paired_by_position() -> None:
    """Two per cent more noise is far inside the interval of either run, and plain in the change."""
    before, after = divergence(noise=0.5, prompts=16), divergence(noise=0.51, prompts=16)
    single = metric_intervals(before, ["kl_mean"])["kl_mean"]
    assert single is not None
    assert after.aggregate("kl_mean") in single
    change = metric_change(before, after, "kl_mean")
    assert change.change == pytest.approx(after.aggregate("kl_mean") - before.aggregate("kl_mean"))
    assert change.significant
    assert change.direction("lower") == "worse"
    assert change.relative == pytest.approx(0.04, abs=0.01)
    nothing = metric_change(before, before, "kl_mean")
    assert (nothing.change, nothing.significant) == (0, False)


def test_a_change_between_other_positions_is_refused() -> None:
    with pytest.raises(InvalidAnswerError, match="do not cover the same positions"):
        metric_change(divergence(prompts=2), divergence(prompts=3), "kl_mean")
    found = divergence(prompts=2)
    unknown = dataclasses.replace(found, probability_shift=np.full(found.positions, np.nan))
    with pytest.raises(InvalidAnswerError, match="no position has a value in both"):
        metric_change(found, unknown, "probability_shift_mean")


def test_buckets_by_position_cover_each_position_once() -> None:
    found = divergence(prompts=2, rows=140)
    parts = by_position(found)
    assert list(parts) == ["0-15", "16-63", "64-127", "128-"]
    assert [part.positions for part in parts.values()] == [32, 96, 128, 24]
    assert parts["16-63"].position.min() == 16
    assert parts["16-63"].position.max() == 63
    weighted = sum(part.aggregate("kl_mean") * part.positions for part in parts.values()) / found.positions
    assert weighted == pytest.approx(found.aggregate("kl_mean"))
    assert list(by_position(divergence(rows=10))) == ["0-15"]


def test_buckets_by_task_keep_the_prompts() -> None:
    found = divergence(prompts=3, rows=5)
    parts = by_task(found, ["mcq", "qa", "mcq"])
    assert list(parts) == ["mcq", "qa"]
    assert parts["mcq"].prompt.tolist() == [0] * 5 + [2] * 5
    assert parts["qa"].kl.tolist() == found.kl[5:10].tolist()
    with pytest.raises(ValueError, match="prompt 2 has no task: only 2 are given"):
        by_task(found, ["mcq", "qa"])
