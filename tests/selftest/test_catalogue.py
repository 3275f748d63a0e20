"""Which faults a self-test tries."""

from __future__ import annotations

import pytest

from pytest_quantguard.emulator.faults import FAULTS, parse_fault
from pytest_quantguard.errors import ConfigError
from pytest_quantguard.selftest.catalogue import check_marks, choose_faults, must_be_caught, split_names

NVFP4 = {
    **{f"model.layers.{layer}.mlp.down_proj": "nvfp4" for layer in range(2)},
    **{f"model.layers.{layer}.self_attn.{name}_proj": "nvfp4" for layer in range(2) for name in "qkv"},
    "lm_head": "bf16",
    "kv_cache": "fp8_e4m3",
}


def test_names_are_split_at_commas_that_do_not_belong_to_a_fault() -> None:
    text = "nibble_swap:module=*.down_proj,runaway, padded_rows_leak:module=a,ratio=2,,slow_step"
    assert split_names(text) == [
        "nibble_swap:module=*.down_proj",
        "runaway",
        "padded_rows_leak:module=a,ratio=2",
        "slow_step",
    ]
    assert split_names("") == []


def test_without_names_the_whole_catalogue_is_tried_once() -> None:
    chosen = choose_faults((), NVFP4, 1000)
    assert [one.fault.name for one in chosen] == list(FAULTS)
    assert all(one.fault.specification == one.fault.name for one in chosen)
    more = choose_faults((), NVFP4, 1000, variants=True)
    assert len(more) == len(FAULTS) + sum(len(kind.variants) for kind in FAULTS.values())


def test_what_cannot_act_or_be_seen_is_not_tried() -> None:
    skipped = {one.fault.name: one.skipped for one in choose_faults((), NVFP4, 1000) if one.skipped}
    assert set(skipped) == {"slow_step", "runaway"}
    fp8 = {name: "fp8" if kind == "nvfp4" else kind for name, kind in NVFP4.items()}
    reasons = {one.fault.name: one.skipped for one in choose_faults((), fp8, 1000)}
    assert reasons["nibble_swap"] == (
        "nothing in this model has what it damages (formats: bf16, fp8, fp8_e4m3)"
    )
    assert reasons["global_scale_drift"] is None


def test_faults_that_set_in_late_are_moved_into_the_texts() -> None:
    chosen = {one.fault.name: one for one in choose_faults((), NVFP4, 100)}
    moved = chosen["long_context_drop"]
    assert moved.fault.specification == "long_context_drop:position=50"
    assert moved.note is not None
    assert "position 128, after the end of every text" in moved.note
    assert chosen["decode_tail_precision"].note is None, "96 lies within 100 tokens"
    (asked,) = choose_faults(("long_context_drop",), NVFP4, 100)
    assert asked.fault.specification == "long_context_drop", "what was asked for stays as it is"


@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        (["subtle"], True),
        (["global_scale_drift"], True),
        (["global_scale_drift:percent=5"], True),
        (["global_scale_drift:percent=6"], False),
        (["catastrophic", "clear"], False),
    ],
)
def test_marks(marked: list[str], expected: bool) -> None:
    check_marks(marked)
    assert must_be_caught(parse_fault("global_scale_drift:percent=5", FAULTS), marked) is expected


def test_unknown_marks() -> None:
    with pytest.raises(ConfigError, match=r"selftest.must_catch: .*'subtl'.*severities catastrophic"):
        check_marks(["clear", "subtl"])
