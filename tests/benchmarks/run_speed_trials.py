"""False and true alarms of the speed verdict on this machine: many runs of one emulator, each a new process.

    python -m tests.benchmarks.run_speed_trials OUTPUT.json [CLEAN_RUNS] [SLOW_RUNS] [SECONDS]

Every clean run (nothing changed) and every slow run, in which the emulator pauses for 10 % of each step, is
held against records of clean runs: of the one, the five and the ten before it, and of five and ten that are
spread over the whole trial. The raw rounds go to OUTPUT.json, the table to standard output. Takes some
minutes; after SECONDS it stops, and goes on when called again. The rules are those of the gate.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pytest_quantguard.config import EmulatorServer
from pytest_quantguard.config_speed import DecodeHeavy
from pytest_quantguard.measure.load.generator import Target
from pytest_quantguard.measure.load.rounds import Load
from pytest_quantguard.measure.load.workload import build_workload
from pytest_quantguard.serving.launch import start
from pytest_quantguard.serving.machine_state import Watch
from pytest_quantguard.stats.speed import decide_slowdown, run_spread, scatter

MODEL = Path(__file__).parents[1] / "data" / "models" / "bf16-tiny"
SCENARIO = DecodeHeavy(kind="decode_heavy", input_tokens=16, output_tokens=48, requests=24)
LEVEL, ROUNDS, WARMUP = 8, 7, 5
MAX_SLOWDOWN, MAX_SCATTER = 0.05, 0.10
SLOW = "slow_step:share=0.1"
STATUSES = ("regressed", "inconclusive", "unchanged", "improved")

Run = dict[str, Any]
Chooser = Callable[[Sequence[Run], int, int], list[Run]]


def run(folder: Path, faults: list[str]) -> Run:
    """Start a server, warm up, time the rounds."""
    config = EmulatorServer(
        backend="emulator", model_path=str(MODEL), quantization="nvfp4", threads=1, faults=faults
    )
    with start(config, log_path=folder / "server.log") as server:
        workload = build_workload(
            SCENARIO,
            seed=0,
            vocab_size=server.client.vocab_size or 0,
            tokenize=server.client.tokenize,
            folder=folder,
        )
        load = Load(server.client, Target(server.url), workload, workload.concurrency(LEVEL), {})
        load.warm_up(WARMUP, lambda _: None)
        with Watch(server.cpu_seconds) as watch:
            for _ in range(ROUNDS):
                load.prepare()
                load.run()
    assert watch.state is not None
    assert load.failed == 0, load.error_examples
    return {
        "times": load.times,
        "disturbances": watch.state.disturbances,
        "idle": watch.state.idle,
        "foreign": watch.state.foreign,
    }


def before(clean: Sequence[Run], number: int, count: int) -> list[Run]:
    """The last clean runs before number `number`; fewer where there are no more."""
    return list(clean[max(0, number - count) : number])


def spread_out(clean: Sequence[Run], number: int, count: int) -> list[Run]:
    """Clean runs other than `number`, evenly over the trial, as if added on different days."""
    step = len(clean) / (count + 1)
    return [clean[int(number + step * (i + 1)) % len(clean)] for i in range(count)] if step >= 1 else []


RECORDS: tuple[tuple[str, Chooser, int], ...] = (
    ("the run before", before, 1),
    ("5 runs before", before, 5),
    ("10 runs before", before, 10),
    ("5 runs, spread", spread_out, 5),
    ("10 runs, spread", spread_out, 10),
)


def verdict(record: Sequence[Run], now: Run, *, conditions: bool) -> str:
    """The gate's verdict, or what it would be without its conditions on scatter and disturbances."""
    found = decide_slowdown(
        accepted=[one["times"] for one in record],
        measured=now["times"],
        max_slowdown=MAX_SLOWDOWN,
        max_scatter=MAX_SCATTER if conditions else 1e9,
        disturbances=now["disturbances"] if conditions else (),
    )
    return found.status


def verdicts(
    runs: dict[str, list[Run]], which: str, record: tuple[str, Chooser, int], *, conditions: bool
) -> Counter[str]:
    """Of every run for which there is a record. With the gate's conditions that has no run which scatters by
    more than may be: none such is accepted or added.
    """
    _, choose, count = record
    found: Counter[str] = Counter()
    clean = runs["clean"]
    usable = [not conditions or scatter(one["times"]) <= MAX_SCATTER for one in clean]
    pool = [one for one, fit in zip(clean, usable, strict=True) if fit]
    for number, now in enumerate(runs[which], start=which == "slow"):
        chosen = choose(pool, sum(usable[:number]), count)
        if len(chosen) == count:
            found[verdict(chosen, now, conditions=conditions)] += 1
    return found


def table(runs: dict[str, list[Run]]) -> list[str]:
    """One row per kind of run, record and rules; the same runs are judged in all of them."""
    clean, slow = runs["clean"], runs["slow"]
    lines = [
        f"{'':<20}{'record':<18}{'rules':<16}{'compared':>9}"
        + "".join(f"{status:>14}" for status in STATUSES)
    ]
    for which, name in (("clean", "nothing changed"), ("slow", "10 % of each step")):
        for record in RECORDS:
            for conditions in (True, False):
                counts = verdicts(runs, which, record, conditions=conditions)
                rules = "the gate's" if conditions else "interval alone"
                cells = "".join(f"{counts[status]:>14}" for status in STATUSES)
                lines.append(f"{name:<20}{record[0]:<18}{rules:<16}{counts.total():>9}{cells}")
    scatters = sorted(scatter(one["times"]) for one in (*clean, *slow))
    disturbed = sum(bool(one["disturbances"]) for one in (*clean, *slow))
    differ = run_spread([one["times"] for one in clean]) or 0.0
    lines.append(
        f"scatter of a run: median {scatters[len(scatters) // 2]:.1%}, largest {scatters[-1]:.1%}; "
        f"disturbed: {disturbed} of {len(scatters)}; clean runs differ by {differ:.1%}"
    )
    return lines


def main(output: Path, clean_runs: int = 51, slow_runs: int = 20, seconds: int = 3600) -> None:
    began = time.monotonic()
    runs = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {"clean": [], "slow": []}
    with tempfile.TemporaryDirectory() as folder:
        while len(runs["clean"]) < clean_runs and time.monotonic() - began < seconds:
            runs["clean"].append(run(Path(folder), []))
            if len(runs["slow"]) < slow_runs:
                runs["slow"].append(run(Path(folder), [SLOW]))
            output.write_text(json.dumps(runs), encoding="utf-8")
    print("\n".join(table(runs)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
