"""Reading configs: what is accepted, and every message for what is not."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_quantguard.config import EmulatorServer, GateConfig, Increase, SglangServer
from pytest_quantguard.config_file import load_config, load_configs
from pytest_quantguard.config_schema import json_schema
from pytest_quantguard.errors import ConfigError
from pytest_quantguard.logprobs.metrics import METRICS

MINIMAL = """\
version: 1
name: small
candidate:
  backend: emulator
  model_path: tiny
  quantization: nvfp4
baseline: base
accuracy:
  kl_mean: {max: 0.5}
"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str, name: str = "gate.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write_file


def message_of(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value)


def test_minimal_config_has_the_documented_defaults(write: Write) -> None:
    config = load_config(write(MINIMAL))
    assert config.suite.batch_sizes == [1, 3, 8, 32]
    assert config.suite.top_logprobs == 256
    assert config.suite.phases == ["prefill", "decode"]
    assert config.accuracy.decision == "point"
    assert config.accuracy.drift is None
    assert config.self_consistency.decode_against_prefill is not None
    assert config.self_consistency.warm_cache is None
    assert config.expects_quantization
    assert [*config.cells()][:2] == [("prefill", 1), ("prefill", 3)]


def test_paths_start_at_the_file_and_names_of_models_stay(write: Write, tmp_path: Path) -> None:
    text = MINIMAL.replace("model_path: tiny", "model_path: ../models/tiny").replace("base\n", "./b/base\n")
    config = load_config(write(text + "suite: {prompts: p.jsonl}\n", "configs/gate.yaml"))
    assert isinstance(config.candidate, EmulatorServer)
    assert config.candidate.model_path == str(tmp_path / "models/tiny")
    assert config.baseline == tmp_path / "configs/b/base"
    assert config.suite.prompts == str(tmp_path / "configs/p.jsonl")
    hub = write(MINIMAL.replace("model_path: tiny", "model_path: Qwen/Qwen3-8B"))
    assert load_config(hub).candidate.model_path == "Qwen/Qwen3-8B"  # type: ignore[union-attr]


def test_unknown_key_names_the_nearest_the_place_and_what_is_allowed(write: Write) -> None:
    message = message_of(write(MINIMAL.replace("  quantization:", "  quantisation:")))
    assert "gate.yaml:6: candidate.quantisation: unknown key; did you mean 'quantization'?" in message
    assert "kv_cache_dtype" in message
    assert "revision" not in message, "keys of another backend are not allowed here"


@pytest.mark.parametrize(
    ("addition", "expected"),
    [
        ("suite: {batch_sizes: []}", "suite.batch_sizes: List should have at least 1 item"),
        ("suite: {seed: -1}", "suite.seed is -1: should be greater than or equal to 0"),
        ("generation: {seed: -1}", "generation.seed is -1: should be greater than or equal to 0"),
        ("suite: {batch_sizes: [8, -1]}", "suite.batch_sizes[1] is -1: should be greater than or equal to 1"),
        ("suite: {batch_sizes: [8, 0]}", "suite.batch_sizes[1] is 0: should be greater than or equal to 1"),
        ("suite: {batch_sizes: [8, 8]}", "suite.batch_sizes: the same entry is given twice"),
        ("suite: {score_tokens: 0}", "suite.score_tokens is 0"),
        ("suite: {score_tokens: many}", "suite.score_tokens is 'many': should be a valid integer"),
        ("suite: {phases: [prefil]}", "suite.phases[0] is 'prefil': allowed: prefill, decode; did you mean"),
        ("suite: {decode_mode: force}", "suite.decode_mode is 'force': allowed: auto, forced, resync"),
        ("drfit: {}", "drfit: unknown key. Allowed here: version, name"),
        (
            "generation: {tasks: {qa: {siez: 4}}}",
            "generation.tasks.qa.siez: unknown key; did you mean 'size'? Allowed here: score,",
        ),
        ("speed: {rounds: 0}", "speed.rounds is 0"),
        ("validity: {min_captured_mass: 2}", "validity.min_captured_mass is 2"),
        ("self_consistency: {cache: {}}", "self_consistency.cache: unknown key"),
        ("self_consistency: {batch: {max_increase: lots}}", "give a share such as 10% or a number >= 0"),
        ("reference: {model_path: x}", "reference.backend: this key is required: sglang, emulator or attach"),
        (
            "reference: {backend: vllm, model_path: x}",
            "reference.backend is 'vllm': allowed: sglang, emulator",
        ),
        ("reference: {backend: sglang}", "reference.model_path: this key is required"),
        ("reference: {backend: attach, url: ''}", "reference.url is ''"),
        (
            "reference: {backend: sglang, model_path: x, server_args: {a: [1, {b: 2}]}}",
            "reference.server_args.a: should be true, false, null, a number, text",
        ),
        ("reference: {backend: emulator, model_path: x, port: 70000}", "reference.port is 70000"),
    ],
)
def test_wrong_values_are_named(write: Write, addition: str, expected: str) -> None:
    assert expected in message_of(write(f"{MINIMAL}{addition}\n"))


