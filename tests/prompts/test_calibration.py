from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from pytest_quantguard.errors import ConfigError
from pytest_quantguard.prompts.builtin import task_prompts
from pytest_quantguard.prompts.calibration import (
    CalibrationSet,
    Kind,
    compose_calibration_set,
    format_calibration_set,
    kind_of,
    write_calibration_set,
)
from pytest_quantguard.prompts.duplicates import exact_key, shingles, similarity
from pytest_quantguard.prompts.lengths import estimate_tokens
from pytest_quantguard.prompts.prompt import Prompt
from pytest_quantguard.prompts.suite import read_prompts
from pytest_quantguard.prompts.tasks import TASKS

pytest.importorskip("datasketch")


def evaluation() -> list[Prompt]:
    return [p for task in TASKS for p in task_prompts(task, 12, 500, languages=("en", "en", "zh"), seed=3)]


def shares(prompts: tuple[Prompt, ...] | list[Prompt]) -> dict[str, float]:
    return {task: sum(prompt.task == task for prompt in prompts) / len(prompts) for task in TASKS}


@pytest.fixture(scope="module")
def scaled() -> CalibrationSet:
    return compose_calibration_set(evaluation(), size=120, max_tokens=2048, scale={"low_meaning": 0.3})


def test_the_mix_is_the_requested_one(scaled: CalibrationSet) -> None:
    """Computed anew from the evaluation set: each low-meaning prompt counts 0.3."""
    weights = [(kind_of(prompt), 0.3 if kind_of(prompt).low_meaning else 1.0) for prompt in evaluation()]
    total = sum(weight for _, weight in weights)
    for task in TASKS:
        requested = sum(weight for kind, weight in weights if kind.task == task) / total
        assert shares(scaled.prompts)[task] == pytest.approx(requested, abs=0.02)
    low = sum(weight for kind, weight in weights if kind.low_meaning) / total
    assert sum(kind_of(prompt).low_meaning for prompt in scaled.prompts) / 120 == pytest.approx(low, abs=0.02)
    chinese = sum(weight for kind, weight in weights if kind.language == "zh") / total
    assert sum(prompt.language == "zh" for prompt in scaled.prompts) / 120 == pytest.approx(chinese, abs=0.02)
    assert len(scaled.prompts) == 120
    assert len({prompt.id for prompt in scaled.prompts}) == 120


def test_nothing_leaks_and_nothing_repeats(scaled: CalibrationSet) -> None:
    """By brute force over all pairs."""
    theirs = [shingles(prompt.text or "") for prompt in evaluation()]
    own = [shingles(prompt.text or "") for prompt in scaled.prompts]
    assert max(similarity(one, other) for one in own for other in theirs) < 0.8
    assert max(similarity(one, other) for i, one in enumerate(own) for other in own[:i]) < 0.8
    assert not {exact_key(p.text or "") for p in evaluation()} & {
        exact_key(p.text or "") for p in scaled.prompts
    }


def test_lengths_are_those_of_the_evaluation_set_up_to_the_limit(scaled: CalibrationSet) -> None:
    lengths = [estimate_tokens(prompt.text or "") for prompt in scaled.prompts]
    assert max(lengths) <= 500
    assert sum(lengths) / len(lengths) == pytest.approx(485, abs=25)
    short = compose_calibration_set(evaluation(), size=20, max_tokens=300)
    assert max(estimate_tokens(prompt.text or "") for prompt in short.prompts) <= 300


def test_the_same_seed_gives_the_same_set() -> None:
    def texts(seed: int) -> list[str | None]:
        found = compose_calibration_set(evaluation(), size=12, max_tokens=600, seed=seed)
        return [prompt.text for prompt in found.prompts]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


def test_a_task_can_be_scaled_away() -> None:
    found = compose_calibration_set(evaluation(), size=40, max_tokens=600, scale={"cwe": 0, "qa": 3})
    assert shares(found.prompts) == {
        "mcq": pytest.approx(1 / 6, abs=0.02),
        "qa": pytest.approx(3 / 6, abs=0.02),
        "niah": pytest.approx(1 / 6, abs=0.02),
        "cwe": 0,
        "fwe": pytest.approx(1 / 6, abs=0.02),
    }


# --- a pool of one's own ---

STORY = (
    "The {0} lay by the {1}, and the {1} was {2} as the {0} had been {3} in the year of the great flood, {4}."
)


