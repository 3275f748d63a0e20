"""Whether the SGLang that a config starts is there, and knows the config's flags: its own --help is asked."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from pytest_quantguard.config import SglangServer
from pytest_quantguard.doctor.finding import Finding
from pytest_quantguard.serving.command import SGLANG_PROGRAM, Launch, mask, plan_launch

HELP_SECONDS = 300
OLDEST = (0, 5)
VERSION_CODE = "import importlib.metadata as m; print(m.version('sglang'))"
FLAG = re.compile(r"(?<![\w-])--([A-Za-z][\w-]*)")


def examine_program(role: str, server: SglangServer, *, ask: bool) -> Iterator[Finding]:
    """The version of SGLang, and the flags that it does not know. ask: whether it may be started for --help.

    A command other than Python or sglang itself (docker, srun, ssh) would start something elsewhere, and is
    not run.
    """
    name, program = f"{role}: SGLang", list(server.command or SGLANG_PROGRAM)
    kind = Path(program[0]).name
    python = kind.startswith("python")
    if not python and kind != "sglang":
        yield Finding(name, "skipped", f"not asked, as it is started through {kind!r}: {shlex.join(program)}")
        return
    if not ask:
        yield Finding(name, "skipped", "not asked")
        return
    launch = plan_launch(server, port=1)
    if python:
        found = _output([program[0], "-c", VERSION_CODE], launch)
        version = found[1].strip() if found[0] == 0 else None
        if version is None:
            what = "this Python" if program[0] == sys.executable else program[0]
            yield Finding(
                name,
                "problem",
                f"SGLang is not installed in {what}",
                f"{shlex.quote(program[0])} -m pip install 'sglang>=0.5', or name another one with "
                f"{role}.command: [/path/to/python, -m, sglang.launch_server]",
            )
            return
        yield _judge_version(name, version)
    yield from _examine_flags(role, program, launch)


def _judge_version(name: str, version: str) -> Finding:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        return Finding(
            name, "warning", f"{version}, older than what is tested", "pip install -U 'sglang>=0.5'"
        )
    return Finding(name, "ok", version)


def _examine_flags(role: str, program: list[str], launch: Launch) -> Iterator[Finding]:
    """Every flag of the command line is in --help."""
    code, text, last = _run_help(program, launch)
    name = f"{role}: flags"
    if code != 0:
        yield Finding(
            name, "problem", f"{shlex.join(program)} --help fails: {last}", "Mend the installation of SGLang."
        )
        return
    known = set(FLAG.findall(text))
    unknown = [flag for flag in launch.flags if flag not in known]
    if not unknown:
        yield Finding(name, "ok", f"all {len(launch.flags)} are known to it")
        return
    hints = []
    for flag in unknown:
        close = get_close_matches(flag, known, n=1)
        hints.append(f"--{flag}{f' (nearest known: --{close[0]})' if close else ''}")
    yield Finding(
        name,
        "problem",
        f"this version of SGLang does not know {', '.join(hints)}",
        f"Correct {role}.server_args, or install the version that has them.",
    )


def _run_help(program: list[str], launch: Launch) -> tuple[int, str, str]:
    """Exit code, text, last line of the error output."""
    code, out, error = _output([*program, "--help"], launch)
    lines = [line for line in error.strip().splitlines() if line.strip()]
    return code, out, mask(lines[-1], launch.secrets) if lines else f"exit code {code}"


def _output(command: list[str], launch: Launch) -> tuple[int, str, str]:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=HELP_SECONDS,
            env=dict(launch.env),
            cwd=launch.cwd,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, "", f"no end after {HELP_SECONDS} s"
    except OSError as error:
        return 1, "", str(error)
    return done.returncode, done.stdout, done.stderr
