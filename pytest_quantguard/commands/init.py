"""`quantguard init`: the files that a project needs to gate its model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_quantguard.commands import ExitCode, positive, print_json, tell

if TYPE_CHECKING:
    from pytest_quantguard.scaffold import Plan

NAME = "init"
SUMMARY = "write a config and a CI workflow for your model"
DESCRIPTION = """Write NAME.yaml, .github/workflows/quantguard.yml with its action, and the .gitignore entry
for results. What the flags leave open is asked where there is a terminal; an answer that cannot be is asked
for again. Nothing is overwritten without --force, and nothing is written before every answer is there.

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
    add("--tp", type=positive, default=1, metavar="N", help="GPUs of one server (default: %(default)s)")
    add("--baseline", metavar="PLACE", help="folder or URL (default: baselines/<reference>-bf16)")
    add("--folder", type=Path, default=Path(), metavar="DIR", help="the project's root (default: here)")
    add("--no-workflow", action="store_true", help="no .github files")
    add("--force", action="store_true", help="overwrite files that are there")
    add("--json", action="store_true", help="ask nothing; print what was written as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Write; raises `ConfigError` for what is missing, impossible or there already."""
    from pytest_quantguard.scaffold import check_config, files_of, write_files

    plan = _plan(arguments)
    files = files_of(plan)
    check_config(files[plan.config_file], plan.config_file)
    written = write_files(arguments.folder, files, force=arguments.force)
    config = str(arguments.folder / plan.config_file)
    if arguments.json:
        print_json({"config": config, "written": written})
        return ExitCode.DONE
    print("\n".join([*(f"written: {path}" for path in written), "", *_next_steps(config)]))
    return ExitCode.DONE


def _plan(arguments: argparse.Namespace) -> Plan:
    """The answers, from flags or from the user. A wrong flag is an error, a wrong answer is asked again."""
    from pytest_quantguard import scaffold

    answers = _Answers(asking=sys.stdin.isatty() and not arguments.json and arguments.candidate is None)
    chosen = arguments.backend or answers.get(
        "--backend",
        "How does the candidate run: sglang, emulator (CPU) or attach?",
        "sglang",
        check=scaffold.check_backend,
    )
    backend = scaffold.check_backend(chosen)
    candidate = arguments.candidate or answers.get("--candidate", "The quantized model (name or folder)?")
    reference = arguments.reference or (
        candidate if backend == "emulator" else answers.get("--reference", "The unquantized model?")
    )
    url = arguments.url and scaffold.check_url(arguments.url)
    if backend == "attach" and not url:
        url = answers.get("--url", "URL of the server?", check=scaffold.check_url)
    quantization = arguments.quantization or scaffold.guess_quantization(candidate, backend)
    if quantization is None:
        quantization = answers.get(
            "--quantization",
            "Quantization, as the server calls it?",
            "",
            check=lambda answer: scaffold.check_quantization(answer, backend),
        )
    cache = arguments.kv_cache_dtype or answers.get(
        "--kv-cache-dtype", "KV cache type?", "", check=lambda answer: scaffold.check_cache(answer, backend)
    )
    answers.require_none_missing()
    plan = scaffold.Plan(
        name=arguments.name or scaffold.name_of(candidate, quantization, backend),
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
    return _fitted(plan, arguments, answers) if answers.asking else plan


def _fitted(plan: Plan, arguments: argparse.Namespace, answers: _Answers) -> Plan:
    """The plan with a name that can be and is free; a workflow of another gate stays as it is."""
    from pytest_quantguard import scaffold
    from pytest_quantguard.errors import ConfigError

    def free(name: str) -> str:
        scaffold.check_name(name)
        files = scaffold.files_of(replace(plan, name=name, workflow=False))
        if not arguments.force and scaffold.present(arguments.folder, files):
            raise ConfigError(f"{name}.yaml is there already, with other content.")
        return name

    try:
        free(plan.name)
    except ConfigError as error:
        tell(f"  {error}")
        plan = replace(plan, name=answers.get("--name", "Another name for the gate?", check=free))
    if plan.workflow and not arguments.force:
        kept = scaffold.present(arguments.folder, scaffold.workflow_files(plan))
        if kept:
            tell(f"  {', '.join(kept)} there already, kept as they are (--force overwrites them)")
            plan = replace(plan, workflow=False)
    return plan


class _Answers:
    """Asks where it may, and collects what is missing where it may not."""

    def __init__(self, *, asking: bool) -> None:
        self.asking = asking
        self._missing: list[str] = []

    def get(
        self,
        flag: str,
        question: str,
        default: str | None = None,
        *,
        check: Callable[[str], object] = str,
    ) -> str:
        """The answer to one question; `check` raises `ConfigError` for one that cannot be, which is asked
        again. Raises KeyboardInterrupt at the end of input.
        """
        from pytest_quantguard.errors import ConfigError

        if not self.asking:
            if default is None:
                self._missing.append(flag)
            return default or ""
        while True:
            hint = f" [{default}]" if default else ""
            print(f"{question}{hint} ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            if not line:
                print(file=sys.stderr)
                raise KeyboardInterrupt
            answer = line.strip() or default
            if answer is None:
                tell(f"  an answer is needed ({flag})")
                continue
            try:
                check(answer)
            except ConfigError as error:
                tell(f"  {error}")
            else:
                return answer

    def require_none_missing(self) -> None:
        """Raise `ConfigError` where something was needed and could not be asked for."""
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
