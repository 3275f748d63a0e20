"""The definitions of the divergences, one position at a time in plain Python: slow and obviously right."""

from __future__ import annotations

import math
from collections.abc import Mapping

ROUNDING = 1e-6


def kl_bounds(
    p: Mapping[int, float],
    q: Mapping[int, float],
    vocab: int,
    reference: tuple[int, float, float] | None = None,
) -> tuple[float, float]:
    """(bucket, priced); p and q map the top-K ids to natural log-probabilities.

    reference: a token and its log-probabilities in p and q, which then count as known on both sides.
    """
    smallest, least_p = min(q.values()), min(p.values())
    if reference is not None:
        token, log_p, log_q = reference
        p = {token: min(log_p, least_p), **p}
        q = {token: min(log_q, smallest), **q}
    shared = set(p) & set(q)
    rest_p = 1 - sum(math.exp(p[x]) for x in shared) if len(shared) < vocab else 0.0
    rest_q = 1 - sum(math.exp(q[x]) for x in shared) if len(shared) < vocab else 0.0
    unseen_p = 1 - sum(math.exp(v) for v in p.values()) if len(p) < vocab else 0.0
    common = sum(math.exp(p[x]) * (p[x] - q[x]) for x in shared)
    missing = sum(math.exp(p[x]) * (p[x] - smallest) for x in p if x not in q)
    return common + lump(rest_p, rest_q), common + missing + lump(unseen_p, rest_q)


def lump(p: float, q: float) -> float:
    return p * math.log(p / (max(q, 0.0) + ROUNDING)) if p > 0 else 0.0


def kl_uniform(p: Mapping[int, float], q: Mapping[int, float], vocab: int) -> float:
    full_p, full_q = spread(p, vocab), spread(q, vocab)
    return sum(math.exp(a) * (a - b) for a, b in zip(full_p, full_q, strict=True))


def spread(top: Mapping[int, float], vocab: int) -> list[float]:
    """Log-probabilities of the whole vocabulary, the unseen mass shared out evenly."""
    hidden = vocab - len(top)
    unseen = max(1 - sum(math.exp(v) for v in top.values()), ROUNDING)
    return [top[x] if x in top else math.log(unseen / hidden) for x in range(vocab)]


def js_term(a: float, b: float) -> float:
    m = (a + b) / 2
    return sum(0.5 * x * math.log(x / m) for x in (a, b) if x > 0)


def js(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    a = {x: math.exp(v) for x, v in p.items()}
    b = {x: math.exp(v) for x, v in q.items()}
    shared = set(a) & set(b)
    common = sum(js_term(a[x], b[x]) for x in shared)
    rest_a, rest_b = 1 - sum(a[x] for x in shared), 1 - sum(b[x] for x in shared)
    bucket = common + js_term(max(rest_a, ROUNDING), max(rest_b, ROUNDING))
    priced = common
    priced += sum(js_term(a[x], min(a[x], min(b.values()))) for x in a if x not in b)
    priced += sum(js_term(b[x], min(b[x], min(a.values()))) for x in b if x not in a)
    return max(bucket, priced)


def cosine(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    ids = set(p) | set(q)
    a = [math.exp(p[x]) if x in p else 0.0 for x in ids]
    b = [math.exp(q[x]) if x in q else 0.0 for x in ids]
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
