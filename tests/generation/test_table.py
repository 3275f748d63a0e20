"""The table of generated answers as text."""

from __future__ import annotations

import pytest

from pytest_quantguard.report.generation import generation_lines
from pytest_quantguard.results import GenerationFigures, GenerationResult

FIGURES = GenerationFigures(
    prompts=30,
    score=0.8,
    reference_score=0.9,
    relative_score=0.889,
    lost=4,
    won=1,
    mcnemar_p=0.375,
    runaways=1,
    empty_answers=0,
    loops=2,
    echoes=0,
    reference_runaways=3,
    reference_empty=0,
    reference_loops=0,
    reference_echoes=0,
    length_ratio=1.25,
    text_agreement=0.5,
    first_divergence_median=7.0,
    output_tokens=100,
    reference_tokens=80,
)
RESULT = GenerationResult(
    route="native",
    tasks={"qa": FIGURES, "a\x1b[31m\u202eb": FIGURES.model_copy(update={"relative_score": None})},
    overall=FIGURES.model_copy(update={"prompts": 60}),
    skipped=["long"],
    resumed=5,
    concurrency=8,
    seconds=61.4,
)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_it_fits_and_says_everything(width: int) -> None:
    lines = generation_lines(RESULT, width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "60 prompts, 8 at a time, 61 s, 1 skipped (too long), 5 of an interrupted run" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    qa = [line.split() for line in lines if line.split()[:1] == ["qa"]]
    cells = [cell for row in qa for cell in row[1:]]
    assert cells == [
        "30", "0.800", "0.900", "0.89", "4", "1", "0.38", "1+3", "0", "2", "0", "1.25", "50%", "7"
    ]  # fmt: skip
    assert len(qa) == {60: 3, 80: 2, 120: 1}[width]


def test_one_task_needs_no_sum() -> None:
    one = RESULT.model_copy(update={"tasks": {"qa": FIGURES}})
    assert not any(line.split()[:1] == ["all"] for line in generation_lines(one, 120))
