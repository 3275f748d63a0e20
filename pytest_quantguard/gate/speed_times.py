"""Takes the times of one scenario at one level: the candidate's rounds, and the reference's where needed.

The requests are sent by `measure/load/`; what the times mean is judged in `speed_judge.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytest_quantguard.config import ServerConfig, SglangServer
from pytest_quantguard.config_speed import Level, Replay, Scenario, SpeedConfig
from pytest_quantguard.errors import ConfigError, ServerError
from pytest_quantguard.gate.machine import fingerprint_of
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.measure.load.generator import Target
from pytest_quantguard.measure.load.rounds import Load
from pytest_quantguard.measure.load.workload import Workload, build_workload
from pytest_quantguard.serving.launch import RunningServer
from pytest_quantguard.serving.machine_state import MachineState, Watch
from pytest_quantguard.serving.transport import is_loopback

ROOM_FOR_BOTH = 0.95
"""Shares of the device memory that two servers may claim together."""


@dataclass(slots=True)
class Timed:
    """A cell that was timed.

    reference: with as many rounds, if it was measured; alone: the machine meanwhile, where it was not
    interleaved with the candidate. state: the machine during the candidate's rounds.
    """

    load: Load
    reference: Load | None
    alone: MachineState | None
    state: MachineState

    @property
    def paired(self) -> bool:
        """Whether the reference's rounds were interleaved."""
        return self.reference is not None and self.alone is None


class TooManyErrorsError(Exception):
    """A round had more failed requests than allowed: no further round is worth its time."""


def speed_config(trial: Trial) -> SpeedConfig:
    """The `speed` section, which a speed check has."""
    assert trial.config.speed is not None
    return trial.config.speed


def cell_name(name: str, level: Level) -> str:
    """How tests and records call a scenario at a level."""
    return f"{name}-{level}"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A cell that is warm and can be timed.

    beside: the reference, whose rounds alternate. before: the reference as it was measured alone. servers:
    those that run meanwhile.
    """

    load: Load
    beside: Load | None
    before: tuple[Load, MachineState] | None
    servers: tuple[RunningServer, ...]


def prepare_cell(trial: Trial, name: str, level: Level) -> Prepared:
    """Start what is needed, make the requests and warm up; the reference is measured now if it must be alone.

    Raises `QuantguardError` where that is not possible: server, replay file, context, file descriptors.
    """
    speed = speed_config(trial)
    together = _needs_reference(speed, name, level) and _side_by_side(trial, speed)
    alone = _needs_reference(speed, name, level) and not together
    before = _in_turn(trial)[name, level] if alone else None
    server = trial.server()
    server.check_alive()
    fingerprint_of(trial)
    load = _load(trial, server, trial.config.candidate, name, level)
    load.warm_up(speed.warmup_rounds, trial.progress)
    if not together:
        return Prepared(load, None, before, (server,))
    beside = _load(trial, trial.reference_server(), trial.config.reference, name, level)
    beside.warm_up(speed.warmup_rounds, trial.progress)
    return Prepared(load, beside, None, (server, trial.reference_server()))


def take_times(trial: Trial, prepared: Prepared, benchmark: Any) -> Timed:
    """The rounds, timed with pytest-benchmark's fixture; of the reference beside it one before each."""
    speed, load, beside = speed_config(trial), prepared.load, prepared.beside

    def before() -> None:
        trial.progress(
            f"{load.workload.scenario}, {load.concurrency} at a time: round {len(load.times) + 1} of "
            f"{speed.rounds}"
        )
        if beside is not None and not beside.broken(speed.allowed_errors):
            beside.prepare()
            beside.run()
        load.prepare()

    def measured() -> None:
        if not load.broken(speed.allowed_errors):
            load.run()
        if load.broken(speed.allowed_errors):
            raise TooManyErrorsError

    with _watch(trial, prepared.servers) as watch:
        try:
            benchmark.pedantic(measured, setup=before, rounds=speed.rounds, iterations=1, warmup_rounds=0)
        except TooManyErrorsError:
            prepared.servers[0].check_alive()
    assert watch.state is not None
    reference, alone = prepared.before or (beside, None)
    return Timed(load, reference, alone, watch.state)


def _watch(trial: Trial, servers: Sequence[RunningServer]) -> Watch:
    """Of the machine while these run. A server under a command of the user's own may be in a container, where
    what it uses cannot be told from what others use.
    """
    configs = trial.config.candidate, trial.config.reference
    known = all(getattr(config, "command", None) is None for config in configs)
    devices = [server.devices for server in servers if is_loopback(server.url)]
    return Watch(lambda: _own_seconds(servers) if known else None, devices=devices)


