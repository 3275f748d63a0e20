"""Every divergence against definitions, closed forms and the full vocabulary."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pytest_quantguard.errors import InvalidAnswerError
from pytest_quantguard.logprobs.arrays import TopLogprobs
from pytest_quantguard.logprobs.divergence import Divergence, compare

from . import scalar
from .distributions import Float64, as_dict, log_softmax, top, true_js, true_kl

seeds = st.integers(0, 2**32 - 1)
COLUMNS = [field.name for field in dataclasses.fields(Divergence) if field.name not in ("prompt", "position")]


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings(), np.errstate(all="raise", under="ignore"):
        warnings.simplefilter("error")
        yield


def random_pair(
    seed: int, vocab: int, *, rows: int = 5, sharpness: float = 2.0, noise: float = 0.5
) -> tuple[Float64, Float64]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, vocab)) * sharpness
    return log_softmax(logits), log_softmax(logits + rng.normal(size=logits.shape) * noise)


def rows_of(probabilities: list[list[float]], ids: list[list[int]], vocab: int) -> TopLogprobs:
    tokens = np.array(ids, np.int32)
    return TopLogprobs(
        token_ids=tokens,
        logprobs=np.log(np.array(probabilities)).astype(np.float32),
        chosen_ids=np.zeros(len(ids), np.int32),
        vocab_size=vocab,
        chosen_logprobs=np.full(len(ids), np.nan, np.float32),
    )


@settings(max_examples=60)
@given(
    seed=seeds,
    vocab=st.integers(2, 60),
    k=st.integers(1, 60),
    narrower=st.integers(0, 8),
    sharpness=st.sampled_from([0.1, 1.0, 4.0, 15.0]),
    noise=st.sampled_from([0.0, 0.05, 1.0, 20.0]),
    known=st.booleans(),
)
def test_equals_the_scalar_definitions(
    seed: int, vocab: int, k: int, narrower: int, sharpness: float, noise: float, known: bool
) -> None:
    p, q = random_pair(seed, vocab, sharpness=sharpness, noise=noise)
    k = min(k, vocab)
    chosen = np.random.default_rng(seed).integers(vocab, size=5).astype(np.int32)
    baseline, candidate = top(p, k, chosen), top(q, max(1, k - narrower), chosen)
    if not known:
        nothing = np.full(5, np.nan, np.float32)
        candidate = dataclasses.replace(candidate, chosen_logprobs=nothing, chosen_ids=_outside(candidate))
        baseline = dataclasses.replace(baseline, chosen_ids=candidate.chosen_ids)
    found = compare(baseline, candidate)
    for t in range(5):
        a, b = as_dict(baseline, t), as_dict(candidate, t)
        bucket, _ = scalar.kl_bounds(a, b, vocab)
        assert found.kl_bucket[t] == pytest.approx(max(bucket, 0), abs=1e-9, rel=1e-9)
        token = int(chosen[t])
        both = (token, float(baseline.chosen_logprobs[t]), float(candidate.chosen_logprobs[t]))
        bucket, priced = scalar.kl_bounds(a, b, vocab, both if known else None)
        assert found.kl[t] == pytest.approx(max(bucket, priced, 0), abs=1e-9, rel=1e-9)
        uniform = max(scalar.kl_uniform(a, b, vocab), 0)
        assert found.kl_uniform[t] == pytest.approx(uniform, abs=1e-9, rel=1e-9)
        assert found.js[t] == pytest.approx(scalar.js(a, b), abs=1e-9, rel=1e-9)
        assert found.cosine[t] == pytest.approx(scalar.cosine(a, b), abs=1e-12)
        assert found.captured_mass_baseline[t] == pytest.approx(sum(np.exp(list(a.values()))), abs=1e-12)
        assert found.captured_mass_candidate[t] == pytest.approx(sum(np.exp(list(b.values()))), abs=1e-12)
        missing = sum(np.exp(value) for token, value in a.items() if token not in b)
        assert found.missing_mass[t] == pytest.approx(missing, abs=1e-12)
        assert found.agreement[t] == (int(p[t].argmax()) == int(q[t].argmax()))
        if not known:
            continue
        assert found.probability_shift[t] == pytest.approx(
            math.exp(q[t, token]) - math.exp(p[t, token]), abs=1e-5
        )
        assert found.log_probability_drop[t] == pytest.approx(p[t, token] - q[t, token], abs=1e-4)


def _outside(rows: TopLogprobs) -> np.ndarray:
    """Per row an id that is not in its top-K (or any, where all are)."""
    missing = [set(range(rows.vocab_size)) - set(row.tolist()) for row in rows.token_ids]
    return np.array([min(ids) if ids else 0 for ids in missing], np.int32)


logits = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 4), st.integers(2, 40)),
    elements=st.one_of(
        st.sampled_from([-300.0, -80.0, -20.0, 0.0, 0.0, 20.0, 80.0]), st.floats(-30, 30, allow_nan=False)
    ),
)


@settings(max_examples=400)
@given(first=logits, seed=seeds, k=st.integers(1, 40), other_k=st.integers(1, 40), data=st.data())
def test_never_exceeds_the_true_divergence(
    first: Float64, seed: int, k: int, other_k: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    kind = data.draw(st.sampled_from(["unrelated", "permuted", "scaled", "flat", "nudged", "one moved"]))
    second = {
        "unrelated": rng.normal(size=first.shape) * 10,
        "permuted": rng.permuted(first, axis=1),
        "scaled": first * rng.uniform(-2, 4),
        "flat": np.zeros_like(first),
        "nudged": first + rng.normal(size=first.shape) * 0.01,
        "one moved": first + 40 * (np.arange(first.shape[1]) == rng.integers(first.shape[1])),
    }[kind]
    p, q = log_softmax(first), log_softmax(second)
    vocab = p.shape[1]
    chosen = rng.integers(vocab, size=p.shape[0]).astype(np.int32)
    baseline, candidate = top(p, min(k, vocab), chosen), top(q, min(other_k, vocab), chosen)
    found = compare(baseline, candidate)
    truth, true_middle = true_kl(p, q), true_js(p, q)
    # float32 log-probabilities of magnitude x carry x * 6e-8.
    assert (found.kl <= truth + 1e-6 + 1e-6 * truth).all()
    assert (found.kl >= found.kl_bucket - 1e-6).all()
    assert (found.kl_bucket >= 0).all()
    untold = np.full(chosen.shape, np.nan, np.float32)
    less = compare(baseline, dataclasses.replace(candidate, chosen_logprobs=untold))
    assert (found.kl >= less.kl - 1e-6).all()
    assert (found.js <= true_middle + 2e-5).all()
    assert (found.js >= 0).all()
    assert (found.js <= math.log(2)).all()
    assert (found.cosine >= 0).all()
    assert (found.cosine <= 1 + 1e-12).all()
    if min(k, vocab) == min(other_k, vocab) == vocab:
        assert found.kl == pytest.approx(truth, abs=2e-5, rel=1e-5)
        assert found.js == pytest.approx(true_middle, abs=2e-5)


@settings(max_examples=100)
@given(values=logits, k=st.integers(1, 40))
@example(values=np.zeros((1, 40)), k=4)
@example(values=np.array([[300.0] + [0.0] * 9]), k=4)
def test_identical_rows_diverge_by_exactly_nothing(values: Float64, k: int) -> None:
    rows = top(log_softmax(values), min(k, values.shape[1]))
    found = compare(rows, rows)
    for name in (
        "kl",
        "kl_bucket",
        "kl_uniform",
        "missing_mass",
        "probability_shift",
        "log_probability_drop",
    ):
        assert (getattr(found, name) == 0).all(), name
    assert found.js == pytest.approx(0, abs=1e-15)
    assert found.cosine == pytest.approx(1, abs=1e-12)
    assert found.agreement.all()
    assert not found.confident_flip.any()


def test_closed_forms_of_two_coins() -> None:
    p, q = 0.75, 0.5
    found = compare(rows_of([[p, 1 - p]], [[0, 1]], 2), rows_of([[q, 1 - q]], [[1, 0]], 2))
    assert found.kl[0] == pytest.approx(p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)), abs=1e-6)
    middle = 0.5 * (p + q)
    js = 0.5 * sum(
        x * math.log(x / m) for x, m in ((p, middle), (1 - p, 1 - middle), (q, middle), (1 - q, 1 - middle))
    )
    assert found.js[0] == pytest.approx(js, abs=1e-6)
    assert found.cosine[0] == pytest.approx(
        (p * q + (1 - p) * (1 - q)) / math.hypot(p, 1 - p) / math.hypot(q, q)
    )


def test_closed_forms_of_disjoint_tops() -> None:
    """A and B share nothing: the bucket sees nothing, the price of A - B is at most m_Q each."""
    found = compare(rows_of([[0.5, 0.3]], [[0, 1]], 10), rows_of([[0.6, 0.1]], [[2, 3]], 10))
    assert found.kl_bucket[0] == 0
    priced = 0.5 * math.log(0.5 / 0.1) + 0.3 * math.log(0.3 / 0.1) + 0.2 * math.log(0.2 / 1.0)
    assert found.kl[0] == pytest.approx(priced, abs=1e-6)
    assert found.missing_mass[0] == pytest.approx(0.8, abs=1e-6)
    each_p, each_q = 0.2 / 8, 0.3 / 8
    uniform = 0.5 * math.log(0.5 / each_q) + 0.3 * math.log(0.3 / each_q)
    uniform += each_p * (math.log(each_p / 0.6) + math.log(each_p / 0.1) + 6 * math.log(each_p / each_q))
    assert found.kl_uniform[0] == pytest.approx(uniform, abs=1e-5)
    assert found.cosine[0] == 0
    assert not found.agreement[0]


@pytest.mark.parametrize(("shared", "bucket_below"), [(0, 0.1), (1, 0.6)])
def test_a_dead_output_layer_is_seen_where_one_bucket_hides_it(shared: int, bucket_below: float) -> None:
    """All logits equal: the candidate's top-K is an arbitrary set, so next to nothing is shared."""
    rng = np.random.default_rng(4)
    vocab, k = 49152, 256
    p = log_softmax(rng.gumbel(size=(40, vocab)) * 1.05)
    q = np.full_like(p, -math.log(vocab))
    baseline = top(p, k)
    likely = baseline.token_ids[:, 3 : 3 + shared]
    ids = [_distinct([*kept, *rng.permutation(vocab)], k) for kept in likely.tolist()]
    candidate = dataclasses.replace(top(q, k, baseline.chosen_ids), token_ids=np.array(ids, np.int32))
    found = compare(baseline, candidate)
    truth = float(true_kl(p, q).mean())
    assert 4 < truth < 6
    assert found.kl_bucket.mean() < bucket_below
    assert 0.6 * truth < found.kl.mean() <= truth


