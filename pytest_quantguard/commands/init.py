"""`quantguard init`: the files that a project needs to gate its model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_quantguard.commands import ExitCode, print_json, tell

if TYPE_CHECKING:
    from pytest_quantguard.scaffold import Plan

NAME = "init"
SUMMARY = "write a config and a CI workflow for your model"
DESCRIPTION = """Write NAME.yaml, .github/workflows/quantguard.yml with its action, and the .gitignore entry
for results. What the flags leave open is asked where there is a terminal. Nothing is overwritten without
--force.

  quantguard init --candidate nvidia/Qwen3-8B-NVFP4 --reference Qwen/Qwen3-8B
  quantguard init --backend emulator --candidate smollm2-135m \\
      --quantization nvfp4"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    add = parser.add_argument
    add("--candidate", metavar="MODEL", help="the quantized model: a name on Hugging Face, or a folder")
    add("--reference", metavar="MODEL", help="the unquantized one (emulator default: the candidate's)")
    add("--name", help="of the gate (default: from the candidate)")
    add(
        "--backend", choices=("sglang", "emulator", "attach"), help="how the candidate runs (default: sglang)"
    )
    add("--url", help="of the running server (backend attach)")
    add("--quantization", metavar="METHOD", help="as the server calls it (default: from the model's name)")
    add("--kv-cache-dtype", metavar="DTYPE", help="such as fp8_e4m3 (default: the server's)")
    add("--tp", type=int, default=1, metavar="N", help="GPUs of one server (default: %(default)s)")
    add("--baseline", metavar="PLACE", help="folder or URL (default: baselines/<reference>-bf16)")
    add("--folder", type=Path, default=Path(), metavar="DIR", help="the project's root (default: here)")
    add("--no-workflow", action="store_true", help="no .github files")
    add("--force", action="store_true", help="overwrite files that are there")
    add("--json", action="store_true", help="ask nothing; print what was written as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Write; raises `ConfigError` for what is missing or there already."""
    from pytest_quantguard.config_file import load_config
    from pytest_quantguard.scaffold import files_of, write_files

    plan = _plan(arguments)
    written = write_files(arguments.folder, files_of(plan), force=arguments.force)
    load_config(arguments.folder / plan.config_file)
    config = str(arguments.folder / plan.config_file)
    if arguments.json:
        print_json({"config": config, "written": written})
        return ExitCode.DONE
    print("\n".join([*(f"written: {path}" for path in written), "", *_next_steps(config)]))
    return ExitCode.DONE


def _plan(arguments: argparse.Namespace) -> Plan:
    """The answers, from flags or from the user."""
    from pytest_quantguard.errors import ConfigError
    from pytest_quantguard.scaffold import BACKENDS, Plan, guess_quantization

    answers = _Answers(asking=sys.stdin.isatty() and not arguments.json and arguments.candidate is None)
    chosen = arguments.backend or answers.get(
        "--backend", "How does the candidate run: sglang, emulator (CPU) or attach?", "sglang"
    )
    if chosen not in BACKENDS:
        raise ConfigError(f"--backend is {chosen!r}; allowed: {', '.join(BACKENDS)}.")
    backend = BACKENDS[BACKENDS.index(chosen)]
    candidate = arguments.candidate or answers.get("--candidate", "The quantized model (name or folder)?")
    reference = arguments.reference or (
        candidate if backend == "emulator" else answers.get("--reference", "The unquantized model?")
    )
    url = arguments.url or (answers.get("--url", "URL of the server?") if backend == "attach" else None)
    guess = arguments.quantization or guess_quantization(candidate, backend)
    quantization = guess or answers.get("--quantization", "Quantization, as the server calls it?", "")
    cache = arguments.kv_cache_dtype or answers.get("--kv-cache-dtype", "KV cache type?", "")
    answers.require_none_missing()
    last = candidate.rstrip("/").rsplit("/", 1)[-1].lower()
    name = (
        last
        if not quantization or quantization in last or guess_quantization(last, backend)
        else (f"{last}-{quantization}")
    )
    return Plan(
        name=arguments.name or name,
        backend=backend,
        candidate=candidate,
        reference=reference,
        quantization=quantization or None,
        kv_cache_dtype=cache or None,
        tensor_parallel=arguments.tp,
        url=url,
        baseline=arguments.baseline,
        workflow=not arguments.no_workflow,
    )


class _Answers:
    """Asks where it may, and collects what is missing where it may not."""

    def __init__(self, *, asking: bool) -> None:
        self._asking = asking
        self._missing: list[str] = []

    def get(self, flag: str, question: str, default: str | None = None) -> str:
        if not self._asking:
            if default is None:
                self._missing.append(flag)
            return default or ""
        while True:
            hint = f" [{default}]" if default else ""
            print(f"{question}{hint} ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            if not line:
                raise KeyboardInterrupt
            if line.strip() or default is not None:
                return line.strip() or default or ""
            tell(f"  an answer is needed ({flag})")

    def require_none_missing(self) -> None:
        from pytest_quantguard.errors import ConfigError

        if self._missing:
            raise ConfigError(
                f"There is no terminal to ask at, so these are needed: {', '.join(self._missing)}. "
                "See: quantguard init --help"
            )


def _next_steps(config: str) -> list[str]:
    steps = (
        ("doctor", "will it run on this machine?"),
        ("capture", "once: records what the unquantized model answers"),
        ("suggest --apply", "sets the bounds from what your candidate measures"),
        ("run", "in every build"),
    )
    return ["next:", *(f"  quantguard {word} {config}\n      {what}" for word, what in steps)]
