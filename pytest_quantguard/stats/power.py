"""How small a change a suite can see, and whether two sets of yes/no answers differ."""

from __future__ import annotations

import math

from pytest_quantguard.stats.student import student_quantile


def smallest_detectable_change(
    *, standard_error: float, clusters: int, alpha: float = 0.05, power: float = 0.8
) -> float:
    """The smallest true change that a two-sided test at `alpha` finds with probability `power`.

        (t[1 - alpha/2, n - 1] + t[power, n - 1]) * SE        n: clusters (prompts)

    the "minimum detectable effect" of Bloom (1995), Evaluation Review 19(5), with the clustered standard
    error of the value (against a fixed bound) or of the paired difference (drift). In the value's unit.
    """
    if standard_error < 0 or not math.isfinite(standard_error):
        raise ValueError(f"standard_error must be finite and not negative, not {standard_error}")
    if clusters < 2:
        raise ValueError(f"one prompt says nothing about how prompts differ: clusters is {clusters}, need 2")
    if not 0 < alpha < 1 or not 0 < power < 1:
        raise ValueError(f"alpha and power must lie between 0 and 1, not {alpha} and {power}")
    degrees = clusters - 1
    return (student_quantile(1 - alpha / 2, degrees) + student_quantile(power, degrees)) * standard_error


def mcnemar_exact(*, lost: int, won: int) -> float:
    """Two-sided exact p-value for paired yes/no answers.

    lost: right before, wrong after. won: wrong before, right after. Under no change each of the n = lost +
    won flips goes either way with probability 1/2: p = min(1, 2 * P(Binomial(n, 1/2) <= min(lost, won))).
    (McNemar 1947; the exact form as in Agresti, Categorical Data Analysis, section 10.1.)
    """
    if lost < 0 or won < 0:
        raise ValueError(f"flips cannot be negative: lost {lost}, won {won}")
    flips = lost + won
    tail = sum(math.comb(flips, k) for k in range(min(lost, won) + 1))
    return min(1.0, float(2 * tail / 2**flips))