def _distinct(ids: list[int], k: int) -> list[int]:
    return list(dict.fromkeys(ids))[:k]


@settings(max_examples=30)
@given(seed=seeds)
def test_order_within_a_row_does_not_matter(seed: int) -> None:
    p, q = random_pair(seed, 50)
    baseline = top(p, 12)
    candidate = top(q, 10, baseline.chosen_ids)
    rng = np.random.default_rng(seed)

    def shuffled(rows: TopLogprobs) -> TopLogprobs:
        order = np.argsort(rng.random(rows.token_ids.shape), axis=1)
        return dataclasses.replace(
            rows,
            token_ids=np.take_along_axis(rows.token_ids, order, axis=1),
            logprobs=np.take_along_axis(rows.logprobs, order, axis=1),
        )

    plain, mixed = compare(baseline, candidate), compare(shuffled(baseline), shuffled(candidate))
    for name in COLUMNS:
        assert getattr(mixed, name) == pytest.approx(getattr(plain, name), abs=1e-12), name


def test_tied_first_tokens_agree_in_any_order() -> None:
    tied = rows_of([[0.4, 0.4, 0.1]], [[7, 3, 1]], 20)
    turned = rows_of([[0.4, 0.4, 0.1]], [[3, 7, 1]], 20)
    third = rows_of([[0.8, 0.1, 0.05]], [[3, 1, 7]], 20)
    other = rows_of([[0.8, 0.1, 0.05]], [[1, 3, 7]], 20)
    assert compare(tied, turned).agreement[0]
    assert compare(tied, third).agreement[0]
    assert not compare(tied, other).agreement[0]
    assert not compare(tied, other).confident_flip[0], "a tie is no confident choice"


