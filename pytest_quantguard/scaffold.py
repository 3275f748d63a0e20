"""The files that a project needs to gate its model: config, workflow and action, ignored folder."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

import yaml

from pytest_quantguard.config_file import load_config
from pytest_quantguard.errors import ConfigError, QuantguardError
from pytest_quantguard.suggest import STARTING_POINTS

Backend = Literal["sglang", "emulator", "attach"]
BACKENDS: tuple[Backend, ...] = ("sglang", "emulator", "attach")

IGNORED = ".quantguard/"
WORKFLOW = ".github/workflows/quantguard.yml"
ACTION = ".github/actions/quantguard/action.yml"
METHODS = (
    ("nvfp4", "modelopt_fp4"),
    ("fp4", "modelopt_fp4"),
    ("fp8", "fp8"),
    ("awq", "awq"),
    ("gptq", "gptq"),
    ("w8a8", "w8a8_int8"),
)
"""What a model's name says of its quantization, and SGLang's name for that."""
STARTING_BOUNDS: Mapping[str, Mapping[str, float]] = {
    "fp8": {"kl_mean": 0.02, "kl_p99": 0.3, "cosine_mean": 0.995, "agreement": 0.96},
    "other": {"kl_mean": 0.06, "kl_p99": 0.7, "cosine_mean": 0.985, "agreement": 0.92},
    "emulator": {"kl_mean": 0.8, "kl_p99": 6.0, "cosine_mean": 0.7, "agreement": 0.5},
}
"""Loose enough for a first run of a sound candidate; `quantguard suggest` then proposes the model's own."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the user answered. tensor_parallel: GPUs of one server. install: what pip installs in CI."""

    name: str
    backend: Backend
    candidate: str
    reference: str
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    tensor_parallel: int = 1
    url: str | None = None
    baseline: str | None = None
    workflow: bool = True

    @property
    def config_file(self) -> str:
        """Where the config goes."""
        return f"{self.name}.yaml"

    @property
    def baseline_place(self) -> str:
        """The `baseline` of the config."""
        model = re.sub(r"[^a-z0-9.]+", "-", self.reference.rstrip("/").rsplit("/", 1)[-1].lower()).strip("-.")
        return self.baseline or f"baselines/{model}-bf16"


def guess_quantization(model: str, backend: Backend) -> str | None:
    """The method that the model's name speaks of, in the backend's words; None where it says nothing."""
    name = model.rsplit("/", 1)[-1].lower()
    for word, method in METHODS:
        if word in name:
            return word if backend == "emulator" and word in ("nvfp4", "fp8") else method
    return None


def name_of(candidate: str, quantization: str | None, backend: Backend) -> str:
    """What a gate is called: the candidate's last name, with the quantization if that does not say it."""
    last = candidate.rstrip("/").rsplit("/", 1)[-1].lower()
    if not quantization or quantization in last or guess_quantization(last, backend):
        return last
    return f"{last}-{quantization}"


def check_name(name: str) -> str:
    """`name` if a gate can be called so; raises `ConfigError`."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ConfigError(
            f"--name is {name!r}; allowed are letters, digits, '.', '_' and '-', beginning with a letter or "
            "digit."
        )
    return name


def check_backend(name: str) -> Backend:
    """The backend of that name; raises `ConfigError` that lists them."""
    if name not in BACKENDS:
        raise ConfigError(f"--backend is {name!r}; allowed: {', '.join(BACKENDS)}.")
    return BACKENDS[BACKENDS.index(name)]


def check_url(url: str) -> str:
    """`url` if a server can have it; raises `ConfigError`."""
    from pytest_quantguard.serving.transport import normalize_url

    normalize_url(url)
    return url


def check_quantization(method: str, backend: Backend) -> str:
    """`method` if it may be one. The emulator's are known, those of servers change with their versions."""
    from pytest_quantguard.emulator.quantize import check_format

    if method and backend == "emulator":
        check_format(method, "--quantization")
    return method


