"""The composite score from timed cells, with and without a task score."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_quantguard.config_speed import SpeedConfig
from pytest_quantguard.errors import BaselineError, QuantguardError
from pytest_quantguard.gate import speed_score
from pytest_quantguard.gate.plan import Check
from pytest_quantguard.gate.speed_score import judge_score
from pytest_quantguard.results import CheckResult

CHECK = Check("speed", "speed[score]", metric="score")
TIMES = {"1": (4.0, 2.0), "8": (3.0, 1.0), "max": (2.0, 2.0)}
"""Level -> the reference's and the candidate's seconds."""


def load(seconds: float, failed: int = 0, spread: float = 0.0) -> Any:
    times = [seconds * (1 + spread * number) for number in (-1, 0, 1)]
    return SimpleNamespace(
        times=times,
        broken=lambda allowed: failed > allowed,
        concurrency=1,
        workload=SimpleNamespace(scenario="decode_heavy"),
    )


def timed(reference: float, candidate: float, **changes: Any) -> Any:
    return SimpleNamespace(
        load=load(candidate, **changes),
        reference=load(reference),
        paired=False,
        alone=None,
        state=SimpleNamespace(disturbances=[], throttling=[]),
    )


def judge(
    monkeypatch: pytest.MonkeyPatch,
    *,
    relative: float | None = None,
    generation: bool = False,
    cells: dict[str, Any] | None = None,
    **score: Any,
) -> CheckResult:
    speed = SpeedConfig.model_validate(
        {"scenarios": [{"kind": "decode_heavy"}], "score": score, "levels": [1, 8, "max"]}
    )
    known = cells or {level: timed(*seconds) for level, seconds in TIMES.items()}
    parts = {
        ("speed", "decode_heavy", "max" if level == "max" else int(level)): cell
        for level, cell in known.items()
    }
    trial = SimpleNamespace(
        config=SimpleNamespace(speed=speed, generation=object() if generation else None),
        known=lambda kind: parts if kind == "speed" else {},
        config_path=Path("gate.yaml"),
        running_server=lambda: None,
        options=SimpleNamespace(output=Path("out")),
    )
    measured = None if relative is None else SimpleNamespace(pairs=())
    scored = relative is not None and not math.isnan(relative)
    metrics = {"relative_score": SimpleNamespace(value=relative)} if scored else {}
    monkeypatch.setattr(speed_score, "known_generation", lambda _: measured)
    monkeypatch.setattr(speed_score, "figures_of", lambda _: SimpleNamespace(metrics=metrics))
    return judge_score(cast(Any, trial), CHECK)


def test_the_default_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    result = judge(monkeypatch)
    assert result.value == pytest.approx(0.4 * 2 + 0.3 * 3 + 0.3 * 1)
    assert (result.outcome, result.bound) == ("passed", None)
    assert "the config has no `generation`, so correctness is not part of it" in result.message


@pytest.mark.parametrize(("relative", "coefficient"), [(0.96, 0.0), (0.98, 0.5), (1.0, 1.0)])
def test_correctness_counts(monkeypatch: pytest.MonkeyPatch, relative: float, coefficient: float) -> None:
    result = judge(monkeypatch, relative=relative, generation=True, min=1.9)
    assert result.value == pytest.approx(coefficient * 2.0)
    assert result.outcome == ("passed" if coefficient == 1 else "failed")
    assert f"{relative:.1%} of the reference's task score" in " ".join(result.message.split())


def test_without_answers_there_is_no_task_score(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BaselineError, match="run the generation checks too"):
        judge(monkeypatch, generation=True)


def test_a_reference_that_scores_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BaselineError, match="the reference scores 0, a share of which is not defined"):
        judge(monkeypatch, relative=math.nan, generation=True)


def test_scattered_rounds_make_a_bounded_score_doubtful(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {level: timed(*seconds, spread=0.4) for level, seconds in TIMES.items()}
    assert judge(monkeypatch, cells=cells).outcome == "passed", "nothing is asked of it"
    result = judge(monkeypatch, cells=cells, min=1.0)
    assert result.outcome == "warned"
    assert "inconclusive" in result.message
    assert "scatter by 40.0%" in result.message


def test_cells_that_failed_or_were_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    good = {level: timed(*seconds) for level, seconds in TIMES.items()}
    with pytest.raises(QuantguardError, match=r"speed\[decode_heavy-8\], which was not timed"):
        judge(monkeypatch, cells={"1": good["1"], "max": good["max"]})
    with pytest.raises(QuantguardError, match=r"speed\[decode_heavy-8\], in which requests failed"):
        judge(monkeypatch, cells={**good, "8": timed(3.0, 1.0, failed=1)})
