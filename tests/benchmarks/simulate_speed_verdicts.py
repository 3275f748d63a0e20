"""How often the verdict against the accepted record is right, in simulated rounds.

    python -m tests.benchmarks.simulate_speed_verdicts [RUNS]

Rounds scatter log-normally; each run as a whole is moved by a drift that no round of it can show.
"""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np

from pytest_quantguard.stats.speed import decide_slowdown

ROUNDS, MAX_SLOWDOWN, MAX_SCATTER = 7, 0.05, 0.10
STATUSES = ("regressed", "inconclusive", "unchanged", "improved")
CONDITIONS = ((0.01, 0.0), (0.03, 0.0), (0.06, 0.0), (0.01, 0.02), (0.03, 0.02))
"""Standard deviations of rounds, and of runs."""


def share_of_verdicts(noise: float, drift: float, factor: float, runs: int) -> dict[str, float]:
    """Status -> share of `runs` in which the candidate takes `factor` times as long."""
    rng = np.random.default_rng(1)
    found: Counter[str] = Counter()
    for _ in range(runs):
        accepted, measured = (np.exp(rng.normal(0, noise, ROUNDS) + rng.normal(0, drift)) for _ in range(2))
        found[
            decide_slowdown(
                accepted=accepted.tolist(),
                measured=(factor * measured).tolist(),
                max_slowdown=MAX_SLOWDOWN,
                max_scatter=MAX_SCATTER,
            ).status
        ] += 1
    return {status: found[status] / runs for status in STATUSES}


def main(runs: int = 600) -> None:
    print("| rounds scatter | runs drift | time | " + " | ".join(STATUSES) + " |")
    print("|---|---|---|" + "---|" * len(STATUSES))
    for noise, drift in CONDITIONS:
        for factor, what in ((1.0, "the same"), (1.1, "10 % more")):
            shares = share_of_verdicts(noise, drift, factor, runs)
            cells = " | ".join(f"{shares[status]:.1%}" for status in STATUSES)
            print(f"| {noise:.0%} | {drift:.0%} | {what} | {cells} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
