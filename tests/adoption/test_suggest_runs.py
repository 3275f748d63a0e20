"""Bounds of speed and generation proposed from results, what they change, and how they get into a config."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_quantguard.config import GateConfig
from pytest_quantguard.config_file import load_config
from pytest_quantguard.errors import ConfigError
from pytest_quantguard.results import CheckResult, GenerationFigures, GenerationResult, RunResult
from pytest_quantguard.stats.speed import noise_band
from pytest_quantguard.suggest import KeyBound, Proposal, Suggestion, as_yaml
from pytest_quantguard.suggest_apply import apply_to
from pytest_quantguard.suggest_changes import Change, change_lines, changes_of
from pytest_quantguard.suggest_runs import propose_from_runs, relative_error, score_error
from tests.report.test_terminal import result

CONFIG: dict[str, Any] = {
    "version": 1,
    "name": "x",
    "candidate": {"backend": "emulator", "model_path": "smollm2-135m"},
    "baseline": "b",
    "accuracy": {
        "kl_mean": {"max": 0.5},
        "agreement": {"min": 0.9},
        "overrides": [{"phase": "decode", "kl_mean": {"max": 0.8}}],
    },
    "speed": {
        "levels": [1],
        "scenarios": [{"kind": "decode_heavy"}, {"kind": "prefill_heavy"}],
        "max_slowdown": "8%",
        "ttft_p99_ms": {"max": 100},
        "output_throughput": {"min": 50},
        "overrides": [{"scenario": "prefill_heavy", "ttft_p99_ms": {"max": 900}}],
    },
    "generation": {"tasks": {"qa": {"score": {"min": 0.2}}, "mcq": {}}, "relative_score": {"min": 0.9}},
}


def config(tmp_path: Path, **changes: Any) -> GateConfig:
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, **changes}), encoding="utf-8")
    return load_config(path)


def timed(
    scenario: str, rounds: list[float], ttft: float, throughput: float, against: str = "bound"
) -> CheckResult:
    return CheckResult.model_validate(
        {
            "id": f"speed[{scenario}-1]",
            "kind": "speed",
            "outcome": "passed",
            "speed": {
                "scenario": scenario,
                "level": "1",
                "requests": 4,
                "concurrency": 1,
                "input_tokens": 4,
                "output_tokens": 4,
                "rounds": len(rounds),
                "warmup_rounds": 1,
                "steady": True,
                "compared": "duration",
                "figures": {"p99_ttft_ms": ttft, "output_throughput": throughput},
                "intervals": {},
                "by_round": {"duration": rounds},
                "scatter": 0.0,
                "errors": 0,
                "verdicts": [{"against": against, "figure": "duration", "status": "held", "sentence": ""}],
            },
        }
    )


def answered(score: float, relative: float | None, interval: tuple[float, float] | None) -> GenerationFigures:
    zeros = dict.fromkeys(
        (
            *("runaways", "empty_answers", "loops", "echoes", "reference_runaways", "reference_empty"),
            *("reference_loops", "reference_echoes", "output_tokens", "reference_tokens", "lost", "won"),
        ),
        0,
    )
    return GenerationFigures(
        prompts=100,
        score=score,
        reference_score=0.8,
        relative_score=relative,
        relative_interval=interval,
        mcnemar_p=1.0,
        text_agreement=1.0,
        **zeros,
    )


def run(
    checks: list[CheckResult], overall: GenerationFigures | None = None, **tasks: GenerationFigures
) -> RunResult:
    generation = None
    if overall is not None:
        generation = GenerationResult(
            route="native", tasks=tasks, overall=overall, concurrency=1, seconds=1.0
        )
    return result(checks, generation=generation)


def by_key(bounds: list[KeyBound]) -> dict[str, KeyBound]:
    return {".".join(bound.path): bound for bound in bounds}


STEADY = [1.0] * 5


def test_slowdown_is_twice_the_noise_and_at_least_five_percent(tmp_path: Path) -> None:
    found = by_key(
        propose_from_runs([run([timed("decode_heavy", STEADY, 80, 60)])], config(tmp_path), 0.25)[0]
    )
    slowdown = found["speed.max_slowdown"]
    assert (slowdown.new, slowdown.old, slowdown.shown) == (0.05, 0.08, "5%")
    noisy = [[1.0, 1.1, 0.95, 1.0, 1.02], [1.2, 1.25, 1.2, 1.3, 1.2], [1.0, 1.0, 1.1, 1.0, 1.0]]
    runs = [run([timed("decode_heavy", rounds, 80, 60)]) for rounds in noisy]
    slowdown = by_key(propose_from_runs(runs, config(tmp_path), 0.25)[0])["speed.max_slowdown"]
    assert slowdown.new == math.ceil(200 * noise_band(noisy)) / 100 > 0.2
    assert "3 runs" in slowdown.reason


def test_slowdown_needs_an_accepted_run_once(tmp_path: Path) -> None:
    speed = {key: value for key, value in CONFIG["speed"].items() if key != "max_slowdown"}
    without = config(tmp_path, speed=speed)
    bounds, notes = propose_from_runs([run([timed("decode_heavy", STEADY, 80, 60)])], without, 0.25)
    assert "speed.max_slowdown" not in by_key(bounds)
    assert "quantguard accept CONFIG" in notes[0]
    bounds, _ = propose_from_runs([run([timed("decode_heavy", STEADY, 80, 60, "accepted")])], without, 0.25)
    assert by_key(bounds)["speed.max_slowdown"].old is None
    few = propose_from_runs([run([timed("decode_heavy", [1.0], 80, 60, "accepted")])], without, 0.25)
    assert "speed.max_slowdown" not in by_key(few[0])
    assert "needs at least 5 rounds" in few[1][0]


def test_absolute_figures_only_where_the_config_has_them_and_for_its_cells(tmp_path: Path) -> None:
    runs = [
        run([timed("decode_heavy", STEADY, 80, 60), timed("prefill_heavy", STEADY, 700, 40)]),
        run([timed("decode_heavy", STEADY, 82, 61), timed("prefill_heavy", STEADY, 710, 42)]),
    ]
    found = by_key(propose_from_runs(runs, config(tmp_path), 0.25)[0])
    ttft, throughput = found["speed.ttft_p99_ms.max"], found["speed.output_throughput.min"]
    assert (ttft.new, ttft.old) == (110, 100), "82 + 25 % = 102.5, two digits, upwards; 710 has its override"
    assert (throughput.new, throughput.old) == (30, 50), "40 - 25 %, downwards"
    apart = [run([timed("decode_heavy", STEADY, ttft, 60)]) for ttft in (40, 80)]
    assert by_key(propose_from_runs(apart, config(tmp_path), 0.25)[0])["speed.ttft_p99_ms.max"].new == 160


def test_floors_of_scores_leave_two_standard_errors(tmp_path: Path) -> None:
    overall, task = answered(0.7, 0.96, (0.96 - 0.0392, 0.96 + 0.0392)), answered(0.5, None, None)
    better = answered(0.7, 0.99, (0.99 - 0.0392, 0.99 + 0.0392))
    bounds, notes = propose_from_runs(
        [run([], overall, qa=task, mcq=task), run([], better, qa=task)], config(tmp_path), 0.25
    )
    found = by_key(bounds)
    assert set(found) == {"generation.relative_score.min", "generation.tasks.qa.score.min"}, "those it has"
    assert found["generation.relative_score.min"].new == 0.92, "0.96 - 2 x 0.02"
    wilson = math.sqrt(52 / 104 * 52 / 104 / 104)
    assert found["generation.tasks.qa.score.min"].new == math.floor(100 * (0.5 - 2 * wilson)) / 100 == 0.4
    assert found["generation.tasks.qa.score.min"].old == 0.2
    assert notes == ["speed: the results hold no times, so no bound of it is proposed"]


def test_errors_of_scores_without_a_doubt() -> None:
    assert score_error(answered(1.0, 1.0, (1.0, 1.0))) == pytest.approx(math.sqrt(102 * 2 / 104**3))
    assert relative_error(answered(0.8, 1.0, (1.0, 1.0))) == 1 / 80, "what one question makes"


def test_what_is_not_measured_is_said(tmp_path: Path) -> None:
    zero = answered(0.0, None, None)
    bounds, notes = propose_from_runs([run([], zero, qa=zero)], config(tmp_path, speed=None), 0.25)
    assert bounds == []
    assert notes == [
        "generation.relative_score: not measured; the reference may have scored 0",
        "generation.tasks.qa.score: 0.000 on 100 questions is too little to be bounded",
    ]
    assert "run with -m slow" in propose_from_runs([run([])], config(tmp_path, speed=None), 0.25)[1][0]


def suggestion(metric: str, side: str, bound: float, phase: Any = None) -> Suggestion:
    return Suggestion(metric, side, bound, phase, 0.1, 0.1, "decode-bs1", None, None, 0.1)


def test_changes_say_what_becomes_looser(tmp_path: Path) -> None:
    slowdown = KeyBound(("speed", "max_slowdown"), "max", 0.1, 0.08, "r", "10%", relative=True)
    floor = KeyBound(("generation", "relative_score", "min"), "min", 0.95, 0.9, "r", "0.95")
    items = (
        suggestion("kl_mean", "max", 0.4),
        suggestion("kl_mean", "max", 0.9, "decode"),
        suggestion("agreement", "min", 0.9),
        suggestion("cosine_mean", "min", 0.9),
    )
    changes = changes_of(Proposal("x", 0.25, 1, 4, items, (slowdown, floor)), config(tmp_path))
    assert [(change.key, change.direction) for change in changes] == [
        ("accuracy.kl_mean", "tighter"),
        ("accuracy.kl_mean in decode", "looser"),
        ("accuracy.agreement", "same"),
        ("accuracy.cosine_mean", "new"),
        ("speed.max_slowdown", "looser"),
        ("generation.relative_score", "tighter"),
    ]
    assert change_lines(changes) == [
        "  accuracy.kl_mean            max  0.5 -> 0.4   tighter",
        "  accuracy.kl_mean in decode  max  0.8 -> 0.9   LOOSER",
        "  accuracy.agreement          min  0.9 -> 0.9   same",
        "  accuracy.cosine_mean        min    - -> 0.9   new",
        "  speed.max_slowdown          max   8% -> 10%   LOOSER",
        "  generation.relative_score   min  0.9 -> 0.95  tighter",
    ]
    assert Change("k", "min", 0.5, 0.4).direction == Change("k", "max", 0.4, 0.5).direction == "looser"


KEYS = (
    KeyBound(("speed", "max_slowdown"), "max", 0.05, 0.08, "measured noise 1%", "5%", relative=True),
    KeyBound(("speed", "ttft_p99_ms", "max"), "max", 110, 100, "measured 82", "110"),
    KeyBound(("generation", "tasks", "qa", "score", "min"), "min", 0.4, 0.2, "measured 0.5", "0.4"),
)


def test_as_yaml_and_applied_they_are_the_same_config(tmp_path: Path) -> None:
    proposal = Proposal("x", 0.25, 1, 4, (suggestion("kl_mean", "max", 0.4),), KEYS, ("why not",))
    text = as_yaml(proposal, "x.yaml")
    assert yaml.safe_load(text) == {
        "extends": "x.yaml",
        "accuracy": {"kl_mean": {"max": 0.4}},
        "speed": {"max_slowdown": "5%", "ttft_p99_ms": {"max": 110}},
        "generation": {"tasks": {"qa": {"score": {"min": 0.4}}}},
    }
    assert text.endswith("# why not\n")
    config(tmp_path)
    (tmp_path / "more.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "child.yaml").write_text(apply_to("extends: x.yaml\nname: x\n", proposal), encoding="utf-8")
    (tmp_path / "own.yaml").write_text(
        apply_to((tmp_path / "x.yaml").read_text(encoding="utf-8"), proposal), encoding="utf-8"
    )
    loaded = [load_config(tmp_path / name) for name in ("more.yaml", "child.yaml", "own.yaml")]
    assert loaded[0] == loaded[1] == loaded[2]
    assert loaded[0].speed is not None
    assert loaded[0].speed.max_slowdown == 0.05


def test_applied_again_the_reason_is_the_new_one() -> None:
    text = (
        "accuracy:\n  kl_mean: {max: 1}\nspeed:\n  # mine\n  levels: [1]\n"
        "  ttft_p99_ms: {max: 7}   # mine too\n"
    )
    once = apply_to(text, Proposal("x", 0.25, 1, 4, (suggestion("kl_mean", "max", 0.4),), KEYS[:2]))
    assert once == (
        "accuracy:\n  kl_mean: {max: 0.4}   # worst 0.1 (decode-bs1), best 0.1\nspeed:\n  # mine\n"
        "  max_slowdown: 5%   # measured noise 1%\n  levels: [1]\n  ttft_p99_ms: {max: 110}   # mine too\n"
    )
    other = KeyBound(("speed", "max_slowdown"), "max", 0.07, 0.05, "measured noise 3%", "7%", relative=True)
    again = apply_to(once, Proposal("x", 0.25, 1, 4, (), (other,)))
    assert "  max_slowdown: 7%   # measured noise 3%\n" in again
    assert again.count("measured noise") == 1


def test_sections_on_one_line_get_their_keys_too() -> None:
    other = KeyBound(("generation", "tasks", "mcq", "score", "min"), "min", 0.3, None, "r", "0.3")
    text = "accuracy:\n  kl_mean: {max: 1}\nspeed: {levels: [1]}\n"
    after = apply_to(text, Proposal("x", 0.25, 1, 4, (), (*KEYS, other)))
    assert yaml.safe_load(after) == {
        "accuracy": {"kl_mean": {"max": 1}},
        "speed": {"levels": [1], "max_slowdown": "5%", "ttft_p99_ms": {"max": 110}},
        "generation": {"tasks": {"qa": {"score": {"min": 0.4}}, "mcq": {"score": {"min": 0.3}}}},
    }


@pytest.mark.parametrize("empty", ["speed: {}", "speed: null", "speed:"])
def test_an_empty_section_is_not_added_to(empty: str) -> None:
    with pytest.raises(ConfigError, match=r"`speed` has nothing in it.*speed.max_slowdown belongs"):
        apply_to(f"accuracy:\n  kl_mean: {{max: 1}}\n{empty}\n", Proposal("x", 0.25, 1, 4, (), KEYS[:1]))
