"""Proposed bounds put into the text of a config."""

from __future__ import annotations

import pytest
import yaml

from pytest_quantguard.baseline.recording import CellKey
from pytest_quantguard.errors import ConfigError
from pytest_quantguard.suggest import Proposal, propose
from pytest_quantguard.suggest_apply import apply_to

P1, D1 = CellKey("prefill", 1), CellKey("decode", 1)


def proposal(*, decode: float = 0.1) -> Proposal:
    observed = {
        P1: [{"kl_mean": 0.1, "agreement": 0.9}],
        D1: [{"kl_mean": decode, "agreement": 0.9}],
    }
    return propose(observed, {}, name="x", metrics=["kl_mean", "agreement"])


def test_only_the_numbers_change() -> None:
    text = (
        "name: x  # mine\naccuracy:\n  # a comment\n  kl_mean: {max: 0.5, decision: point}   # kept\n"
        "  agreement:\n    min: 0.1\n  drift: {kl_mean: {max_increase: 10%}}\nspeed: null\n"
    )
    after = apply_to(text, proposal())
    assert after == text.replace("0.5", "0.13").replace(
        "min: 0.1\n", "min: 0.87   # worst 0.9 (prefill-bs1), best 0.9\n"
    )


def test_missing_bounds_are_added_to_the_section() -> None:
    after = apply_to("accuracy:\n    cosine_mean: {min: 0.9}\nspeed: null\n", proposal(decode=0.5))
    assert yaml.safe_load(after)["accuracy"] == {
        "kl_mean": {"max": 0.13},
        "agreement": {"min": 0.87},
        "overrides": [{"phase": "decode", "kl_mean": {"max": 0.63}}],
        "cosine_mean": {"min": 0.9},
    }
    assert "    kl_mean: {max: 0.13}   # worst 0.1 (prefill-bs1), best 0.1\n" in after


def test_override_of_the_phase_gets_its_number() -> None:
    text = (
        "accuracy:\n  kl_mean: {max: 1}\n  agreement: {min: 0}\n  overrides:\n"
        "    - {phase: decode, batch_size: 8, kl_mean: {max: 7}}\n    - {phase: decode, kl_mean: {max: 8}}\n"
    )
    overrides = yaml.safe_load(apply_to(text, proposal(decode=0.5)))["accuracy"]["overrides"]
    assert [entry["kl_mean"]["max"] for entry in overrides] == [7, 0.63]


def test_config_that_inherits_its_bounds() -> None:
    after = apply_to("extends: base.yaml\nname: x\n", proposal(decode=0.5))
    loaded = yaml.safe_load(after)
    assert loaded["extends"] == "base.yaml"
    assert loaded["accuracy"]["agreement"] == {"min": 0.87}
    assert loaded["accuracy"]["overrides"] == [{"phase": "decode", "kl_mean": {"max": 0.63}}]


def test_starting_points_are_no_longer_called_so() -> None:
    text = "accuracy:   # STARTING POINTS, not measurements: quantguard suggest\n  kl_mean: {max: 1}\n"
    assert "STARTING" not in apply_to(text, proposal())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("accuracy: {kl_mean: {max: 1}}\n", "is written on one line"),
        (
            "accuracy:\n  kl_mean: {max: 1}\n  overrides:\n    - {batch_size: 8, kl_mean: {max: 7}}\n",
            "kl_mean in decode belong among them is yours to say",
        ),
    ],
)
def test_what_it_does_not_touch(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_to(text, proposal(decode=0.5))
