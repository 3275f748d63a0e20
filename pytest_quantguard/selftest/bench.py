"""The bench on which candidates are tried: one emulator in which faults are switched, and a fresh trial for
each of them over the same baseline and the same accepted run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from pytest_quantguard.baseline.recording import Recording
from pytest_quantguard.config import EmulatorServer
from pytest_quantguard.errors import QuantguardError, ServerDiedError
from pytest_quantguard.gate.judge import judge
from pytest_quantguard.gate.machine import candidate_device
from pytest_quantguard.gate.plan import Check
from pytest_quantguard.gate.trial import Progress, Trial, TrialOptions
from pytest_quantguard.gate.verdicts import without_figures
from pytest_quantguard.measure.capture import accept
from pytest_quantguard.results import CheckResult
from pytest_quantguard.selftest.plan import SelftestPlan, shuffle_prompts
from pytest_quantguard.serving.launch import RunningServer, start

FAULTS_ROUTE = "/quantguard/faults"


@dataclass(slots=True)
class Bench:
    """Holds the server; a context manager that stops it.

    accepted: what drift is judged against, once known.
    """

    plan: SelftestPlan
    config_path: Path
    output: Path
    progress: Progress
    accepted: Recording | None = None
    _server: RunningServer | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def trial(self, faults: Sequence[str] = (), *, shuffle: int = 0) -> Trial:
        """A trial of the candidate with these faults and no others switched on. shuffle: the seed of the
        order in which prompts are asked; 0 is the suite's own.
        """
        server = self._server_with(faults)
        trial = Trial(self.plan.config, self.config_path, TrialOptions(self.output), self.progress)
        trial.once("server", lambda: server)
        baseline, accepted = self.plan.baseline, self.accepted
        trial.once("baseline", lambda: shuffle_prompts(baseline, shuffle))
        if accepted is not None:
            trial.once("accepted", lambda: shuffle_prompts(accepted, shuffle))
        return trial

    def accept(self, trial: Trial) -> Recording:
        """What a clean trial measured, as the accepted run of this bench."""
        return accept(
            [measurement for (_, warm, _), measurement in trial.measured().items() if not warm],
            config=self.plan.config,
            capabilities=trial.server().capabilities,
            device=candidate_device(trial),
            baseline=trial.baseline(),
        )

    def _server_with(self, faults: Sequence[str]) -> RunningServer:
        server = self._alive()
        server.client.transport.post(
            FAULTS_ROUTE, {"faults": list(faults)}, what=f"POST {FAULTS_ROUTE} {', '.join(faults) or 'none'}"
        )
        return server

    def _alive(self) -> RunningServer:
        """The server; another one where it has died."""
        if self._server is not None:
            try:
                self._server.check_alive()
            except ServerDiedError:
                self.progress("the server died of the last fault and is started again")
                self._server.stop()
                self._server = None
        if self._server is None:
            candidate = self.plan.config.candidate
            assert isinstance(candidate, EmulatorServer)
            self._server = self._stack.enter_context(
                start(candidate, log_path=self.output / "server.log", progress=self.progress)
            )
        return self._server


def judge_stages(trial: Trial, stages: Sequence[Sequence[Check]]) -> Iterator[list[CheckResult]]:
    """The results of each stage, in turn: a caller that has seen enough stops asking.

    A check that could not be judged is an "error", as in a gate, with its reason as the message and the
    class of the reason as `extra["error"]`.
    """
    for stage in stages:
        yield [_judge(trial, check) for check in stage]


def _judge(trial: Trial, check: Check) -> CheckResult:
    try:
        return judge(trial, check)
    except QuantguardError as error:
        return without_figures(check, "error", str(error), {"error": type(error).__name__})
