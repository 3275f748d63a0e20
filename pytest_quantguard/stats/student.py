"""Student's t and normal quantiles (there is no scipy here)."""

from __future__ import annotations

import math
from statistics import NormalDist

NORMAL = NormalDist()


def student_cdf(t: float, degrees: int) -> float:
    """P(T <= t) for Student's T with a whole number of degrees of freedom.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4 (finite trigonometric sums).
    """
    if degrees < 1:
        raise ValueError(f"degrees of freedom must be at least 1, not {degrees}")
    angle = math.atan2(t, math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    if degrees % 2 == 0:
        term = total = 1.0
        for i in range(1, degrees // 2):
            term *= cosine * cosine * (2 * i - 1) / (2 * i)
            total += term
        inside = sine * total
    else:
        term = cosine
        total = cosine if degrees > 1 else 0.0
        for i in range(1, (degrees - 1) // 2):
            term *= cosine * cosine * (2 * i) / (2 * i + 1)
            total += term
        inside = 2 / math.pi * (angle + sine * total)
    return 0.5 + inside / 2


def student_quantile(probability: float, degrees: int) -> float:
    """The t with P(T <= t) = probability, by bisection to about 1e-12."""
    if not 0 < probability < 1:
        raise ValueError(f"probability must lie between 0 and 1, not {probability}")
    if probability < 0.5:
        return -student_quantile(1 - probability, degrees)
    low, high = 0.0, 1.0
    while student_cdf(high, degrees) < probability:
        high *= 2
    while high - low > 1e-12 * max(1.0, high):
        middle = (low + high) / 2
        if student_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2