@pytest.mark.parametrize(
    ("accuracy", "expected"),
    [
        ("kl_maen: {max: 1}", "accuracy.kl_maen: unknown key; did you mean 'kl_mean'?"),
        ("kl_mean: {min: 1}", "kl_mean is better lower: bound it with 'max'"),
        ("agreement: {max: 1}", "agreement is better higher: bound it with 'min'"),
        ("kl_mean: {max: 1, min: 0}", "accuracy.kl_mean: give exactly one of 'max' and 'min'"),
        ("kl_mean: {}", "accuracy.kl_mean: give exactly one of 'max' and 'min'"),
        ("kl_mean: {max: .inf}", "accuracy.kl_mean.max is inf: should be a finite number"),
        (
            "kl_mean: {max: 1, decision: maybe}",
            "accuracy.kl_mean.decision is 'maybe': allowed: point, proven_bad",
        ),
        ("decision: point", "accuracy: bounds nothing"),
        ("overrides: [{phase: decode}]", "accuracy: bounds nothing"),
        (
            "kl_mean: {max: 1}\n  overrides: [{batch_size: 7, kl_mean: {max: 2}}]",
            "accuracy.overrides[0].batch_size is 7; the suite measures only: 1, 3, 8, 32",
        ),
        ("kl_mean: {max: 1}\n  drift: {kl_mean: {max_increase: -3%}}", "accuracy.drift.kl_mean.max_increase"),
        ("kl_mean: {max: 1}\n  drift: {on_failure: warn}", "accuracy.drift: bounds nothing"),
    ],
)
def test_wrong_bounds_are_named(write: Write, accuracy: str, expected: str) -> None:
    text = MINIMAL.replace("kl_mean: {max: 0.5}", accuracy)
    assert expected in message_of(write(text))


def test_everything_wrong_is_said_at_once(write: Write) -> None:
    message = message_of(
        write(MINIMAL.replace("name: small", "name: a b") + "suite: {score_tokens: -1}\nextra: 1\n")
    )
    assert "3 things are wrong" in message
    assert "gate.yaml:2: name is 'a b': allowed are letters, digits" in message
    assert "gate.yaml:10: suite.score_tokens is -1" in message
    assert "gate.yaml:11: extra: unknown key" in message


def test_missing_keys_are_named(write: Write) -> None:
    message = message_of(write("name: x\n"))
    for key in ("version", "candidate", "baseline", "accuracy"):
        assert f"{key}: this key is required" in message


def test_duplicate_keys_are_errors(write: Write) -> None:
    message = message_of(write(MINIMAL + "baseline: other\n"))
    assert "gate.yaml:10: baseline: this key is given twice; the first is in line 7." in message


def test_not_yaml_names_the_line_and_hints_at_quotes(write: Write) -> None:
    message = message_of(write("name: x\nsuite: {prompts: ${PROMPTS}}\n"))
    assert "gate.yaml:2: not valid YAML" in message
    assert '"${NAME}"' in message


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("1" * 30, "the number is too large"),
        ("-" + "9" * 30, "the number is too large"),
        ("9" * 5000, "cannot be read"),
        ("2026-99-99", "cannot be read"),
        (r'"a\0b"', "the text holds a NUL"),
        (r'"\ud800"', "half of a surrogate pair"),
    ],
    ids=range(6),
)
@pytest.mark.parametrize("key", ["suite: {seed: %s}", "candidate: {server_args: {x: [%s]}}", "baseline: %s"])
def test_values_that_no_result_could_hold_are_refused(write: Write, key: str, value: str, why: str) -> None:
    message = message_of(write(key % value + "\n"))
    assert why in message
    assert ".yaml:1: " in message


