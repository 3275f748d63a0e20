"""Logs of real servers that failed to start, read; and the stages of a good start."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pytest_quantguard.serving import log_reading, supervisor
from pytest_quantguard.serving.log_reading import (
    READ_BYTES,
    RULES,
    LogFollower,
    never_serves,
    plain,
    read_failure,
    read_log,
    stage_of,
    tail,
)
from pytest_quantguard.serving.supervisor import mask_file
from tests.serving.samples import FOLDER

LOGS = FOLDER / "logs"

RECORDED = {
    "cuda_env1": ("no GPU", "NVIDIA driver is missing"),
    "kv_fp8_e4m3": ("unsupported here", "CPU FP8 KV cache requires Intel AMX support"),
    "kv_fp8_e5m2": ("unsupported here", "--kv-cache-dtype fp8_e5m2 is not supported on CPU"),
    "kv_nvfp4": ("unsupported here", "NVFP4 prefill supports an FP8 E4M3 workspace or native NVFP4"),
    "q_awq": ("no quantization config", "holds no awq quantization config"),
    "q_bogus": ("invalid value", "--quantization cannot be 'bogus'"),
    "q_modelopt_fp8": ("no quantization config", "holds no modelopt_fp8 quantization config"),
    "q_mxfp8": ("unsupported here", "Only weight_block_size[0] == weight_block_size[1]"),
    "q_w8a8_int8": ("unsupported here", "W8A8Int8LinearMethod on CPU only works on AMX or Arm64"),
    "t_badmodel": ("model not found", "is model_path a folder on the server's machine"),
    "t_portbusy": ("port in use", "port 31022 is already in use"),
}


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_recorded_failures_are_understood(name: str) -> None:
    reading = read_failure((LOGS / f"{name}.txt").read_text(encoding="utf-8"))
    rule, words = RECORDED[name]
    assert reading is not None
    assert reading.name == rule
    assert words in reading.sentence


def test_every_recorded_log_has_an_expectation() -> None:
    failed = {path.stem for path in LOGS.glob("*.txt")} - {"started_ok"}
    assert failed - RECORDED.keys() <= {"q_fp8", "q_gguf"}
    for name in failed:
        assert read_failure((LOGS / f"{name}.txt").read_text(encoding="utf-8")) is not None


@pytest.mark.parametrize(
    ("text", "rule", "words"),
    [
        (
            "usage: x [--enable-metrics] [--tp-size TP]\nsglang serve: error: unrecognized arguments: "
            "--enable-metrics-x",
            "unknown flag",
            "does not know --enable-metrics-x (nearest known: --enable-metrics)",
        ),
        ("x: error: unrecognized arguments: --zzz 3", "unknown flag", "does not know --zzz; see server_args"),
        (
            "x: error: argument --tp-size: invalid int value: 'a'",
            "invalid value",
            "argument --tp-size: invalid int",
        ),
        (
            "x: error: argument --quantization: invalid choice: 'fp88' (choose from 'awq', 'fp8', 'gptq')",
            "invalid value",
            "--quantization cannot be 'fp88'; nearest known: fp8 (choose from",
        ),
        (
            "usage: x [--foo] [--bar-baz]\nx: error: unrecognized arguments: --fooo 3 --bar-bas=4",
            "unknown flag",
            "does not know --fooo (nearest known: --foo), --bar-bas (nearest known: --bar-baz); see",
        ),
        (
            "x: error: the following arguments are required: --model-path",
            "invalid value",
            "required: --model-path",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", "out of memory", "mem_fraction_static"),
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
            "out of memory",
            "lower",
        ),
        ("RuntimeError: No CUDA GPUs are available", "no GPU", "CUDA_VISIBLE_DEVICES"),
        (
            "CUDA error: no kernel image is available for execution on the device",
            "wrong CUDA",
            "another CUDA",
        ),
        ("ImportError: x.so: undefined symbol: _ZN3c10", "missing kernel", "sgl_kernel"),
        ("/usr/bin/python: No module named sglang", "SGLang not installed", "set `command`"),
        (
            "ValueError: Model architectures ['FooForCausalLM'] are not supported",
            "unsupported architecture",
            "know",
        ),
        ("huggingface_hub.errors.GatedRepoError: 401 Client Error", "model not accessible", "HF_TOKEN"),
        (
            "OSError: We couldn't connect to 'https://huggingface.co' to load the files",
            "no network",
            "network",
        ),
        ("OSError: [Errno 28] No space left on device", "disk full", "disk is full"),
        ("Traceback\nzoneinfo.FooError: first\nbar.BarError: second", "error in the log", "BarError: second"),
    ],
)
def test_other_known_failures(text: str, rule: str, words: str) -> None:
    reading = read_failure(text)
    assert reading is not None
    assert (reading.name, words in reading.sentence) == (rule, True), reading


def test_a_good_log_and_no_log_are_not_explained() -> None:
    assert read_failure((LOGS / "started_ok.txt").read_text(encoding="utf-8")) is None
    assert read_failure("") is None


def test_rules_do_not_slow_down_on_long_lines() -> None:
    """A real log holds a line with all 500 arguments; a rule that backtracks would take minutes here."""
    line = "server_args={" + "'some_argument.name': 'ValueX', " * 20_000 + "}"
    assert read_failure("\n".join([line] * 50)) is None
    assert never_serves(line) is None
    assert len({rule.pattern.pattern for rule in RULES}) == len(RULES)


def test_stages_of_a_good_start() -> None:
    lines = plain((LOGS / "started_ok.txt").read_text(encoding="utf-8")).splitlines()
    stages = [stage for stage in map(stage_of, lines) if stage is not None]
    assert list(dict.fromkeys(stages)) == [
        "starting the engine",
        "loading weights",
        "loading weights 0 %",
        "loading weights 100 %",
        "weights loaded",
        "KV cache allocated",
        "warming up",
        "ready",
    ]


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        ("Loading safetensors checkpoint shards:  40% Completed | 2/5 [00:03<00:04]", "loading weights 40 %"),
        (
            "Capturing batches (bs=16 avail_mem=9.1 GB):  30%|###  | 7/23 [00:01<00:02]",
            "capturing CUDA graphs 30 %",
        ),
        (
            "[2026-01-01] Capture cuda graph begin. This can take up to several minutes.",
            "capturing CUDA graphs",
        ),
        ("DeepGEMM warmup:  12%|#  | 1024/8192", "compiling DeepGEMM 12 %"),
        ("Entering DeepGEMM JIT Pre-Compile session.", "compiling DeepGEMM"),
        ("something else 50%", None),
    ],
)
def test_stages_of_gpu_servers(line: str, stage: str | None) -> None:
    assert stage_of(line) == stage


def test_the_follower_reads_only_what_is_new_and_not_our_own_polling(tmp_path: Path) -> None:
    path = tmp_path / "log"
    follower = LogFollower(path)
    assert follower.new_lines() == []
    path.write_text("one\ntw", encoding="utf-8")
    assert follower.new_lines() == ["one"]
    with path.open("a", encoding="utf-8") as file:
        file.write('o\nINFO: 127.0.0.1:1 - "GET /health_generate HTTP/1.1" 503\nbar 10%\rbar 20%\n')
    assert follower.new_lines() == ["two", "bar 10%", "bar 20%"]


def test_a_log_larger_than_can_be_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse files: what is read of them must not depend on their size."""
    path = tmp_path / "server.log"
    with path.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, 2)
        file.write(b"\nRuntimeError: the last words\n")
    assert len(read_log(path)) <= READ_BYTES
    reading = read_failure(read_log(path))
    assert reading is not None
    assert "the last words" in reading.sentence
    follower = LogFollower(path)
    for _ in range(3):
        assert follower.new_lines() == []
    monkeypatch.setattr(log_reading, "READ_BYTES", 10)
    path.write_text("first line, which is long\nlast\n", encoding="utf-8")
    assert read_log(path) == "last\n"
    follower = LogFollower(path)
    found = [line for _ in range(5) for line in follower.new_lines()]
    assert found[-1] == "last"
    assert len(found[0]) < 30