def check_cache(kind: str, backend: Backend) -> str:
    """`kind` if a key/value cache may have it; raises `ConfigError`."""
    from pytest_quantguard.emulator.quantize import kv_cache_format

    if kind and backend == "emulator":
        kv_cache_format(kind, "--kv-cache-dtype")
    return kind


def check_config(text: str, name: str) -> None:
    """Raise `ConfigError` unless `text` is a config; it is looked at in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text, encoding="utf-8")
        try:
            load_config(path)
        except ConfigError as error:
            raise ConfigError(f"These answers make no config. {error}".replace(f"{folder}/", "")) from None


def files_of(plan: Plan) -> dict[str, str]:
    """Path -> content of everything but `.gitignore`. Raises `ConfigError` for names that cannot be."""
    check_name(plan.name)
    return {plan.config_file: config_text(plan), **(workflow_files(plan) if plan.workflow else {})}


def workflow_files(plan: Plan) -> dict[str, str]:
    """Path -> content of what GitHub Actions needs."""
    return {WORKFLOW: workflow_text(plan), ACTION: template("action.yml")}


def present(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Those of `files` that are in the folder with other content."""
    return [path for path, text in files.items() if _differs(folder / path, text)]


def write_files(folder: Path, files: Mapping[str, str], *, force: bool) -> list[str]:
    """Write all or nothing, and let git ignore results; returns the paths written.

    Raises `ConfigError` if one is there already with other content, unless `force`; `QuantguardError` where
    nothing can be written.
    """
    there = present(folder, files)
    if there and not force:
        raise ConfigError(
            f"{', '.join(there)} {'is' if len(there) == 1 else 'are'} there already and would be "
            "overwritten. Choose another --name or --folder, leave the workflow as it is with "
            "--no-workflow, or say --force."
        )
    staged: list[tuple[Path, Path]] = []
    try:
        everything = {**files, **_ignore(folder)}
        for path, text in everything.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            staged.append((target.with_name(f".{target.name}.new"), target))
            staged[-1][0].write_text(text, encoding="utf-8")
        for temporary, target in staged:
            temporary.replace(target)
        return list(everything)
    except OSError as error:
        raise QuantguardError(f"{error.filename} cannot be written: {error.strerror}.") from error
    finally:
        for temporary, _ in staged:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def _differs(path: Path, text: str) -> bool:
    return path.exists() and (
        not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != text
    )


def _ignore(folder: Path) -> dict[str, str]:
    """`.gitignore` with the folder of results added; nothing where it is in it."""
    path = folder / ".gitignore"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if IGNORED.rstrip("/") in (line.strip().strip("/") for line in text.splitlines()):
        return {}
    separator = "" if not text or text.endswith("\n") else "\n"
    return {".gitignore": f"{text}{separator}{IGNORED}\n"}


def template(name: str) -> str:
    """A file of the package's `templates` folder."""
    return (
        resources.files("pytest_quantguard").joinpath("templates").joinpath(name).read_text(encoding="utf-8")
    )


def workflow_text(plan: Plan) -> str:
    """The GitHub Actions workflow."""
    name = "workflow-emulator.yml" if plan.backend == "emulator" else "workflow-gpu.yml"
    return (
        _for_place(template(name), remote="://" in plan.baseline_place)
        .replace("@CONFIG@", plan.config_file)
        .replace("@BASELINES@", _scalar(plan.baseline_place))
        .replace("@INSTALL@", "pytest-quantguard[emulator]")
    )


def _for_place(text: str, *, remote: bool) -> str:
    """Without the lines that are only for a baseline in a folder, or only for one at a URL."""
    kept, dropped = (" # @url", " # @folder") if remote else (" # @folder", " # @url")
    lines = (line.removesuffix(kept) for line in text.splitlines() if not line.endswith(dropped))
    return "\n".join(lines) + "\n"