def _load(trial: Trial, server: RunningServer, config: ServerConfig | None, name: str, level: Level) -> Load:
    speed = speed_config(trial)
    assert config is not None
    workload = workload_of(trial, name)
    target = Target(
        server.url,
        api_key=config.api_key,
        request_timeout=config.request_timeout,
        stall_timeout=speed.stall_timeout,
    )
    slo = speed.slo.limits if speed.slo is not None else {}
    return Load(server.client, target, workload, workload.concurrency(level), slo, trial.progress)


def workload_of(trial: Trial, name: str) -> Workload:
    """The requests of a scenario; the same for candidate and reference."""

    def build() -> Workload:
        client, scenario = trial.server().client, speed_config(trial).scenario(name)
        if client.vocab_size is None and not isinstance(scenario, Replay):
            raise ServerError(
                f"The vocabulary size of the model at {client.url} is unknown, so no random prompts can be "
                "made: its config.json is not on this machine. Put the model where model_path says, or time "
                "a replay (speed.scenarios)."
            )
        workload = build_workload(
            scenario,
            seed=trial.config.suite.seed,
            vocab_size=client.vocab_size or 0,
            tokenize=client.tokenize,
            folder=trial.config_path.parent,
        )
        _require_context(workload, client.context_length, scenario)
        return workload

    return trial.once(("workload", name), build)


def _require_context(workload: Workload, context_length: int | None, scenario: Scenario) -> None:
    longest = max(len(request.input_ids) + request.output_tokens for request in workload.requests)
    if context_length is not None and longest > context_length:
        raise ConfigError(
            f"speed.scenarios: {workload.scenario} has a request of {longest} tokens, prompt and answer; the "
            f"server's context is {context_length}. "
            + ("Remove the line." if isinstance(scenario, Replay) else "Lower input_tokens or output_tokens.")
        )


def _in_turn(trial: Trial) -> dict[tuple[str, Level], tuple[Load, MachineState]]:
    """All cells of the reference, measured at once while the candidate is stopped."""

    def measure() -> dict[tuple[str, Level], tuple[Load, MachineState]]:
        speed, found = speed_config(trial), {}
        cells = [cell for cell in speed.cells() if _needs_reference(speed, *cell)]
        for name, _ in cells:
            workload_of(trial, name)  # Needs the candidate.
        with trial.reference_alone() as server:
            for name, level in cells:
                load = _load(trial, server, trial.config.reference, name, level)
                load.warm_up(speed.warmup_rounds, trial.progress)
                with _watch(trial, [server]) as watch:
                    while len(load.times) < speed.rounds and not load.broken(speed.allowed_errors):
                        load.prepare()
                        load.run()
                assert watch.state is not None
                found[name, level] = load, watch.state
        return found

    return trial.once("reference speed", measure)


def _side_by_side(trial: Trial, speed: SpeedConfig) -> bool:
    if speed.reference_rounds != "auto":
        return speed.reference_rounds == "interleaved"
    return fit_together(trial.config.candidate, trial.config.reference)


def fit_together(candidate: ServerConfig, reference: ServerConfig | None) -> bool:
    """Whether both servers can run at once: one of them runs anyway or needs no GPU, they have different
    GPUs, or say that they claim little enough of the memory.
    """
    if not isinstance(candidate, SglangServer) or not isinstance(reference, SglangServer):
        return True
    if candidate.devices and reference.devices:
        used = [set(",".join(config.devices or ()).split(",")) for config in (candidate, reference)]
        if not used[0] & used[1]:
            return True
    shares = [config.server_args.get("mem_fraction_static") for config in (candidate, reference)]
    known = [share for share in shares if isinstance(share, int | float)]
    return len(known) == 2 and sum(known) <= ROOM_FOR_BOTH


def _needs_reference(speed: SpeedConfig, name: str, level: Level) -> bool:
    scored = speed.score is not None and (
        str(level) in speed.score.weights and name in (speed.score.scenarios or [name])
    )
    return scored or speed.rules_of(name, level).min_speedup_vs_reference is not None


def _own_seconds(servers: Sequence[RunningServer]) -> float | None:
    used = [server.cpu_seconds() for server in servers]
    known = [seconds for seconds in used if seconds is not None]
    return sum(known) if len(known) == len(used) else None
