"""The Markdown summary and the annotations: complete, bounded, and deaf to what texts say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_quantguard.report.annotations import workflow_commands
from pytest_quantguard.report.markdown import LONGEST, escaped, fenced, render_markdown
from tests.report.samples import HOSTILE, full
from tests.report.test_terminal import TABLE, check, result


def test_verdict_then_failures_then_diagnosis_then_the_table() -> None:
    text = render_markdown(full(), changes=("changed: a", "did: b"), report="out/report.html")
    order = [
        "gate: FAILED",
        "- kl_mean in decode bs 1: 0.9000, at most 0.5",
        "look at the scales",
        "changed: a",
    ]
    order += ["| check | prefill bs 1 |", "worst positions", "Report: out/report.html"]
    assert sorted(order, key=text.index) == order
    assert "| kl_mean | 0.4100 | 0.4100 | 0.9000 ❌ | could not run ⚠️ | ≤ 0.5 |" in text
    assert "This summary is partial" in text
    assert "'\ufffd' &#60;7&#62; 0.700" in text, "which part of a character"


def test_tasks_have_figures_of_their_own() -> None:
    run = full()
    cells = [
        cell.model_copy(
            update={"by_task": {"mcq": {"kl_mean": 0.1 * size}, HOSTILE: {"kl_mean": 0.2 * size}}}
        )
        for size, cell in enumerate(run.cells, 1)
    ]
    assert run.generation is not None
    tasks = {"mcq": run.generation.overall, HOSTILE: run.generation.overall}
    generation = run.generation.model_copy(update={"tasks": tasks})
    text = render_markdown(run.model_copy(update={"cells": cells, "generation": generation}))
    folded = text[text.index("<details><summary>By task</summary>") :].split("</details>")[0]
    assert "| mcq | 0.1000 | 0.2000 | 0.3000 | 0.4000 |" in folded
    assert "| mcq | 2 | 1.000 | 0.500 | 1 | 0 | 1 |" in folded
    assert folded.count("&#60;script&#62;") == 2
    assert len({line.count("|") for line in folded.splitlines() if line.startswith("| ")} - {6, 8}) == 0
    assert "By task" not in render_markdown(run), "one task says nothing that the sum does not"


def test_tables_keep_their_columns_whatever_texts_hold() -> None:
    for table in re.findall(r"(?:^\|.*\n)+", render_markdown(full(HOSTILE)), re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_no_markup_comes_out_of_texts() -> None:
    text = render_markdown(full(HOSTILE), changes=(HOSTILE, HOSTILE), report=HOSTILE)
    prose = re.sub(r"(?ms)^(`{3,})$.*?^\1$", "", text)
    assert not re.search(r"<(?!/?(details|summary)>)", prose)
    assert not re.search(r"(?m)^\s*(::|##\[)", text)
    assert not any(one in text for one in "\x1b\x07\x00\u202e\u2066\u200b\ud800")
    assert "javascript" not in re.sub(r"javascript:x", "", prose), "the text is there, no link is"
    assert "](" not in prose
    text.encode()


def test_escaped_and_fenced() -> None:
    assert escaped("kl_mean 0.1 *a* <b> |") == "kl_mean 0.1 &#42;a&#42; &#60;b&#62; &#124;"
    assert fenced("a ```` b\n```") == ["`````", "a ```` b", "```", "`````"]


def test_a_long_summary_is_cut_and_says_so() -> None:
    checks = [check("accuracy", "prefill", size, f"metric{size}", 0.1) for size in range(1, 3000)]
    text = render_markdown(result(checks))
    assert len(text) < LONGEST + 100
    assert text.endswith("(cut; everything is in result.json)\n")


def test_a_passing_run_is_short() -> None:
    text = render_markdown(result(TABLE))
    assert text.startswith("## ✅ gate: PASSED (40 of 40 checks held; 60 s)\n\n**every check held**")
    assert "details" not in text


def test_annotations_only_inside_actions() -> None:
    assert workflow_commands(full(), {}) == []
    assert workflow_commands(full(), {"GITHUB_ACTIONS": "false"}) == []


def test_annotations_name_the_config_and_the_failure(tmp_path: Path) -> None:
    run = full(config_path=str(tmp_path / "gates" / "a,b.yaml"))
    lines = workflow_commands(run, {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(tmp_path)})
    assert [line.split(" ")[0] for line in lines] == ["::error"] * 3 + ["::warning"]
    assert lines[0].startswith(
        "::error file=gates/a%2Cb.yaml,title=quantguard%3A gate::kl_mean in decode bs 1: 0.9000, at most "
        "0.5%0Alook at"
    )


def test_an_annotation_is_one_line_whatever_texts_hold() -> None:
    lines = workflow_commands(full(HOSTILE, name="gate"), {"GITHUB_ACTIONS": "true"})
    for line in lines:
        assert "\n" not in line
        assert "\r" not in line
        assert re.match(r"::(error|warning) title=quantguard%3A gate::", line)
        assert "\x1b" not in line
        assert len(line) < 20_000


def test_at_most_ten_errors() -> None:
    checks = [
        check("accuracy", "prefill", 1, f"metric{number}", 0.9, outcome="failed") for number in range(30)
    ]
    assert len(workflow_commands(result(checks), {"GITHUB_ACTIONS": "true"})) == 10


@pytest.mark.parametrize("outcome", ["failed", "error"])
def test_checks_that_share_a_reason_share_an_annotation(outcome: str) -> None:
    checks = [check("accuracy", "prefill", size, "kl_mean", None, outcome=outcome) for size in (1, 3, 8)]
    assert len(workflow_commands(result(checks), {"GITHUB_ACTIONS": "true"})) == 1
