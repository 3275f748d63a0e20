"""What a self-test found, as plain models: written as JSON, read by the table. Nothing here judges."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pytest_quantguard.results import Kind, Outcome, Result

Status = Literal["caught", "warned", "missed", "not_tried"]
"""warned: the gate only warns of it and stays green."""
KindStatus = Literal["caught", "warned", "missed", "unusable", "not_measured"]
"""What the checks of one kind made of a fault. unusable: there were no answers that they could judge, because
others had refused them or the server had died. not_measured: the fault had been caught before their turn."""


class FaultCheck(Result):
    """One check of the gate with a fault switched on; message: its first line."""

    id: str
    kind: Kind
    outcome: Outcome
    value: float | None = None
    bound: float | None = None
    message: str = ""


class Effect(Result):
    """What the fault did to the answers, whether a check saw it or not: against the clean candidate.

    identical_share: of the rows that were measured, how many are equal bit by bit. kl_from_clean: the largest
    mean KL(clean || faulty) of a cell. kl_clean, kl_faulty: mean KL from BF16 in that cell.
    """

    identical_share: float
    cell: str
    kl_from_clean: float
    kl_clean: float
    kl_faulty: float


class FaultResult(Result):
    """One fault on trial.

    kinds: by kind of check. first_check: the first in the gate's order that fails. advice: of a fault that
    was missed, why, and what would catch it. note: how it was tried, if not by default. complete: whether
    every check was judged, or the fault was dropped once an absolute bound had caught it.
    """

    specification: str
    name: str
    severity: str
    summary: str
    shows_in: str
    source: str
    must_catch: bool
    status: Status
    kinds: dict[Kind, KindStatus] = Field(default_factory=dict)
    first_check: str | None = None
    first_message: str | None = None
    failed_checks: int = 0
    judged_checks: int = 0
    diagnosis: list[str] = Field(default_factory=list)
    effect: Effect | None = None
    advice: str | None = None
    note: str | None = None
    complete: bool = True
    seconds: float = 0.0
    checks: list[FaultCheck] = Field(default_factory=list)


class CleanRun(Result):
    """One run without faults. order: how the prompts were asked."""

    order: str
    checks: int
    alarms: list[FaultCheck]
    seconds: float


class SelftestPlanResult(Result):
    """What was asked."""

    prompts: int
    suite_prompts: int
    positions: int
    cells: list[str]
    chunked_prefill_size: int | None
    accepted_run: Literal["stored", "made from the clean candidate", "not asked for"]
    stops_early: bool
    notes: list[str]


class SelftestResult(Result):
    """The whole of a self-test."""

    schema_version: Literal[1] = 1
    name: str
    config_path: str
    candidate: str
    baseline_path: str
    plan: SelftestPlanResult
    clean: list[CleanRun]
    faults: list[FaultResult]
    seconds: float

    @property
    def alarms(self) -> list[FaultCheck]:
        """Every false alarm of the clean runs."""
        return [alarm for run in self.clean for alarm in run.alarms]

    @property
    def tried(self) -> list[FaultResult]:
        """Faults that were switched on."""
        return [fault for fault in self.faults if fault.status != "not_tried"]

    @property
    def must_catch_missed(self) -> list[FaultResult]:
        """Marked faults that the gate would let pass."""
        return [fault for fault in self.tried if fault.must_catch and fault.status != "caught"]

    @property
    def passed(self) -> bool:
        """No marked fault missed, no false alarm."""
        return not self.must_catch_missed and not self.alarms

    def caught_by_severity(self) -> dict[str, tuple[int, int]]:
        """severity -> (caught, tried), worst first."""
        return {
            severity: (sum(fault.status == "caught" for fault in group), len(group))
            for severity in ("catastrophic", "clear", "subtle", "none")
            if (group := [fault for fault in self.tried if fault.severity == severity])
        }