@pytest.mark.parametrize(("first", "second", "flip"), [(0.5, 0.25, True), (0.4, 0.25, False)])
def test_a_flip_is_confident_above_the_margin(first: float, second: float, flip: bool) -> None:
    baseline = rows_of([[first, second]], [[0, 1]], 5)
    moved = rows_of([[first, second]], [[1, 0]], 5)
    assert compare(baseline, moved).confident_flip[0] == flip
    assert not compare(baseline, baseline).confident_flip[0]


def test_the_reference_token_is_looked_up_where_the_server_did_not_say() -> None:
    rows = rows_of([[0.5, 0.25], [0.5, 0.25], [0.5, 0.25]], [[0, 1], [0, 1], [0, 1]], 5)
    rows = dataclasses.replace(rows, chosen_ids=np.array([1, 4, 4], np.int32))
    told = dataclasses.replace(rows, chosen_logprobs=np.log([0.25, 0.01, np.nan]).astype(np.float32))
    found = compare(told, told)
    assert np.isnan(found.probability_shift).tolist() == [False, False, True]
    half = compare(told, rows)
    assert np.isnan(half.probability_shift).tolist() == [False, True, True]
    assert half.log_probability_drop[0] == pytest.approx(0, abs=1e-6)


def test_a_stated_reference_token_outside_the_top_sharpens_the_bound() -> None:
    """P is sure of token 0, which Q puts far below its top-2: only the stated probability tells how far."""
    baseline = dataclasses.replace(
        rows_of([[0.9, 0.05]], [[0, 1]], 10), chosen_logprobs=np.log(np.float32([0.9]))
    )
    candidate = rows_of([[0.6, 0.2]], [[2, 3]], 10)
    told = dataclasses.replace(candidate, chosen_logprobs=np.log(np.float32([1e-8])))
    untold_bound = 0.9 * math.log(0.9 / 0.2) + 0.05 * math.log(0.05 / 0.2) + 0.05 * math.log(0.05)
    assert compare(baseline, candidate).kl[0] == pytest.approx(untold_bound, abs=1e-6)
    told_bound = 0.9 * math.log(0.9 / 1e-8) + 0.05 * math.log(0.05 / 0.2) + 0.05 * math.log(0.05)
    assert compare(baseline, told).kl[0] == pytest.approx(told_bound, abs=1e-5)
    assert compare(baseline, told).kl_uniform[0] == compare(baseline, candidate).kl_uniform[0]