@pytest.mark.parametrize(("text", "found"), [("", "nothing"), ("- a\n", "a list"), ("word\n", "a str")])
def test_file_without_keys(write: Write, text: str, found: str) -> None:
    assert f"must hold keys and values (name: ..., candidate: ...), not {found}" in message_of(write(text))


def test_missing_file_folder_and_binary(tmp_path: Path) -> None:
    assert "there is no such config file" in message_of(tmp_path / "none.yaml")
    assert "this is a folder" in message_of(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in message_of(tmp_path / "binary.yaml")


def test_tags_that_run_code_are_refused(write: Write) -> None:
    for value in (
        '!!python/object/apply:os.system ["true"]',
        "!!python/name:os.system",
        "!!python/object:a {}",
    ):
        message = message_of(write(f"name: {value}\n"))
        assert "gate.yaml:1: not valid YAML" in message


def test_alias_that_contains_itself(write: Write) -> None:
    assert "an alias contains itself" in message_of(write("name: &a [*a]\n"))


def test_anchors_and_merge_keys_work(write: Write) -> None:
    text = (
        MINIMAL.replace("candidate:", "candidate: &server")
        + "reference:\n  <<: *server\n  quantization: null\n"
    )
    config = load_config(write(text))
    assert isinstance(config.reference, EmulatorServer)
    assert config.reference.model_path == "tiny"
    assert config.reference.quantization is None


def test_variables(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDS", "7")
    monkeypatch.setenv("TOKEN", "1234")
    monkeypatch.delenv("NOWHERE", raising=False)
    text = MINIMAL + "speed:\n  rounds: ${ROUNDS}\n  warmup_rounds: ${NOWHERE:-4}\n"
    text = text.replace("  model_path: tiny", '  model_path: "$${HOME}/${ROUNDS}"\n  api_key: "${TOKEN}"')
    config = load_config(write(text))
    assert config.speed is not None
    assert (config.speed.rounds, config.speed.warmup_rounds) == (7, 4)
    assert isinstance(config.candidate, EmulatorServer)
    assert config.candidate.model_path == "${HOME}/7"
    assert config.candidate.api_key == "1234", "a quoted value stays text"


def test_unset_variables_are_all_named(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    message = message_of(write(MINIMAL.replace("base\n", "${NOWHERE}\n") + "speed:\n  rounds: ${NOWHERE}\n"))
    assert "gate.yaml:7: baseline: the environment variable NOWHERE is not set" in message
    assert "gate.yaml:11: speed.rounds: the environment variable NOWHERE is not set" in message


def test_secrets_are_not_shown(write: Write) -> None:
    text = MINIMAL + "reference: {backend: attach, url: 'http://x', api_key: [hunter2]}\n"
    message = message_of(write(text))
    assert "reference.api_key" in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    "text",
    [
        "reference: {backend: attach, url: 'http://user:hunter2@host:1'}",
        "reference: {backend: attach, url: 'http://hunter2@host:1'}",
        "reference: {backend: attach, url: 'https://host/v1?token=hunter2'}",
        "baseline: 'https://user:hunter2@host/base'",
        "baseline: 'https://hunter2@host/base'",
        "baseline: 's3://key:hunter2@bucket/base'",
        "baseline: 's3://bucket/base?signature=hunter2'",
        "suite: {size: 'http://user:hunter2@host'}",
    ],
)
def test_a_url_with_a_key_is_refused_and_not_shown(write: Write, text: str) -> None:
    """Configs are stored in results and shown in reports."""
    lines = [line for line in MINIMAL.splitlines() if not line.startswith(text.split(":")[0] + ":")]
    message = message_of(write("\n".join([*lines, text]) + "\n"))
    assert "hunter2" not in message
    assert text.split(":")[0] in message


def test_urls_without_keys_are_taken(write: Write) -> None:
    lines = [line for line in MINIMAL.splitlines() if not line.startswith("baseline:")]
    for url in ("ssh://user@host/base", f"https://host/base#sha256={'0' * 64}", "hf://datasets/a/b@main/c"):
        assert load_config(write("\n".join([*lines, f"baseline: '{url}'"]) + "\n")).baseline == url


def test_extends_merges_deeply_and_keeps_paths(write: Write, tmp_path: Path) -> None:
    write(MINIMAL + "suite: {size: 4, seed: 3}\n", "shared/base.yaml")
    child = write(
        "extends: shared/base.yaml\nname: child\nsuite: {size: 5}\naccuracy: {agreement: {min: 0.5}}\n"
    )
    config = load_config(child)
    assert (config.name, config.suite.size, config.suite.seed) == ("child", 5, 3)
    assert list(config.accuracy.bounds) == ["kl_mean", "agreement"]
    assert config.baseline == tmp_path / "shared/base"


def test_extends_another_backend_replaces_the_server(write: Write) -> None:
    write(MINIMAL, "base.yaml")
    child = write("extends: base.yaml\nname: c\ncandidate: {backend: sglang, model_path: x}\n")
    config = load_config(child)
    assert isinstance(config.candidate, SglangServer)
    assert config.candidate.quantization is None


def test_errors_in_a_parent_name_the_parent(write: Write) -> None:
    write(MINIMAL + "suite: {size: none}\n", "base.yaml")
    message = message_of(write("extends: base.yaml\nname: child\n"))
    assert message.startswith("base.yaml:10: suite.size is 'none'")


def test_extends_in_a_circle_or_nowhere(write: Write) -> None:
    write("extends: b.yaml\n", "a.yaml")
    write("extends: a.yaml\n", "b.yaml")
    assert "`extends` goes in a circle" in message_of(write("extends: a.yaml\n"))
    assert "extends 'none.yaml', but there is no file" in message_of(write("extends: none.yaml\n"))
    assert "allowed is a file name or a list of file names" in message_of(write("extends: {a: 1}\n"))


def test_two_configs_with_one_name(write: Write) -> None:
    paths = [write(MINIMAL, "one.yaml"), write(MINIMAL, "two.yaml")]
    with pytest.raises(ConfigError, match=r"Two configs are named 'small': .*one\.yaml and .*two\.yaml"):
        load_configs(paths)


def test_overrides_apply_in_order(write: Write) -> None:
    text = MINIMAL + (
        "  overrides:\n"
        "    - {phase: decode, kl_mean: {max: 0.7}, agreement: {min: 0.4}}\n"
        "    - {phase: decode, batch_size: 32, kl_mean: {max: 0.9}}\n"
    )
    accuracy = load_config(write(text)).accuracy
    assert {name: bound.limit for name, bound in accuracy.bounds_of("prefill", 32).items()} == {
        "kl_mean": 0.5
    }
    assert {name: bound.limit for name, bound in accuracy.bounds_of("decode", 32).items()} == {
        "kl_mean": 0.9,
        "agreement": 0.4,
    }
    assert accuracy.bounds_of("decode", 8)["kl_mean"].limit == 0.7


@pytest.mark.parametrize(
    ("written", "amount", "relative", "shown"),
    [
        ("10%", 0.1, True, "10 %"),
        ("2.5 %", 0.025, True, "2.5 %"),
        (0.01, 0.01, False, "0.01"),
        (0, 0, False, "0"),
    ],
)
def test_increase(written: object, amount: float, relative: bool, shown: str) -> None:
    increase = Increase.model_validate(written)
    assert increase.amount == pytest.approx(amount)
    assert increase.relative is relative
    assert str(increase) == shown


def test_quantization_is_expected_where_the_config_says_so(write: Write) -> None:
    plain = MINIMAL.replace("  quantization: nvfp4\n", "")
    assert not load_config(write(plain)).expects_quantization
    cache = plain.replace("model_path: tiny", "model_path: tiny\n  kv_cache_dtype: fp8_e4m3")
    assert load_config(write(cache)).expects_quantization
    assert not load_config(write(MINIMAL + "validity: {require_quantized: false}\n")).expects_quantization


def test_json_schema_names_every_metric_and_forbids_others() -> None:
    schema = json_schema()
    accuracy = schema["$defs"]["AccuracyConfig"]
    assert set(METRICS) <= set(accuracy["properties"])
    assert accuracy["additionalProperties"] is False
    assert "extends" in schema["properties"]
    assert set(GateConfig.model_fields) <= set(schema["properties"])
