"""What a server's log means: how far its start has come, and why it failed. Rules over text; no I/O but the
file's.

Every rule is tested against the log of a real server where we have one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ANSI = re.compile(r"\x1b?\[[0-9;]*m")
OWN_POLLING = re.compile(r'"GET /health(_generate)? HTTP')
"""Access-log lines that our own waiting causes: they are no progress."""
PORT_IN_USE = re.compile(r"(?:\('[^']*', (?P<port>\d+)[^)\n]*\)[^\n]*)?address already in use", re.IGNORECASE)
ERROR_LINE = re.compile(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception): .+)$", re.MULTILINE)
COMMAND_MARK = "$ "
"""Begins the first line of a log that we began: the command."""
READ_LINES = 200
"""How many lines at the end of a log hold the cause of a failed start."""
LONGEST_LINE = 2000
READ_BYTES = 1 << 23
"""So much of a log is looked at, at once and at its end: a server may write more than the memory holds."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern of a failed start and the sentence that explains it."""

    name: str
    pattern: re.Pattern[str]
    explain: Callable[[re.Match[str], str], str]


@dataclass(frozen=True, slots=True)
class Reading:
    """The rule that fits, and what it says about this log."""

    name: str
    sentence: str


def read_failure(log: str) -> Reading | None:
    """The first rule that fits the end of a failed start's log, or its last error; None without either."""
    log = plain(log)
    end = "\n".join(line[:LONGEST_LINE] for line in log.splitlines()[-READ_LINES:])
    for rule in RULES:
        match = rule.pattern.search(end)
        if match is not None:
            return Reading(rule.name, rule.explain(match, log))
    errors = ERROR_LINE.findall(end)
    return Reading("error in the log", f"the last error in the log is {errors[-1]}") if errors else None


def read_log(path: Path) -> str:
    """The end of a log, from the beginning of a line; where it cannot be read, why."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - READ_BYTES, 0))
            content = file.read(READ_BYTES)
    except OSError as error:
        return f"(the log cannot be read: {error})"
    if size > READ_BYTES:
        content = content.partition(b"\n")[2]
    return content.decode(errors="replace")


def never_serves(line: str) -> str | None:
    """What a line says of a server that goes on living but will never serve; None for every other line."""
    match = PORT_IN_USE.search(line[:LONGEST_LINE])
    return _port_in_use(match, line) if match is not None else None


def stage_of(line: str) -> str | None:
    """What the server is doing, from one line of its log; None where the line does not say."""
    for pattern, stage in STAGES:
        match = pattern.search(line)
        if match is not None:
            percent = match.groupdict().get("percent")
            return f"{stage} {percent} %" if percent else stage
    return None


def plain(text: str) -> str:
    """Without colours, and with progress bars that overwrite their line as lines of their own."""
    return ANSI.sub("", text).replace("\r\n", "\n").replace("\r", "\n")


def tail(text: str, lines: int = 25, width: int = 300) -> str:
    """The end of a log for a message, which tells the command by itself: without the line of it and repeated
    progress bars; long lines cut.
    """
    kept = [line for line in plain(text).splitlines() if line.strip() and not OWN_POLLING.search(line)]
    kept = kept[1:] if kept and kept[0].startswith(COMMAND_MARK) else kept
    return "\n".join(line if len(line) <= width else line[: width - 1] + "…" for line in kept[-lines:])


class LogFollower:
    """Reads what a growing log file has gained since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = ""

    def new_lines(self) -> list[str]:
        """Complete new lines (progress bars included), without those of our own polling."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read(READ_BYTES)
        except OSError:
            return []
        self._offset += len(content)
        *lines, rest = (self._rest + plain(content.decode(errors="replace"))).split("\n")
        self._rest = rest[:READ_BYTES]
        return [line for line in lines if line.strip() and not OWN_POLLING.search(line)]


def _said(text: str) -> Callable[[re.Match[str], str], str]:
    """A fixed sentence, with the match's groups filled in."""
    return lambda match, _: match.expand(text) if match.groups() else text


def _unknown_flag(match: re.Match[str], log: str) -> str:
    known = sorted(set(re.findall(r"(?<![\w-])(--[a-z0-9][a-z0-9-]*)", log[: match.start()])))
    parts = []
    for flag in (word for word in match[1].split() if word.startswith("-")):
        name = flag.split("=")[0]
        near = difflib.get_close_matches(name, [other for other in known if other != name], 1, 0.6)
        parts.append(f"{name} (nearest known: {near[0]})" if near else name)
    return f"this version of the server does not know {', '.join(parts) or match[1]}; see server_args"


def _port_in_use(match: re.Match[str], _: str) -> str:
    port = f"port {match['port']}" if match["port"] else "a port that the server needs"
    return f"{port} is already in use by another process; leave `port` out to have a free one chosen"


def _wrong_choice(match: re.Match[str], _: str) -> str:
    choices = re.findall(r"'([^']*)'", match["choices"])
    near = difflib.get_close_matches(match["value"], choices, 1, 0.5)
    hint = f"; nearest known: {near[0]}" if near else ""
    return f"{match['flag']} cannot be '{match['value']}'{hint} ({match['choices']})"