def config_text(plan: Plan) -> str:
    """The YAML of the gate, with a comment where a choice was made for the user."""
    lines = [
        "# A gate of pytest-quantguard. In this order:",
        f"#   quantguard doctor {plan.config_file}     will it run on this machine?",
        f"#   quantguard capture {plan.config_file}    once: what the unquantized model answers",
        f"#   quantguard suggest {plan.config_file} --apply    bounds from what your candidate measures",
        f"#   quantguard run {plan.config_file}        in every build",
        "version: 1",
        f"name: {plan.name}",
        *_server_lines(plan, "reference"),
        *_server_lines(plan, "candidate"),
        f"baseline: {_scalar(plan.baseline_place)}",
        *_suite_lines(plan),
    ]
    if plan.quantization is None and plan.backend != "attach":
        lines += ["validity:", "  require_quantized: true        # its name does not say how it is quantized"]
    return "\n".join([*lines, *_accuracy_lines(plan)]) + "\n"


def _server_lines(plan: Plan, role: Literal["reference", "candidate"]) -> list[str]:
    candidate = role == "candidate"
    if candidate and plan.backend == "attach":
        expected = {"model_path": plan.candidate, "quantization": plan.quantization}
        named = ", ".join(f"{key}: {_scalar(value)}" for key, value in expected.items() if value)
        return [
            "candidate:                         # a server that is already running",
            "  backend: attach",
            f"  url: {_scalar(plan.url or '')}",
            f"  expect: {{{named}}}",
        ]
    emulator = plan.backend == "emulator"
    lines = [
        "candidate:                         # on trial in every build"
        if candidate
        else "reference:                         # the unquantized model, captured once",
        f"  backend: {'emulator' if emulator else 'sglang'}",
        f"  model_path: {_scalar(plan.candidate if candidate else plan.reference)}",
    ]
    if not candidate:
        lines.append("  dtype: bfloat16")
    else:
        lines += [f"  quantization: {_scalar(plan.quantization)}"] if plan.quantization else []
        lines += [f"  kv_cache_dtype: {_scalar(plan.kv_cache_dtype)}"] if plan.kv_cache_dtype else []
    if not emulator:
        lines += [
            "  server_args:",
            "    disable_radix_cache: true",
            "    enable_custom_logit_processor: true   # decode is measured with forced tokens",
        ]
        lines += [f"    tp_size: {plan.tensor_parallel}"] if plan.tensor_parallel > 1 else []
    return lines


def _suite_lines(plan: Plan) -> list[str]:
    if plan.backend != "emulator":
        return ["suite:", "  prompts: builtin", "  size: 64", "  max_prompt_tokens: 2048"]
    return [
        "suite:                             # small, so that a CPU answers in a minute",
        "  prompts: builtin",
        "  size: 16",
        "  max_prompt_tokens: 96",
        "  score_tokens: 32",
        "  batch_sizes: [1, 8]",
        "  repeats: 2",
    ]


def _accuracy_lines(plan: Plan) -> list[str]:
    eight_bits = plan.quantization in ("fp8", "modelopt_fp8", "w8a8_fp8", "w8a8_int8")
    kind = "emulator" if plan.backend == "emulator" else "fp8" if eight_bits else "other"
    sides = {name: "max" if name.startswith("kl") else "min" for name in STARTING_BOUNDS[kind]}
    return [
        f"accuracy:                          {STARTING_POINTS}",
        *(f"  {name}: {{{sides[name]}: {value:g}}}" for name, value in STARTING_BOUNDS[kind].items()),
        "  # After a good run, `quantguard accept` stores it; then let drift be judged too:",
        "  # drift: {kl_mean: {max_increase: 10%}}",
    ]


def _scalar(value: str) -> str:
    """`value` as YAML would write it, quoted where it must be."""
    return str(yaml.safe_dump(value, width=10_000)).removesuffix("\n...\n").rstrip("\n")
