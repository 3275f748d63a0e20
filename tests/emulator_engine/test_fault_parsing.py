"""Fault specifications: what they mean, and the messages about those that mean nothing."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest

from pytest_quantguard.emulator.faults import FAULTS, Fault, parse_fault
from pytest_quantguard.errors import ConfigError

NAMES = [
    "nibble_swap",
    "scale_swizzle",
    "fused_scale_max",
    "fused_scale_first",
    "fused_scale_uninitialised",
    "global_scale_inverted",
    "global_scale_missing",
    "block_scale_roll",
    "scale_round_up",
    "scale_round_down",
    "one_scale_for_fused",
    "input_scale_zero",
    "zero_row_nan",
    "rows_zero_at_batch",
    "padded_rows_leak",
    "nan_at_batch",
    "kv_fnuz",
    "kv_scale_one",
    "kv_read_unscaled",
    "decode_gain",
    "decode_tail_precision",
    "chunk_kv_unscaled",
    "cached_page_stale",
    "long_context_drop",
    "decode_position_off_by_one",
    "lm_head_quantized",
    "lm_head_zero",
    "layer_wrong_format",
    "shard_scale_mixup",
    "logprob_temperature",
    "logprob_sentinel",
    "logprob_shift",
    "rows_permuted",
    "double_bos",
    "global_scale_drift",
    "slow_step",
    "runaway",
]


def test_the_catalogue_is_complete() -> None:
    assert sorted(FAULTS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_fault_says_what_it_is(name: str) -> None:
    kind = FAULTS[name]
    fault = kind()
    assert kind.name == name
    assert len(kind.summary) > 20
    assert kind.shows_in
    assert kind.source
    assert fault.severity in ("catastrophic", "clear", "subtle", "none")
    assert parse_fault(name, FAULTS) == fault
    assert fault.specification == name


@pytest.mark.parametrize(
    "specification", [f"{name}:{variant}" for name in NAMES for variant in FAULTS[name].variants]
)
def test_variants_are_specifications_and_differ_from_the_default(specification: str) -> None:
    fault = parse_fault(specification, FAULTS)
    assert fault != type(fault)()
    assert parse_fault(fault.specification, FAULTS) == fault


def test_parameters_have_types() -> None:
    fault = parse_fault(" rows_zero_at_batch: minimum = 4 , module=*.o_proj ", FAULTS)
    assert dataclasses.asdict(fault) == {"module": "*.o_proj", "minimum": 4, "every": 8}
    assert fault.specification == "rows_zero_at_batch:module=*.o_proj,minimum=4"
    assert parse_fault("double_bos:counted=False", FAULTS) == FAULTS["double_bos"](counted=False)
    assert parse_fault("decode_gain:gain=1e-1", FAULTS) == FAULTS["decode_gain"](gain=0.1)


@pytest.mark.parametrize(
    ("specification", "message"),
    {
        "kv_scale_on": "unknown fault 'kv_scale_on' (did you mean 'kv_scale_one'?); known faults: block",
        "": "unknown fault ''; known faults: ",
        "decode_gain:gian=2": "unknown parameter 'gian' (did you mean 'gain'?); its parameters: module, gain",
        "logprob_sentinel:x=1": "fault logprob_sentinel: unknown parameter 'x'; its parameters: none",
        "decode_gain:gain": "fault decode_gain: expected key=value, found 'gain' in 'decode_gain:gain'",
        "decode_gain:gain=1,gain=2": "fault decode_gain: parameter 'gain' is given twice",
        "decode_gain:gain=big": "fault decode_gain: parameter gain: expected a number, found 'big'",
        "nan_at_batch:minimum=1.5": "nan_at_batch: parameter minimum: expected a whole number, found '1.5'",
        "double_bos:counted=maybe": "double_bos: parameter counted: expected true or false, found 'maybe'",
        "slow_step:phase=warm": "parameter phase: expected one of all, prefill, decode, found 'warm'",
        "rows_zero_at_batch:every=0": "fault rows_zero_at_batch: every is 0; a number from 1 on is needed",
    }.items(),
)
def test_wrong_specifications(specification: str, message: str) -> None:
    with pytest.raises(ConfigError) as problem:
        parse_fault(specification, FAULTS)
    assert message in str(problem.value)


def test_optional_parameters_take_none() -> None:
    @dataclasses.dataclass(frozen=True)
    class Example(Fault):
        name: typing.ClassVar[str] = "example"
        limit: int | None = 3

        def register(self, hooks: typing.Any) -> None:
            """Nothing."""

    registry: dict[str, type[Fault]] = {"example": Example}
    assert parse_fault("example:limit=none", registry) == Example(limit=None)
    assert parse_fault("example:limit=7", registry) == Example(limit=7)


def test_the_documentation_lists_every_fault_as_it_is() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "faults.md").read_text(encoding="utf-8").splitlines()
    rows = {line.split("`")[1]: line for line in lines if line.startswith("| `")}
    assert list(rows) == list(FAULTS)
    for name, kind in FAULTS.items():
        assert f"| {kind.summary} | {kind().severity} | {kind.shows_in} |" in rows[name]
        for parameter in (*(field.name for field in dataclasses.fields(kind)), *kind.variants):
            assert f"`{parameter}" in rows[name], name
        assert rows[name].endswith(f"| {kind.source} |")
