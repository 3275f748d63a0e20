"""Speed checks whose rounds take what the test says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_quantguard.measure.load.generator import Round, Target
from pytest_quantguard.measure.load.workload import Workload
from pytest_quantguard.stats.figures import RequestTiming

if TYPE_CHECKING:
    from tests.plugin.conftest import Project

SCENARIO = {"kind": "decode_heavy", "input_tokens": 8, "output_tokens": 4, "requests": 4}
SPEED: dict[str, Any] = {
    "rounds": 5,
    "warmup_rounds": 1,
    "levels": [1, "max"],
    "scenarios": [SCENARIO],
    "max_scatter": 100,
}


def cells(project: Project) -> dict[str, Any]:
    """Speed checks of result.json by id."""
    return {check["id"]: check for check in project.result()["checks"] if check["kind"] == "speed"}


def verdicts(check: dict[str, Any]) -> dict[str, str]:
    return {verdict["against"]: verdict["status"] for verdict in check["speed"]["verdicts"]}


@dataclass
class Paced:
    """A project whose rounds take the seconds that the test says, within 1 %, whatever the machine does."""

    project: Project
    candidate: float = 1.0
    reference: float = 1.0
    rounds: int = 0
    cached_tokens: int = 0

    def run_round(self, target: Target, workload: Workload, *_: object, **__: object) -> Round:
        """In place of sending requests."""
        self.rounds += 1
        seconds = self.candidate if target.url == self.project.config["candidate"]["url"] else self.reference
        duration = seconds * (1 + 0.01 * (self.rounds % 3 - 1))
        answer = RequestTiming(0.0, ((duration / 2, 1), (duration, 4)), duration, 8, 4, self.cached_tokens)
        return Round((answer,) * len(workload.requests), duration)
