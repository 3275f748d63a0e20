"""Which machine answers in a trial: its fingerprint, and the part of it that numbers depend on."""

from __future__ import annotations

from pytest_quantguard.config import ServerConfig, SglangServer
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.serving.fingerprint import Fingerprint, device_of, read_fingerprint
from pytest_quantguard.serving.launch import RunningServer


def read_machine(server: RunningServer, config: ServerConfig, worker: int) -> Fingerprint:
    """The facts of the server of `config`, as the xdist worker of this number started it."""
    devices = config.devices if isinstance(config, SglangServer) else None
    return read_fingerprint(server.capabilities, server.url, devices[worker] if devices else None)


def fingerprint_of(trial: Trial) -> Fingerprint:
    """The facts that the candidate's times depend on."""
    return trial.once(
        ("fingerprint", "candidate"),
        lambda: read_machine(trial.server(), trial.config.candidate, trial.options.worker),
    )


def known_fingerprint(trial: Trial) -> dict[str, Fingerprint]:
    """The fingerprint under its name in results, if anything asked for it."""
    known = list(trial.known("fingerprint").values())
    return {"fingerprint": known[0]} if known else {}


def candidate_device(trial: Trial) -> str | None:
    """What the candidate's answers were computed on; None where that is not known."""
    return device_of(fingerprint_of(trial))