def test_a_log_that_is_gone_or_none(tmp_path: Path) -> None:
    assert "cannot be read" in read_log(tmp_path / "none")
    assert "cannot be read" in read_log(tmp_path)
    assert LogFollower(tmp_path).new_lines() == []


@pytest.mark.parametrize("seed", range(30))
def test_secrets_are_masked_wherever_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Against a replacement over the whole text, with pieces shorter than a secret."""
    draw = random.Random(seed)
    secrets = draw.sample(["sk-aaab", "sk-aaabcd", "hf_x", "\u00fcber", "ab"], 3)
    text = "".join(draw.choice([*secrets, "sk-", "a", "aab", "\n", "\u00fc", "words "]) for _ in range(200))
    monkeypatch.setattr(supervisor, "PIECE_BYTES", draw.randint(1, 40))
    path = tmp_path / "server.log"
    path.write_text(text, encoding="utf-8")
    mask_file(str(path), secrets)
    expected = text
    for secret in sorted(secrets, key=lambda word: -len(word.encode())):
        expected = expected.replace(secret, "***"[: len(secret.encode())])
    masked = path.read_text(encoding="utf-8")
    assert not any(secret in masked for secret in secrets)
    assert masked == expected


def test_masking_leaves_what_has_no_secret_and_what_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(b"\xff plain \r\n" * 1000)
    before = path.stat().st_mtime_ns, path.read_bytes()
    mask_file(str(path), [])
    mask_file(str(path), ["", "sk-none"])
    assert (path.stat().st_mtime_ns, path.read_bytes()) == before
    mask_file(str(tmp_path / "gone"), ["sk-none"])
    assert not (tmp_path / "gone").exists()


def test_the_tail_is_short_and_plain() -> None:
    text = "\n".join([f"\x1b[31mline {i}\x1b[0m" for i in range(100)] + ["x" * 1000])
    end = tail(text, lines=3)
    assert end.splitlines()[:2] == ["line 98", "line 99"]
    assert len(end.splitlines()[2]) == 300


def test_the_tail_leaves_out_the_command_blank_lines_and_our_polling() -> None:
    polling = 'INFO: 127.0.0.1:1 - "GET /health_generate HTTP/1.1" 503'
    assert tail(f"$ python -m server\n\none\n{polling}\n  \ntwo\n") == "one\ntwo"
    assert tail("one\n$ echo two\n") == "one\n$ echo two", "only a first line is the command"
    assert tail("$ python -m server\n") == tail("") == ""