def test_a_narrower_candidate_is_compared_with_what_came() -> None:
    p, q = random_pair(1, 300, rows=20)
    baseline = top(p, 64)
    wide, narrow = (
        compare(baseline, top(q, 64, baseline.chosen_ids)),
        compare(baseline, top(q, 16, baseline.chosen_ids)),
    )
    assert (narrow.baseline_width, narrow.candidate_width) == (64, 16)
    assert (narrow.missing_mass > wide.missing_mass).all()
    assert (narrow.kl <= true_kl(p, q) + 1e-5).all()
    assert narrow.kl.mean() > 0.5 * wide.kl.mean()


def test_rows_are_independent_of_their_neighbours() -> None:
    """Blocks, table rows and stamps must not leak from one position into another."""
    p, q = random_pair(2, 90, rows=200)
    baseline = top(p, 20)
    candidate = top(q, 20, baseline.chosen_ids)
    together = compare(baseline, candidate)
    for t in range(200):
        alone = compare(_row(baseline, t), _row(candidate, t))
        for name in COLUMNS:
            whole = getattr(together, name)
            assert np.array_equal(
                np.atleast_1d(whole)[t] if np.ndim(whole) else whole, np.ravel(getattr(alone, name))[0]
            )


def _row(rows: TopLogprobs, t: int) -> TopLogprobs:
    part = slice(t, t + 1)
    return TopLogprobs(
        rows.token_ids[part],
        rows.logprobs[part],
        rows.chosen_ids[part],
        rows.vocab_size,
        rows.chosen_logprobs[part],
    )


