"""Figures by task: whoever reads a failure sees whether all prompts are bad or those of one kind."""

from __future__ import annotations

import json
import re

import pytest

from tests.plugin.conftest import WORDS, Project

COUNTS = {"one": 5, "two": 2, "three\u202e": 1}


def test_a_failure_ranks_the_tasks(project: Project) -> None:
    tasks = [task for task, count in COUNTS.items() for _ in range(count)]
    lines = [
        json.dumps({"id": f"p{i}", "task": task, "text": " ".join(WORDS[i : i + 5])})
        for i, task in enumerate(tasks)
    ]
    (project.folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    project.capture()
    project.candidate.noise = 0.8
    result = project.run("-k", "accuracy and prefill-bs4")
    assert result.ret == 1
    check = next(one for one in project.result()["checks"] if one["metric"] == "kl_mean")
    (told,) = re.findall(r"\n  by task            (.*(?:\n {21}.*)*)", check["message"])
    found = re.findall(r"(one|two|three\\u202e) ([\d.]+)", told)
    assert sorted(name for name, _ in found) == ["one", "three\\u202e", "two"]
    values = [float(value) for _, value in found]
    assert values == sorted(values, reverse=True), "the worst first"
    # Every prompt has as many positions, so the mean over all is that of the tasks by number of prompts.
    number = {name.encode().decode("unicode_escape"): float(value) for name, value in found}
    mean = sum(COUNTS[task] * value for task, value in number.items()) / sum(COUNTS.values())
    assert mean == pytest.approx(check["value"], rel=1e-3)
    agreement = next(one for one in project.result()["checks"] if one["metric"] == "agreement")
    if agreement["outcome"] == "failed":
        assert agreement["message"].count("by task") == 1


def test_a_suite_of_one_task_has_no_ranking(captured: Project) -> None:
    captured.candidate.noise = 0.8
    captured.run("-k", "accuracy and prefill-bs4 and kl_mean").assert_outcomes(failed=1)
    assert "by task" not in captured.result()["checks"][0]["message"]