RULES: tuple[Rule, ...] = (
    Rule("unknown flag", re.compile(r"error: unrecognized arguments: (.+)"), _unknown_flag),
    Rule(
        "invalid value",
        re.compile(
            r"error: argument (?P<flag>--[\w-]+)[^:\n]*: "
            r"invalid choice: '(?P<value>[^']*)' \((?P<choices>[^)\n]*)"
        ),
        _wrong_choice,
    ),
    Rule(
        "invalid value",
        re.compile(r"error: (argument --[\w-]+[^:\n]*: [^\n]+|the following arguments are required: [^\n]+)"),
        _said(r"the server refused its command line: \1"),
    ),
    Rule("port in use", PORT_IN_USE, _port_in_use),
    Rule(
        "out of memory",
        re.compile(
            r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|Not enough memory|"
            r"increase --mem-fraction-static|DefaultCPUAllocator: can't allocate memory"
        ),
        _said("out of memory: lower server_args.mem_fraction_static, or free the device"),
    ),
    Rule(
        "no GPU",
        re.compile(
            r"libcuda\.so\.1: cannot open|No CUDA GPUs are available|Found no NVIDIA driver|"
            r"not compiled with CUDA enabled|No accelerator .* is available"
        ),
        _said("no usable GPU: the NVIDIA driver is missing or CUDA_VISIBLE_DEVICES hides every device"),
    ),
    Rule(
        "wrong CUDA",
        re.compile(
            r"CUDA driver version is insufficient|driver on your system is too old|no kernel image is "
            r"available|"
            r"unsupported toolchain|forward compatibility was attempted"
        ),
        _said("the installed wheels are built for another CUDA or GPU generation than this machine has"),
    ),
    Rule(
        "missing kernel",
        re.compile(
            r"Could not load any common_ops|No module named '(?:sgl_kernel|flashinfer)|undefined symbol"
        ),
        _said("a compiled kernel package (sgl_kernel, flashinfer) is missing or does not fit this machine"),
    ),
    Rule(
        "SGLang not installed",
        re.compile(r"No module named '?sglang|finding module specification for 'sglang"),
        _said(
            "SGLang is not installed for this Python; set `command`, "
            "for example [/opt/sglang/bin/python, -m, sglang.launch_server]"
        ),
    ),
    Rule(
        "unsupported architecture",
        re.compile(
            r"[Mm]odel architectures? (?:\[[^\]\n]*\]|\S+) (?:is|are) not supported|"
            r"does not recognize this architecture"
        ),
        _said("this version of the server does not know the model's architecture"),
    ),
    Rule(
        "no quantization config",
        re.compile(r"Cannot find the config file for ([\w-]+)"),
        _said(r"the model folder holds no \1 quantization config: it is not a checkpoint of that format"),
    ),
    Rule(
        "unsupported here",
        re.compile(
            r"\w*Error: (?P<what>[^\n]*(?:not supported on|requires Intel AMX|only works on|supports? an? "
            r"FP8|"
            r"minimum capability|compute capability|is supported)[^\n]*)"
        ),
        lambda match, _: f"this device or backend cannot run the asked format: {match['what']}",
    ),
    Rule(
        "model not found",
        re.compile(
            r"Repo id must be in the form|is not a local folder and is not a valid model|RepositoryNotFound|"
            r"does not appear to have a file named config\.json|Incorrect path_or_model_id|"
            r"No such file or directory: '[^']*config\.json'"
        ),
        _said(
            "the model was not found: is model_path a folder on the server's machine, or a Hugging Face name?"
        ),
    ),
    Rule(
        "model not accessible",
        re.compile(r"GatedRepoError|Access to model \S+ is restricted|401 Client Error"),
        _said("the model needs a Hugging Face account that may read it; set env: {HF_TOKEN: ${HF_TOKEN}}"),
    ),
    Rule(
        "no network",
        re.compile(
            r"couldn't connect to 'https?://|offline mode is enabled|Max retries exceeded", re.IGNORECASE
        ),
        _said("the model is not on this machine and the network does not reach its source"),
    ),
    Rule("disk full", re.compile(r"No space left on device"), _said("the disk is full")),
)

STAGES: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(
            r"(?:[Ll]oading (?:safetensors )?(?:checkpoint )?shards|loading weights)"
            r".*?(?P<percent>\d{1,3})\s?%"
        ),
        "loading weights",
    ),
    (re.compile(r"Load weight begin"), "loading weights"),
    (re.compile(r"Load weight end"), "weights loaded"),
    (
        re.compile(r"DeepGEMM.*?(?P<percent>\d{1,3})%|DeepGEMM (?:warmup|JIT)|Entering DeepGEMM"),
        "compiling DeepGEMM",
    ),
    (re.compile(r"[Cc]apturing (?:batches|CUDA graph).*?(?P<percent>\d{1,3})%"), "capturing CUDA graphs"),
    (re.compile(r"Capture (?:cuda|CUDA) graph begin"), "capturing CUDA graphs"),
    (re.compile(r"KV Cache is allocated|Memory pool end"), "KV cache allocated"),
    (re.compile(r"Application startup complete|Uvicorn running on"), "warming up"),
    (re.compile(r"fired up and ready to roll"), "ready"),
    (re.compile(r"Init (?:torch distributed|parallel) begin"), "starting the engine"),
)
