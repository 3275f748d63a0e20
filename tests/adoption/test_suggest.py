"""Bounds proposed from measurements: the arithmetic, the YAML, and the command."""

from __future__ import annotations

import pytest
import yaml

from pytest_quantguard.baseline.recording import CellKey
from pytest_quantguard.errors import QuantguardError
from pytest_quantguard.suggest import as_yaml, propose

P1, P8, D1 = CellKey("prefill", 1), CellKey("prefill", 8), CellKey("decode", 1)


def one(metric: str, observed: dict[CellKey, list[float]], floor: float | None = None, margin: float = 0.25):  # type: ignore[no-untyped-def]
    floors = {} if floor is None else {str(key): {metric: floor} for key in observed}
    repetitions = {key: [{metric: value} for value in values] for key, values in observed.items()}
    return propose(repetitions, floors, name="x", metrics=[metric], margin=margin).suggestions


def test_margin_is_a_share_of_the_worst_value_rounded_outwards() -> None:
    [found] = one("kl_mean", {P1: [0.389], P8: [0.375], D1: [0.38]})
    assert (found.worst, found.best, found.worst_cell, found.spread) == (0.389, 0.375, "prefill-bs1", None)
    assert found.room == pytest.approx(0.389 / 4)
    assert (found.side, found.bound) == ("max", 0.49), "0.48625, two digits, upwards"
    assert one("kl_mean", {P1: [0.389]}, margin=0.1)[0].bound == 0.43


def test_where_higher_is_better_the_share_is_of_what_is_missing() -> None:
    [found] = one("agreement", {P1: [0.709], P8: [0.72]})
    assert (found.side, found.bound, found.worst, found.worst_cell) == ("min", 0.63, 0.709, "prefill-bs1")


def test_run_to_run_spread_can_be_the_larger_margin() -> None:
    [found] = one("kl_mean", {P1: [0.10, 0.16], P8: [0.12, 0.121]})
    assert found.spread == pytest.approx(0.06)
    assert found.bound == 0.28, "0.16 + 2 x 0.06"


def test_noise_floor_can_be_the_larger_margin() -> None:
    [found] = one("kl_mean", {P1: [0.004]}, floor=0.003)
    assert found.bound == 0.01, "0.004 + 2 x 0.003: never tighter than what the gate would refuse"
    [found] = one("agreement", {P1: [0.99]}, floor=0.98)
    assert found.bound == 0.95, "1 - (0.01 + 2 x 0.02)"


def test_a_perfect_candidate_still_gets_room() -> None:
    [found] = one("kl_mean", {P1: [0.0]}, floor=0.001)
    assert found.bound == 0.002
    assert one("kl_mean", {P1: [0.0]})[0].bound == 0.0


def test_a_worse_phase_gets_its_own_bound() -> None:
    general, decode = one("kl_mean", {P1: [0.1], P8: [0.11], D1: [0.3]})
    assert (general.phase, general.bound, general.worst_cell) == (None, 0.14, "prefill-bs8")
    assert (decode.phase, decode.bound, decode.worst_cell) == ("decode", 0.38, "decode-bs1")


def test_yaml_says_where_each_bound_comes_from() -> None:
    repetitions = {
        key: [{"kl_mean": value, "agreement": 0.9}, {"kl_mean": value + 0.001, "agreement": 0.9}]
        for key, value in ((P1, 0.1), (D1, 0.3))
    }
    proposal = propose(
        repetitions, {"prefill-bs1": {"kl_mean": 0.001}}, name="x", metrics=["kl_mean", "agreement"]
    )
    text = as_yaml(proposal, "x: y.yaml")
    assert yaml.safe_load(text) == {
        "extends": "x: y.yaml",
        "accuracy": {
            "kl_mean": {"max": 0.13},
            "agreement": {"min": 0.87},
            "overrides": [{"phase": "decode", "kl_mean": {"max": 0.38}}],
        },
    }
    assert "measured 2 times each" in text
    assert "# worst 0.101 (prefill-bs1), best 0.1; run to run 0.001; noise floor 0.001" in text


def test_unknown_in_a_cell() -> None:
    with pytest.raises(QuantguardError, match=r"kl_mean is not known in decode-bs1"):
        propose({P1: [{"kl_mean": 1.0}], D1: [{}]}, {}, name="x", metrics=["kl_mean"])
