"""Kills a process of a running gate at a random moment of its life, and looks whether anything of it is left.

    python -m tests.integration.killing --kills 12 --seed 0

A gate is a real `pytest --quantguard-config` in a process of its own, with a real SGLang server as candidate.
Everything that it starts is known by being its descendant, at any time of its life, and is killed and looked
for by process id.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.integration.gating import STORED_BASELINE, STORED_SUITE, as_yaml
from tests.integration.real_sglang.server import ensure_installed, server_config

MOMENTS = {
    "starting": "",
    "loading": r"Load weight begin|Init parallel",
    "warming up": r"Uvicorn running",
    "measuring": r"POST /flush_cache",
    "stopping": r"SIGTERM received",
}
"""Moment of a life -> what the server's log says when it begins."""
LONGEST_DELAY = {"starting": 8.0, "loading": 4.0, "warming up": 3.0, "measuring": 5.0, "stopping": 1.5}
"""Seconds after its beginning within which the kill falls, evenly distributed."""
VICTIMS = ("pytest", "supervisor", "server", "scheduler")
PATIENCE = 300.0
GONE_WITHIN = 60.0


@dataclass(frozen=True)
class Outcome:
    """What became of one killed gate. left: pids that still ran `GONE_WITHIN` seconds later."""

    victim: str
    moment: str
    delay: float
    processes: int
    seconds_until_gone: float
    left: tuple[int, ...]
    exit_code: int

    def __str__(self) -> str:
        left = f"left: {list(self.left)}" if self.left else "nothing left"
        return (
            f"{self.victim:<10} {self.delay:4.1f} s into {self.moment:<10} {self.processes:2} processes, "
            f"gone after {self.seconds_until_gone:4.1f} s, pytest's exit code {self.exit_code:3}, {left}"
        )


class Family:
    """A process and all that ever descended from it, orphans included."""

    def __init__(self, pid: int) -> None:
        self.root = psutil.Process(pid)
        self.seen: dict[int, psutil.Process] = {pid: self.root}

    def observe(self) -> list[psutil.Process]:
        """Those that live now."""
        living = []
        for process in list(self.seen.values()):
            with contextlib.suppress(psutil.Error):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    living.append(process)
                    for child in process.children(recursive=True):
                        self.seen.setdefault(child.pid, child)
        return living

    def find(self, role: str) -> psutil.Process | None:
        """The living process of that role."""
        for process in self.observe():
            with contextlib.suppress(psutil.Error):
                if _role(process, self.root) == role:
                    return process
        return None


def kill_during(
    folder: Path, candidate: dict[str, Any], *, victim: str, moment: str, delay: float
) -> Outcome:
    """Start a gate in `folder`, wait for the moment, kill the victim (SIGKILL), wait for the rest to go."""
    config = {
        "version": 1,
        "name": "killed",
        "candidate": candidate,
        "baseline": str(STORED_BASELINE),
        "suite": STORED_SUITE,
        "accuracy": {"kl_mean": {"max": 1.0}},
        "speed": None,
    }
    (folder / "killed.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with (folder / "output.txt").open("w", encoding="utf-8") as output:
        gate = subprocess.Popen(
            [sys.executable, "-m", "pytest", "--quantguard-config=killed.yaml", "-q"],
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    family = Family(gate.pid)
    log = folder / ".quantguard" / "killed" / "server.log"
    try:
        _until(family, lambda: family.find("server") is not None and _reached(log, moment), gate)
        _rest(family, delay)
        found = family.find(victim)
        if found is None and moment != "stopping":
            _until(family, lambda: family.find(victim) is not None, gate)
            found = family.find(victim)
        (found or family.root).send_signal(signal.SIGKILL)
        killed = time.monotonic()
        while family.observe() and time.monotonic() < killed + GONE_WITHIN:
            gate.poll()
            time.sleep(0.02)
        seconds = time.monotonic() - killed
        left = tuple(process.pid for process in family.observe())
    finally:
        for process in family.observe():
            process.kill()
        gate.wait()
    named = victim if found is not None else "pytest"
    return Outcome(named, moment, delay, len(family.seen), seconds, left, gate.returncode)


def draw(random_source: random.Random, kills: int) -> list[tuple[str, str, float]]:
    """(victim, moment, delay) of each kill: every moment and every victim in turn, at a random delay."""
    moments = list(MOMENTS)
    offset = random_source.randrange(len(VICTIMS))
    plan = []
    for number in range(kills):
        moment = moments[number % len(moments)]
        victim = VICTIMS[(number + offset) % len(VICTIMS)]
        plan.append((victim, moment, round(random_source.uniform(0, LONGEST_DELAY[moment]), 2)))
    return plan


def _role(process: psutil.Process, root: psutil.Process) -> str:
    if process.pid == root.pid:
        return "pytest"
    words = " ".join(process.cmdline())
    if "pytest_quantguard.serving.supervisor" in words:
        return "supervisor"
    if "scheduler" in words:
        return "scheduler"
    return "server" if "launch_server" in words and "multiprocessing" not in words else "helper"


def _reached(log: Path, moment: str) -> bool:
    return (
        log.exists()
        and re.search(MOMENTS[moment], log.read_text(errors="replace", encoding="utf-8")) is not None
    )


def _until(family: Family, happened: Callable[[], bool], gate: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        family.observe()
        if gate.poll() is not None:
            raise AssertionError(f"the gate ended by itself with exit code {gate.returncode} before the kill")
        if time.monotonic() > deadline:
            raise AssertionError(f"the moment of the kill did not come within {PATIENCE:g} s")
        time.sleep(0.05)


def _rest(family: Family, seconds: float) -> None:
    """Wait, and go on looking at who is there."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        family.observe()
        time.sleep(0.05)


def main() -> int:
    """Kill gates one after the other and print what became of each; exit code 1 if anything was left."""
    from pytest_quantguard.emulator.models import resolve_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    candidate = as_yaml(
        server_config(
            ensure_installed(), resolve_model("smollm2-135m"), server_args={"disable_radix_cache": True}
        )
    )
    left = 0
    for victim, moment, delay in draw(random.Random(options.seed), options.kills):
        with tempfile.TemporaryDirectory() as folder:
            outcome = kill_during(Path(folder), candidate, victim=victim, moment=moment, delay=delay)
        print(outcome, flush=True)
        left += len(outcome.left)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