def test_masses_above_one_by_rounding_are_harmless() -> None:
    """A float32 softmax may sum to 1 + 1e-6."""
    values = np.array([[0.9, 0.1 + 1e-6]])
    found = compare(rows_of(values.tolist(), [[0, 1]], 100), rows_of([[0.9, 0.1]], [[0, 1]], 100))
    assert found.kl[0] == pytest.approx(0, abs=2e-6)
    assert found.kl_uniform[0] == pytest.approx(0, abs=2e-6)


def _changed(rows: TopLogprobs, **changes: object) -> TopLogprobs:
    return dataclasses.replace(rows, **changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: _changed(rows, vocab_size=49), r"vocabulary has 49 entries, the baseline's 50"),
        (lambda rows: _row(rows, 0), "the candidate has 1 positions where the baseline has 5"),
        (
            lambda rows: _changed(rows, chosen_ids=rows.chosen_ids + 1),
            "at position 0 the candidate scored token",
        ),
        (
            lambda rows: _changed(rows, logprobs=np.where(rows.logprobs < -3, np.nan, rows.logprobs)),
            "non-finite",
        ),
        (
            lambda rows: _changed(rows, logprobs=np.where(rows.logprobs < -3, -np.inf, rows.logprobs)),
            "non-finite",
        ),
        (lambda rows: _changed(rows, token_ids=rows.token_ids + 40), "outside its vocabulary of 50"),
        (lambda rows: _changed(rows, token_ids=rows.token_ids - 40), "outside its vocabulary of 50"),
    ],
)
def test_meaningless_comparisons_are_refused(change: object, message: str) -> None:
    baseline = top(random_pair(3, 50)[0], 10)
    with pytest.raises(InvalidAnswerError, match=message):
        compare(baseline, change(baseline))


def test_zero_positions_are_refused() -> None:
    rows = top(random_pair(3, 50)[0], 10)
    empty = TopLogprobs(
        rows.token_ids[:0], rows.logprobs[:0], rows.chosen_ids[:0], rows.vocab_size, rows.chosen_logprobs[:0]
    )
    with pytest.raises(InvalidAnswerError, match="zero positions"):
        compare(empty, empty)
    with pytest.raises(InvalidAnswerError, match="no prompt was compared"):
        Divergence.concatenate([])


def test_concatenate_numbers_prompts_and_keeps_positions() -> None:
    first, second = (top(random_pair(seed, 50, rows=rows)[0], 10) for seed, rows in ((0, 3), (1, 4)))
    one, two = compare(first, first), compare(second, second)
    joined = Divergence.concatenate([one, two])
    assert joined.prompt.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert joined.position.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert joined.positions == 7
    assert joined.prompts == 2
    again = Divergence.concatenate([joined, two])
    assert again.prompt.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    part = joined.select(joined.prompt == 1)
    assert part.prompt.tolist() == [1] * 4
    assert part.kl.shape == (4,)
