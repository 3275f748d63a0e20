"""What a run of the gate leaves behind and says, also where something is in the way."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from pytest_quantguard import cli
from tests.plugin.conftest import WORDS, Project
from tests.report.samples import HOSTILE

SELECTED = ("-k", "server or (accuracy and kl_mean and decode)")


def test_every_run_leaves_its_files_and_a_line(captured: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = captured.folder / "step.md"
    summary.write_text("before\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    first = captured.run(*SELECTED)
    captured.candidate.noise = 0.9
    captured.write(accuracy={"kl_mean": {"max": 0.2}})
    second = captured.run(*SELECTED)
    folder = captured.folder / ".quantguard" / "toy"
    assert {"report.html", "summary.md", "result.json", "history.jsonl"} <= {
        file.name for file in folder.iterdir()
    }
    assert [json.loads(line)["verdict"] for line in (folder / "history.jsonl").open(encoding="utf-8")] == [
        "passed",
        "failed",
    ]
    text = summary.read_text(encoding="utf-8")
    assert text.startswith("before\n## ✅ toy: PASSED")
    assert "## ❌ toy: FAILED" in text
    assert "- changed: accuracy.kl_mean.max: 0.1 -&#62; 0.2" in text
    assert "Since the last run" in (folder / "report.html").read_text(encoding="utf-8")
    first.stdout.fnmatch_lines(["toy: PASSED *", "  report     .quantguard/toy/report.html"])
    second.stdout.fnmatch_lines(
        [
            "toy: FAILED (*",
            "  failed     kl_mean in every cell: worst *, at most 0.2",
            "  report     .quantguard/toy/report.html",
            "  candidate  *",
            "*decode*",
        ]
    )
    for outcome in (first, second):
        outcome.stdout.no_fnmatch_line("::*")
        outcome.stdout.fnmatch_lines(
            [
                "quantguard *: toy (gate.yaml)",
                "  candidate: attach, * fp8",
                "  device: that of http://127.0.0.1:*",
                "  baseline: baseline",
            ]
        )


def test_annotations_inside_actions(captured: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(captured.folder))
    captured.candidate.noise = 0.9
    result = captured.run(*SELECTED)
    result.stdout.fnmatch_lines(["::error file=gate.yaml,title=quantguard%3A toy::kl_mean in every cell: *"])


def test_worst_positions_show_both_sides(captured: Project) -> None:
    captured.candidate.noise = 0.9
    captured.run(*SELECTED, "--junitxml=junit.xml")
    details = captured.result()["details"]
    assert len(details["worst"]) == 10
    worst = details["worst"][0]
    assert worst["kl"] == max(place["kl"] for place in details["worst"])
    assert set(worst["kl_by_cell"]) == {"decode-bs1", "decode-bs4"}
    baseline = {token["id"]: token["probability"] for token in worst["baseline"]}
    assert len(baseline) == 10
    for token in worst["candidate"]:
        if token["id"] in baseline:
            assert token["elsewhere"] == pytest.approx(baseline[token["id"]])
    assert worst["before"]
    assert len(worst["reference"]) == 1, "the toy's tokens are letters"
    assert {cell["batch_size"] for cell in details["cells"]} == {1, 4}
    assert sum(details["cells"][0]["histogram"]["candidate"]) == 8 * 8
    assert sum(details["cells"][0]["histogram"]["noise"]) == 8 * 8

    check_junit(captured)


def check_junit(captured: Project) -> None:
    """Every figure of a check is a property of its test case."""
    found = {check["id"]: check for check in captured.result()["checks"]}
    check = found["accuracy[decode-bs4-kl_mean]"]
    cases = ElementTree.parse(captured.folder / "junit.xml").getroot().iter("testcase")
    case = next(case for case in cases if case.get("name") == check["id"])
    said = {item.get("name"): item.get("value") for item in case.iter("property")}
    assert (said["metric"], said["unit"], float(said["bound"] or 0)) == ("kl_mean", "nats", 0.1)
    numbers = [float(said[name] or 0) for name in ("value", "interval_low", "interval_high", "noise_floor")]
    assert numbers == pytest.approx([check["value"], *check["interval"], check["noise_floor"]])


def test_a_server_without_texts_leaves_ids(captured: Project) -> None:
    captured.candidate.texts = False
    captured.run(*SELECTED)
    worst = captured.result()["details"]["worst"][0]
    assert worst["reference"].startswith("<")
    asked = [path for path in captured.candidate.paths if "detokenize" in path]
    assert len(asked) == 2, "both routes once, then no more"


def test_a_run_that_stops_early_is_partial(captured: Project) -> None:
    captured.candidate.noise = 0.9
    result = captured.run("-x", "-k", "accuracy")
    assert captured.result()["partial"] is True
    assert "This report is partial" in (captured.folder / ".quantguard/toy/report.html").read_text(
        encoding="utf-8"
    )
    result.stdout.fnmatch_lines(["toy: FAILED (*the run ended early*"])


def test_a_run_that_is_killed_leaves_a_partial_report(captured: Project) -> None:
    captured.run(*SELECTED)
    assert captured.result()["verdict"] == "passed"
    captured.pytester.makeconftest(
        """
        import os

        def pytest_runtest_logreport(report):
            if report.when == "call" and "decode-bs1" in report.nodeid:
                os._exit(9)
        """
    )
    died = captured.pytester.runpytest_subprocess("--quantguard-config=gate.yaml", *SELECTED)
    assert died.ret == 9
    result = captured.result()
    assert (result["verdict"], result["partial"]) == ("incomplete", True)
    folder = captured.folder / ".quantguard" / "toy"
    assert "This report is partial" in (folder / "report.html").read_text(encoding="utf-8")
    assert len((folder / "history.jsonl").read_text(encoding="utf-8").splitlines()) == 1, (
        "only runs that ended"
    )
    assert cli.main(["report", str(folder)]) == 0


def test_a_folder_that_cannot_be_written_keeps_verdict_and_table(captured: Project) -> None:
    (captured.folder / "blocked").write_text("", encoding="utf-8")
    result = captured.run("--quantguard-output=blocked", *SELECTED)
    assert result.ret == 0, "the checks held"
    result.stdout.fnmatch_lines(
        [
            "toy: PASSED (*",
            "*decode*",
            "quantguard: The result could not be written to *blocked*",
            "quantguard: The report could not be *",
        ]
    )
    said = " ".join(result.stdout.str().split())
    assert "choose another folder with --quantguard-output=DIR. quantguard: The history could not be" in said
    result.stdout.no_fnmatch_line("*Traceback*")


def test_sixty_columns(captured: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    captured.candidate.noise = 0.9
    lines = captured.run("-k", "accuracy or self_consistency", "-p", "no:benchmark").outlines
    start = next(index for index, line in enumerate(lines) if line.startswith("toy: FAILED"))
    end = next(index for index, line in enumerate(lines) if "short test summary" in line)
    assert max(map(len, lines[start:end])) <= 60


def test_hostile_texts_reach_no_terminal(project: Project) -> None:
    prompts: list[dict[str, Any]] = [
        {
            "id": f"\x1b[31mred\u202e{number}{HOSTILE[:-30]}",
            "task": HOSTILE[:40],
            "text": " ".join(WORDS[number : number + 5]),
        }
        for number in range(8)
    ]
    lines = [json.dumps(prompt) for prompt in prompts]
    (project.folder / "prompts.jsonl").write_text(
        "\n".join(lines).replace("\\ud800", "") + "\n", encoding="utf-8"
    )
    project.capture()
    project.candidate.noise = 0.9
    result = project.run("-k", "accuracy and kl_mean")
    assert result.ret == 1
    said = "\n".join(result.outlines + result.errlines)
    assert not any(one in said for one in "\x07\x00\u202e\u2066\u200b")
    assert "\x1b]0;" not in said
    assert not any(line.lstrip().startswith(("::error", "##[")) for line in said.splitlines())
    assert "\\x1b[31mred" in said
    page = Path(project.folder / ".quantguard/toy/report.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_huge_texts_fill_neither_log_nor_report(project: Project) -> None:
    prompts = [
        {
            "id": f"{number}{'x' * 100_000}",
            "task": "t" * 100_000,
            "text": " ".join(WORDS[number : number + 5]),
        }
        for number in range(8)
    ]
    (project.folder / "prompts.jsonl").write_text(
        "\n".join(map(json.dumps, prompts)) + "\n", encoding="utf-8"
    )
    project.capture()
    project.candidate.noise = 0.9
    result = project.run("-k", "accuracy and kl_mean")
    assert result.ret == 1
    assert len(str(result.stdout)) < 50_000
    folder = project.folder / ".quantguard" / "toy"
    sizes = {name: (folder / name).stat().st_size for name in ("report.html", "summary.md", "history.jsonl")}
    assert sizes["report.html"] < 500_000
    assert sizes["summary.md"] < 100_000
    assert sizes["history.jsonl"] < 20_000


def test_without_an_utf8_locale(captured: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    for name, value in plain.items():
        monkeypatch.setenv(name, value)
    captured.candidate.noise = 0.9
    result = captured.pytester.runpytest_subprocess("--quantguard-config=gate.yaml", *SELECTED)
    assert result.ret == 1
    assert "UnicodeEncodeError" not in str(result.stdout) + str(result.stderr)
    result.stdout.fnmatch_lines(["toy: FAILED (*", "  report     .quantguard/toy/report.html"])
