"""Every divergence against definitions, closed forms and the full vocabulary."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_quantguard.logprobs.divergence import compare

from . import scalar
from .distributions import as_dict, log_softmax, top, true_js, true_kl

seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings(), np.errstate(all="raise", under="ignore"):
        warnings.simplefilter("error")
        yield


@settings(deadline=None, max_examples=60)
@given(
    seed=seeds,
    vocab=st.integers(2, 60),
    k=st.integers(2, 60),
    narrower=st.integers(0, 8),
    sharpness=st.sampled_from([0.1, 1.0, 4.0, 15.0]),
    noise=st.sampled_from([0.0, 0.05, 1.0, 20.0]),
)
def test_equals_the_scalar_definitions(
    seed: int, vocab: int, k: int, narrower: int, sharpness: float, noise: float
) -> None:
    rng = np.random.default_rng(seed)
    k = min(k, vocab)
    logits = rng.normal(size=(5, vocab)) * sharpness
    p = log_softmax(logits)
    q = log_softmax(logits + rng.normal(size=logits.shape) * noise)
    baseline = top(p, k)
    candidate = top(q, max(2, k - narrower), baseline.chosen_ids)
    found = compare(baseline, candidate)
    for t in range(5):
        a, b = as_dict(baseline, t), as_dict(candidate, t)
        bucket, priced = scalar.kl_bounds(a, b, vocab)
        assert found.kl_bucket[t] == pytest.approx(max(bucket, 0), abs=1e-9, rel=1e-9)
        assert found.kl[t] == pytest.approx(max(bucket, priced, 0), abs=1e-9, rel=1e-9)
        if len(a) < vocab and len(b) < vocab:
            assert found.kl_uniform[t] == pytest.approx(
                max(scalar.kl_uniform(a, b, vocab), 0), abs=1e-9, rel=1e-9
            )
        assert found.js[t] == pytest.approx(scalar.js(a, b), abs=1e-9, rel=1e-9)
        assert found.cosine[t] == pytest.approx(scalar.cosine(a, b), abs=1e-12)
        assert found.captured_mass_baseline[t] == pytest.approx(sum(np.exp(list(a.values()))), abs=1e-12)
        missing = sum(np.exp(value) for token, value in a.items() if token not in b)
        assert found.missing_mass[t] == pytest.approx(missing, abs=1e-12)
    bound = 1e-5
    assert (found.kl <= true_kl(p, q) + bound).all()
    assert (found.js <= true_js(p, q) + bound).all()