def stories(number: int, task: str = "story", start: int = 0) -> list[Prompt]:
    words = [
        "mill",
        "bridge",
        "river",
        "garden",
        "tower",
        "field",
        "road",
        "house",
        "lake",
        "orchard",
        "inn",
        "forge",
    ]
    return [
        Prompt(
            f"{task}-{n}",
            task,
            " ".join(
                STORY.format(words[(n + k) % 12], words[(n * 5 + k) % 12], n * 7 + k, n + k * n, n)
                for k in range(4)
            ),
        )
        for n in range(start, start + number)
    ]


def test_evaluation_prompts_in_the_pool_are_removed_and_reported() -> None:
    tests = stories(6)
    nearly = Prompt("near", "story", (tests[1].text or "").replace("great flood, 1.", "great flood, one.", 1))
    pool = [Prompt("same", "story", (tests[0].text or "").upper()), nearly, *stories(8, start=100)]
    found = compose_calibration_set(tests, size=8, max_tokens=600, pool=pool)
    assert sorted((removal.evaluation_id, removal.exact) for removal in found.removed) == [
        ("story-0", True),
        ("story-1", False),
    ]
    assert {prompt.text for prompt in found.prompts} == {prompt.text for prompt in stories(8, start=100)}
    assert "1 exactly, 1 nearly" in format_calibration_set(found)


def test_texts_of_the_pool_are_cut_to_the_limit() -> None:
    found = compose_calibration_set(stories(3), size=3, max_tokens=40, pool=stories(5, start=50))
    for prompt in found.prompts:
        assert 30 <= estimate_tokens(prompt.text or "") <= 40
        assert any((other.text or "").startswith(prompt.text or "?") for other in stories(5, start=50))


def test_a_task_that_cannot_be_generated_needs_a_pool() -> None:
    with pytest.raises(
        ConfigError, match=r"too few texts for 9 prompts of the task 'story': 0 were found.*Add texts"
    ):
        compose_calibration_set(stories(3), size=9, max_tokens=600)
    with pytest.raises(ConfigError, match=r"too few texts for 9 prompts of the task 'story': 2 were found"):
        compose_calibration_set(stories(3), size=9, max_tokens=600, pool=stories(2, start=50))


def test_generated_texts_run_out_where_a_task_is_too_narrow() -> None:
    """There are not many beginnings that differ enough: an error, not an endless search."""
    narrow = [Prompt("a", "mathematics", "Problem. A tank holds 15")]
    with pytest.raises(ConfigError, match="too few texts for 2000 prompts of the task 'mathematics'"):
        compose_calibration_set(narrow, size=2000, max_tokens=8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"scale": {"cew": 2}},
            "nothing to scale by 'cew'; give low_meaning or a task of the evaluation set: cwe, fwe",
        ),
        ({"scale": {"cwe": -1}}, "cwe cannot be scaled by -1"),
        ({"scale": {"low_meaning": float("nan")}}, "low_meaning cannot be scaled by nan"),
        ({"scale": dict.fromkeys(TASKS, 0)}, "every share of it is scaled to 0"),
        ({"max_tokens": 60}, "60 tokens are too few for the task 'mcq' (zh), which needs about"),
    ],
)
def test_impossible_requests(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_calibration_set(evaluation(), **{"size": 10, "max_tokens": 600, **settings})  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_token_ids_are_no_texts() -> None:
    with pytest.raises(ConfigError, match="Prompt x has token ids only"):
        compose_calibration_set([Prompt("x", "qa", token_ids=(1,))], size=1, max_tokens=600)


# --- files ---


def test_the_file_can_be_read_by_others_and_by_us(scaled: CalibrationSet, tmp_path: Path) -> None:
    path = tmp_path / "new" / "calibration.jsonl"
    write_calibration_set(path, scaled)
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["text"] for line in lines] == [prompt.text for prompt in scaled.prompts]
    assert all(line.keys() == {"id", "task", "language", "text"} for line in lines)
    assert [prompt.id for prompt in read_prompts(path)] == [prompt.id for prompt in scaled.prompts]
    assert [file.name for file in path.parent.iterdir()] == ["calibration.jsonl"]


def test_a_file_that_cannot_be_written(scaled: CalibrationSet, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cannot be written: (Not a directory|File exists)"):
        write_calibration_set(tmp_path / "file" / "x.jsonl", scaled)


def test_the_report_names_every_kind(scaled: CalibrationSet) -> None:
    report = format_calibration_set(scaled)
    assert report.startswith("120 prompts\n")
    for kind in scaled.wanted:
        assert f"{kind.task}, {kind.language}" in report
    assert kind_of(Prompt("x", "cwe", "oak, elm, fir, ash, yew, box, bay, fig, tea, rye, oat, hop")) == Kind(
        "cwe", "en", True
    )
