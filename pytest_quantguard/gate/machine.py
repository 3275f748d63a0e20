"""Which machine answers in a trial: its fingerprint, and the part of it that numbers depend on."""

from __future__ import annotations

from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.serving.fingerprint import Fingerprint, device_of, read_fingerprint
from pytest_quantguard.serving.launch import RunningServer


def read_machine(server: RunningServer) -> Fingerprint:
    """The facts of a server and of what it runs on."""
    return read_fingerprint(server.capabilities, server.url, server.devices)


def fingerprint_of(trial: Trial) -> Fingerprint:
    """The facts that the candidate's times depend on."""
    return trial.once(("fingerprint", "candidate"), lambda: read_machine(trial.server()))


def known_fingerprint(trial: Trial) -> dict[str, Fingerprint]:
    """The fingerprint under its name in results, if anything asked for it."""
    known = list(trial.known("fingerprint").values())
    return {"fingerprint": known[0]} if known else {}


def candidate_device(trial: Trial) -> str | None:
    """What the candidate's answers were computed on; None where that is not known."""
    return device_of(fingerprint_of(trial))
