"""Log-probabilities, the best K and drawing, against definitions in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pytest_quantguard.emulator.sampling import log_normalizer, sample, score_rows, top_tokens

LOGITS = hnp.arrays(
    np.float32,
    st.integers(1, 60),
    elements=st.one_of(
        st.floats(-50, 50, width=32),
        st.sampled_from([0.0, -0.0, 1.0, float("-inf"), float("nan"), float("inf")]),
    ),
)


@given(LOGITS, st.data())
def test_top_tokens_are_a_stable_sort(logits: np.ndarray, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(logits)))
    worth = [(-np.inf if np.isnan(value) else float(value)) for value in logits]
    isnan = np.isnan(logits)
    expected = sorted(range(len(logits)), key=lambda i: (isnan[i], -worth[i], i))[:k]
    assert top_tokens(logits, k).tolist() == expected


@settings(max_examples=50)
@given(hnp.arrays(np.float32, (3, 20), elements=st.floats(-80, 80, width=32)))
def test_scores_are_the_log_softmax(logits: np.ndarray) -> None:
    exact = logits.astype(np.float64)
    exact = (
        exact
        - exact.max(1, keepdims=True)
        - np.log(np.exp(exact - exact.max(1, keepdims=True)).sum(1, keepdims=True))
    )
    scores = score_rows(logits, np.array([0, 5, 19]), 4)
    np.testing.assert_allclose(scores.target, exact[range(3), [0, 5, 19]], atol=2e-5)
    np.testing.assert_allclose(scores.top, -np.sort(-exact, axis=1)[:, :4], atol=2e-5)
    np.testing.assert_allclose(scores.part(1, 3, 2, logits, (7,)).selected[:, 0], exact[1:, 7], atol=2e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_logits_show(bad: float) -> None:
    logits = np.zeros((2, 8), np.float32)
    logits[1, 3] = bad
    with np.errstate(all="ignore"):
        assert np.isfinite(log_normalizer(logits)).tolist() == [True, False]
        assert np.isnan(score_rows(logits, np.array([0, 3]), 8).target).tolist() == [False, True]


def draws(logits: list[float], count: int, top_p: float = 1.0, top_k: int = -1) -> np.ndarray:
    generator = np.random.default_rng(0)
    values = np.array(logits, np.float32)
    found = [sample(values, top_p, top_k, generator) for _ in range(count)]
    return np.bincount(found, minlength=len(logits)) / count


def test_drawing_follows_the_distribution() -> None:
    probabilities = np.array([0.05, 0.5, 0.15, 0.3])
    drawn = draws(np.log(probabilities).tolist(), 20000)
    np.testing.assert_allclose(drawn, probabilities, atol=4 * np.sqrt(0.25 / 20000))


def test_top_k_and_top_p_cut_the_tail() -> None:
    logits = np.log([0.05, 0.5, 0.15, 0.3]).tolist()
    assert (draws(logits, 500, top_k=2) > 0).tolist() == [False, True, False, True]
    assert (draws(logits, 500, top_p=0.75) > 0).tolist() == [False, True, False, True]
    assert (draws(logits, 500, top_p=0.45) > 0).tolist() == [False, True, False, False]
    assert (draws(logits, 500, top_k=1) > 0).tolist() == [False, True, False, False]
