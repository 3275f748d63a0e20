"""Sizes that no machine has room or time for are refused when the config is read, by key and number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_quantguard.config_file import load_config
from pytest_quantguard.config_schema import json_schema
from pytest_quantguard.config_speed import Replay
from pytest_quantguard.errors import ConfigError
from pytest_quantguard.measure.load import workload
from pytest_quantguard.measure.load.workload import build_workload

TIMES = {
    "startup_timeout", "startup_hard_limit", "request_timeout", "stall_timeout", "deadline", "request_rate",
    "budget_factor",
}  # fmt: skip
"""Numbers that something waits or multiplies by; the others are bounds and weights, where any will do."""


def read(folder: Path, **sections: Any) -> None:
    config: dict[str, Any] = {
        "version": 1,
        "name": "huge",
        "candidate": {"backend": "emulator", "model_path": "m"},
        "baseline": "b",
        "accuracy": {"kl_mean": {"max": 1}},
    }
    path = folder / "gate.yaml"
    path.write_text(yaml.safe_dump({**config, **sections}), encoding="utf-8")
    load_config(path)


def numbers(
    schema: dict[str, Any],
    definitions: dict[str, Any],
    path: tuple[str, ...] = (),
    above: tuple[str, ...] = (),
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """(key path, schema) of every number that a config can hold."""
    name = schema.get("$ref", "").rsplit("/", 1)[-1]
    if name in above:
        return
    if name:
        yield from numbers(definitions[name], definitions, path, (*above, name))
    for alternative in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("prefixItems", ())):
        yield from numbers(alternative, definitions, path, above)
    if schema.get("type") in ("integer", "number"):
        yield path, schema
    for key, inner in schema.get("properties", {}).items():
        yield from numbers(inner, definitions, (*path, key), above)
    if isinstance(schema.get("items"), dict):
        yield from numbers(schema["items"], definitions, path, above)
    if isinstance(schema.get("additionalProperties"), dict):
        yield from numbers(schema["additionalProperties"], definitions, (*path, "*"), above)


def test_every_count_and_time_has_a_largest_value() -> None:
    schema = json_schema()
    found = list(numbers(schema, schema["$defs"]))
    assert len({path for path, _ in found}) > 100
    without = {
        ".".join(path)
        for path, number in found
        if (number["type"] == "integer" or path[-1] in TIMES)
        and not {"maximum", "exclusiveMaximum", "const"} & number.keys()
        and "server_args" not in path
    }
    assert without == set()
    assert {path[-1] for path, _ in found} >= TIMES


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e300, 10**12, -1, 0])
@pytest.mark.parametrize("key", ["startup_timeout", "startup_hard_limit", "request_timeout"])
def test_times_that_nothing_can_wait(tmp_path: Path, key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"candidate\.{key} is .*: should be"):
        read(tmp_path, candidate={"backend": "emulator", "model_path": "m", key: value})


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"suite": {"size": 10**6}}, "suite: size x max_prompt_tokens is 512,000,000 tokens"),
        ({"suite": {"size": 32, "max_prompt_tokens": 10**7}}, "size x max_prompt_tokens is 320,000,000"),
        ({"suite": {"size": 10**9}}, "suite.size is 1000000000: should be less than or equal to 1000000"),
        (
            {"suite": {"size": 10**4, "top_logprobs": 10**6}},
            "x repeats is 30,720,000,000,000 log-probabilities; at most 1,000,000,000",
        ),
        ({"suite": {"score_tokens": 10**6}}, "size x score_tokens x top_logprobs x phases"),
        ({"suite": {"batch_sizes": [10**9]}}, r"suite.batch_sizes\[0\] is 1000000000"),
        ({"suite": {"repeats": 10**6}}, "suite.repeats is 1000000"),
        (
            {"speed": {"scenarios": [{"kind": "prefill_heavy", "requests": 10**6, "input_tokens": 10**7}]}},
            r"speed.scenarios\[0\]: requests x input_tokens is 10,000,000,000,000 tokens; at most 50,000,000",
        ),
        (
            {"speed": {"scenarios": [{"kind": "mixed", "requests": 10**6, "input_tokens": [1, 10**7]}]}},
            "requests x input_tokens is 10,000,000,000,000",
        ),
        (
            {"speed": {"scenarios": [{"kind": "decode_heavy", "requests": 10**5, "output_tokens": 10**4}]}},
            "requests x output_tokens is 1,000,000,000",
        ),
        ({"speed": {"rounds": 10**9}}, "speed.rounds is 1000000000"),
        ({"speed": {"warmup_rounds": 10**9}}, "speed.warmup_rounds is 1000000000"),
        ({"speed": {"levels": [10**9]}}, r"speed.levels\[0\]"),
        ({"generation": {"tasks": {"qa": {"size": 10**6}}}}, "generation.tasks.qa: size x tokens is 512,000"),
        ({"generation": {"tasks": {"niah": {"tokens": 10**7}}}}, "size x tokens is 300,000,000"),
        ({"generation": {"max_new_tokens": 10**9}}, "generation.max_new_tokens is 1000000000"),
        ({"generation": {"deadline": 10**12}}, "generation.deadline is 1000000000000"),
        ({"generation": {"budget_factor": float("inf")}}, "generation.budget_factor is inf"),
        ({"selftest": {"clean_runs": 10**9}}, "selftest.clean_runs is 1000000000"),
        ({"candidate": {"backend": "emulator", "model_path": "m", "threads": 10**9}}, "candidate.threads is"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_products_and_counts(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, **sections)


def test_large_gates_are_still_gates(tmp_path: Path) -> None:
    read(
        tmp_path,
        suite={"size": 1000, "max_prompt_tokens": 8192},
        speed={"scenarios": [{"kind": "prefill_heavy", "requests": 48, "input_tokens": 10**6}]},
        generation={"tasks": {"niah": {"size": 50, "tokens": 10**6}}},
    )


def test_a_replay_is_counted_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r.jsonl").write_text('{"question": "aaaa", "model_response": "bb"}\n' * 10, encoding="utf-8")
    scenario = Replay(kind="replay", file=Path("r.jsonl"))

    def build() -> Any:
        return build_workload(
            scenario, seed=0, vocab_size=300, tokenize=lambda text: list(text.encode()), folder=tmp_path
        )

    assert build().input_tokens == 40
    for most, keys, tokens in ((39, "prompts", 40), (19, "prompts", 40)):
        monkeypatch.setattr(workload, "MOST_TOKENS", most)
        with pytest.raises(
            ConfigError, match=rf"the {keys} of .*r\.jsonl are {tokens} tokens; at most {most} "
        ):
            build()


@pytest.mark.parametrize("depth", [60, 300, 3000])
def test_values_nested_too_deeply(tmp_path: Path, depth: int) -> None:
    (tmp_path / "gate.yaml").write_text("version: 1\nname: " + "[" * depth + "]" * depth, encoding="utf-8")
    with pytest.raises(ConfigError, match="values are nested too deeply"):
        load_config(tmp_path / "gate.yaml")
