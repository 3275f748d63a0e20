"""How often the verdict against the accepted record is right, in simulated rounds.

    python -m tests.benchmarks.simulate_speed_verdicts [COMPARISONS]

Rounds scatter log-normally; each run as a whole is moved by what no round of it can show: by a drift that is
drawn anew for each run, or by the phase of a machine that stays in one of two states for some runs.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pytest_quantguard.stats.speed import decide_slowdown

ROUNDS, MAX_SLOWDOWN, MAX_SCATTER = 7, 0.05, 0.10
STATUSES = ("regressed", "inconclusive", "unchanged", "improved")


@dataclass(frozen=True)
class Machine:
    """scatter: standard deviation of rounds; drift: of runs. phase: how much longer the slow phase takes.
    stay: probability that the next run is in the same phase, 0.5 for runs that are far apart.
    """

    scatter: float
    drift: float = 0.0
    phase: float = 0.0
    stay: float = 0.85

    def __str__(self) -> str:
        between = f"{self.drift:.0%}" if self.drift else "none"
        if self.phase:
            between = f"by {self.phase:.0%}, in phases" + (", runs far apart" if self.stay == 0.5 else "")
        return f"{self.scatter:.0%} | {between}"

    def runs(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """Times of successive runs: (count, ROUNDS)."""
        levels = rng.normal(0, self.drift, count)
        if self.phase:
            changes = rng.random(count) > self.stay
            changes[0] = rng.random() < 0.5
            levels += np.log1p(self.phase) * (np.cumsum(changes) % 2)
        return np.exp(levels[:, None] + rng.normal(0, self.scatter, (count, ROUNDS)))


CONDITIONS = (
    (Machine(0.01), (1, 5)),
    (Machine(0.03), (1, 5)),
    (Machine(0.06), (1, 5)),
    (Machine(0.01, drift=0.02), (1, 3, 5, 10)),
    (Machine(0.03, drift=0.02), (1, 3, 5, 10)),
    (Machine(0.03, drift=0.07), (1, 3, 5, 10)),
    (Machine(0.03, phase=0.2), (1, 5, 10)),
    (Machine(0.03, phase=0.2, stay=0.5), (5, 10)),
)
"""And the numbers of runs in the record."""


def shares_of_verdicts(machine: Machine, recorded: int, factor: float, comparisons: int) -> dict[str, float]:
    """Status -> share of `comparisons` in which the candidate takes `factor` times as long as before."""
    rng = np.random.default_rng(1)
    found: Counter[str] = Counter()
    for _ in range(comparisons):
        *accepted, measured = machine.runs(recorded + 1, rng)
        found[
            decide_slowdown(
                accepted=[run.tolist() for run in accepted],
                measured=(factor * measured).tolist(),
                max_slowdown=MAX_SLOWDOWN,
                max_scatter=MAX_SCATTER,
            ).status
        ] += 1
    return {status: found[status] / comparisons for status in STATUSES}


def main(comparisons: int = 600) -> None:
    print("| rounds scatter | runs differ | runs in the record | time | " + " | ".join(STATUSES) + " |")
    print("|---|---|---|---|" + "---|" * len(STATUSES))
    for machine, records in CONDITIONS:
        for recorded in records:
            for factor, what in ((1.0, "the same"), (1.1, "10 % more")):
                shares = shares_of_verdicts(machine, recorded, factor, comparisons)
                cells = " | ".join(f"{shares[status]:.1%}" for status in STATUSES)
                print(f"| {machine} | {recorded} | {what} | {cells} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
