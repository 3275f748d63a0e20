"""Speed of the comparison and of the intervals, as ratios and times of one run (nothing is asserted on time).

OMP_NUM_THREADS=1 pytest -m benchmark_suite tests/benchmarks/test_bench_logprobs.py -s
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from pytest_quantguard.logprobs.arrays import TopLogprobs
from pytest_quantguard.logprobs.divergence import Divergence, compare
from pytest_quantguard.logprobs.guards import check_rows
from pytest_quantguard.logprobs.metrics import METRICS, metric_intervals

pytestmark = pytest.mark.benchmark_suite

POSITIONS, WIDTH, VOCAB = 4096, 256, 151_936
PROMPTS = 32


def fastest(*actions: Callable[[], object], repeats: int = 9) -> list[float]:
    """Seconds of each action's fastest run; they take turns, so that a busy machine slows all alike."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(repeats):
        for action, taken in zip(actions, times, strict=True):
            start = time.perf_counter()
            action()
            taken.append(time.perf_counter() - start)
    return [min(taken) for taken in times]


def recordings() -> tuple[TopLogprobs, TopLogprobs]:
    """Two servers whose logits differ by noise: about nine in ten of the top-K ids are shared."""
    rng = np.random.default_rng(0)
    support = 2 * WIDTH
    ids = (rng.integers(VOCAB, size=(POSITIONS, 1)) + np.arange(support) * 4093) % VOCAB
    logits = -1.2 * np.log(np.arange(1, support + 1)) + rng.normal(size=(POSITIONS, support)) * 0.5
    return tuple(_top(ids, logits + rng.normal(size=logits.shape) * noise) for noise in (0.0, 0.2))


def _top(ids: npt.NDArray[np.int64], logits: npt.NDArray[np.float64]) -> TopLogprobs:
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    order = np.argsort(-logprobs, axis=1)[:, :WIDTH]
    return TopLogprobs(
        token_ids=np.take_along_axis(ids, order, axis=1).astype(np.int32),
        logprobs=np.take_along_axis(logprobs, order, axis=1).astype(np.float32),
        chosen_ids=ids[:, 0].astype(np.int32),
        vocab_size=VOCAB,
        chosen_logprobs=logprobs[:, 0].astype(np.float32),
    )


def plain_kl(baseline: TopLogprobs, candidate: TopLogprobs) -> npt.NDArray[np.float64]:
    """Nothing but kl, vectorised over whole arrays, with one dense scratch row for the look-up."""
    scratch = np.full(VOCAB, -1, np.int64)
    columns = np.arange(WIDTH)
    place = np.empty((POSITIONS, WIDTH), np.int64)
    for row in range(POSITIONS):
        ids = candidate.token_ids[row]
        scratch[ids] = columns
        place[row] = scratch[baseline.token_ids[row]]
        scratch[ids] = -1
    shared = place >= 0
    log_p = baseline.logprobs.astype(np.float64)
    log_q = np.take_along_axis(candidate.logprobs, place, axis=1).astype(np.float64)
    p = np.exp(log_p)
    p_shared = np.where(shared, p, 0.0)
    rest_p = np.maximum(1 - p_shared.sum(axis=1), 1e-12)
    rest_q = np.maximum(1 - np.where(shared, np.exp(log_q), 0.0).sum(axis=1), 1e-6)
    unseen = np.maximum(1 - p.sum(axis=1), 1e-12)
    ratio = log_p - log_q
    bucket = (p_shared * ratio).sum(axis=1) + rest_p * np.log(rest_p / rest_q)
    priced = (p * ratio).sum(axis=1) + unseen * np.log(unseen / rest_q)
    return np.maximum(np.maximum(bucket, priced), 0.0)


def test_all_metrics_against_a_plain_kl() -> None:
    baseline, candidate = recordings()
    assert compare(baseline, candidate).kl == pytest.approx(plain_kl(baseline, candidate), abs=1e-5)
    plain, arrays, everything = fastest(
        lambda: plain_kl(baseline, candidate),
        lambda: compare(baseline, candidate),
        lambda: compare(baseline, candidate).aggregates(),
    )
    print(
        f"\n{POSITIONS} x {WIDTH} of {VOCAB}: plain kl {plain * 1e3:.0f} ms; all arrays "
        f"{arrays * 1e3:.0f} ms ({arrays / plain:.2f} x); with all {len(METRICS)} metrics "
        f"{everything * 1e3:.0f} ms ({everything / plain:.2f} x)"
    )


def test_prompt_by_prompt_against_all_at_once() -> None:
    baseline, candidate = recordings()
    pairs = [(_part(baseline, i), _part(candidate, i)) for i in range(PROMPTS)]
    whole, parts = fastest(
        lambda: compare(baseline, candidate),
        lambda: Divergence.concatenate([compare(*pair) for pair in pairs]),
    )
    print(f"\n{PROMPTS} prompts one by one: {parts * 1e3:.0f} ms, {parts / whole:.2f} x all at once")


def test_guards_against_the_comparison() -> None:
    baseline, candidate = recordings()
    parts = [_part(candidate, i) for i in range(PROMPTS)]
    names, spans = [str(i) for i in range(PROMPTS)], [part.chosen_ids for part in parts]
    found = check_rows(parts, prompt_ids=names, reference_ids=spans, cell="prefill-bs1")
    assert found == []
    guards, whole = fastest(
        lambda: check_rows(parts, prompt_ids=names, reference_ids=spans, cell="prefill-bs1"),
        lambda: compare(baseline, candidate),
    )
    print(f"\nguards of {PROMPTS} prompts: {guards * 1e3:.0f} ms, {guards / whole:.2f} x the comparison")


def _part(rows: TopLogprobs, prompt: int) -> TopLogprobs:
    size = POSITIONS // PROMPTS
    span = slice(prompt * size, (prompt + 1) * size)
    return TopLogprobs(
        rows.token_ids[span], rows.logprobs[span], rows.chosen_ids[span], VOCAB, rows.chosen_logprobs[span]
    )


def test_intervals() -> None:
    baseline, candidate = recordings()
    size = POSITIONS // PROMPTS
    parts = [compare(_part(baseline, i), _part(candidate, i)) for i in range(PROMPTS)]
    found = Divergence.concatenate([*parts, *parts])
    eight = ("kl_mean", "kl_median", "kl_p95", "kl_p99", "kl_max", "cosine_mean", "agreement", "js_mean")
    some, every = fastest(lambda: metric_intervals(found, eight), lambda: metric_intervals(found))
    print(
        f"\n2,000 resamples of {found.prompts} prompts x {size} positions: {some * 1e3:.0f} ms for "
        f"8 metrics, {every * 1e3:.0f} ms for all {len(METRICS)}"
    )
