"""What docs/failures.md quotes is what a run says, apart from names and numbers."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.conftest import Project
from tests.plugin.pacing import SPEED, Paced

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"
DRIFT: dict[str, Any] = {"kl_mean": {"max": 5}, "drift": {"kl_mean": {"max_increase": "5%"}}}


def sections() -> list[str]:
    """The page's numbered sections."""
    return re.split(r"^## \d+\. ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]


def words_of(text: str) -> str:
    """The text without what differs from run to run: numbers, quoted and path-like words, layout."""
    plain = re.sub(r"'[^']*'|\S*[/=\[]\S*|\S+\.yaml|\S*\d\S*", "#", text)
    return re.sub(r"(# ?)+", "# ", " ".join(plain.split()))


def fails_to_start(project: Project, *lines: str) -> None:
    """A candidate whose program prints these lines and ends."""
    script = project.folder / "server.py"
    script.write_text(
        f"import sys\nsys.stderr.write({chr(10).join(lines)!r})\nsys.exit(2)\n", encoding="utf-8"
    )
    project.write(
        candidate={
            "backend": "sglang",
            "model_path": "org/model",
            "quantization": "fp8",
            "command": [sys.executable, str(script)],
        }
    )


def unknown_flag(project: Project) -> None:
    fails_to_start(
        project,
        "usage: server [--disable-radix-cache]",
        "server: error: unrecognized arguments: --disable-radix-cash",
    )


def out_of_memory(project: Project) -> None:
    fails_to_start(project, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB.")


def no_gpu(project: Project) -> None:
    fails_to_start(project, "RuntimeError: No CUDA GPUs are available")


def another_model(project: Project) -> None:
    candidate = {**project.config["candidate"], "expect": {"model_path": "org/a", "quantization": "b"}}
    project.write(candidate=candidate)


def not_quantized(project: Project) -> None:
    project.candidate.noise = 0.0


def other_suite(project: Project) -> None:
    project.write(suite={**project.config["suite"], "score_tokens": 4})


def no_baseline(project: Project) -> None:
    shutil.rmtree(project.folder / "baseline")


def over_budget(project: Project) -> None:
    project.candidate.noise = 5.0


def drifted(project: Project) -> None:
    project.write(accuracy=DRIFT)
    accepted = project.run("--quantguard-accept")
    assert accepted.ret == 0, accepted.outlines
    project.candidate.decode_noise = 0.5


def never_accepted(project: Project) -> None:
    project.write(accuracy=DRIFT)


def not_finite(project: Project) -> None:
    project.candidate.nan = True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "prepare", "chosen", "quoted"),
    [
        (
            1,
            unknown_flag,
            "server",
            ["the server ended with exit code", "reading of the log: this version of the"],
        ),
        (
            2,
            out_of_memory,
            "server",
            ["reading of the log: out of memory: lower server_args.mem_fraction_static"],
        ),
        (3, no_gpu, "server", ["reading of the log: no usable GPU: the NVIDIA driver is missing or"]),
        (
            4,
            another_model,
            "server",
            ["is not the one that `expect` describes:", "Attach to another url, or correct"],
        ),
        (
            4,
            not_quantized,
            "quantized",
            ["the candidate should be quantized but equals the reference to within"],
        ),
        (
            5,
            other_suite,
            "server",
            ["belongs to another config:", "or point the config to the recording that"],
        ),
        (5, no_baseline, "server", ["There is no recording at", "Record one with: quantguard capture"]),
        (
            6,
            over_budget,
            "kl_mean and prefill-bs1",
            [
                "at most",
                "by prompt",
                "the reference against itself",
                "with this suite",
                "worst positions by kl",
            ],
        ),
        (
            7,
            drifted,
            "drift and decode-bs4",
            ["since the accepted run kl_mean against", "are bit-identical to the accepted run"],
        ),
        (
            7,
            never_accepted,
            "drift and decode-bs4",
            [
                "drift is judged against an accepted run, and there is none that can be used.",
                "If this candidate is as it should be, accept it:",
            ],
        ),
        (
            8,
            not_finite,
            "validity and decode-bs4",
            ["The answers cannot be used.", "non-finite log-probabilities:"],
        ),
    ],
)
def test_quoted_messages_are_real(
    section: int,
    prepare: Callable[[Project], None],
    chosen: str,
    quoted: list[str],
    captured: Project,
) -> None:
    """Each phrase stands in the page's section and in what the run printed."""
    prepare(captured)
    result = captured.run("-k", chosen)
    assert result.ret != 0
    printed, page = words_of("\n".join(result.outlines)), words_of(sections()[section - 1])
    for phrase in quoted:
        assert words_of(phrase) in page
        assert words_of(phrase) in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "pace", "max_scatter", "quoted"),
    [
        (
            9,
            1.1,
            100,
            [
                "decode_heavy at level 1: slower than the accepted run.",
                "against figure value allowed 95 % interval verdict",
                "accepted run: regressed: takes",
                "times as long as accepted, wholly beyond",
                "how runs differ shows in 3 or more: quantguard accept",
            ],
        ),
        (
            10,
            1.0,
            1e-9,
            [
                "inconclusive against the accepted run.",
                "accepted run: inconclusive: takes",
                "the rounds of this run scatter by",
                "at most",
                "Likely reasons: other work on the machine, clocks that change with temperature or power,",
            ],
        ),
    ],
)
def test_quoted_times_are_real(
    section: int, pace: float, max_scatter: float, quoted: list[str], paced: Paced
) -> None:
    speed = {**SPEED, "levels": [1], "max_slowdown": "5%"}
    paced.project.write(speed=speed)
    assert paced.project.run("--quantguard-accept").ret == 0
    paced.candidate = pace
    paced.project.write(speed={**speed, "max_scatter": max_scatter, "on_inconclusive": "fail"})
    result = paced.project.run("-k", "speed")
    result.assert_outcomes(failed=1)
    printed, page = words_of("\n".join(result.outlines)), words_of(sections()[section - 1])
    for phrase in quoted:
        assert words_of(phrase) in page
        assert words_of(phrase) in printed


def test_the_page_has_the_ten() -> None:
    found = sections()
    assert len(found) == 10
    assert all("```\n" in section for section in found)
