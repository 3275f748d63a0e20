"""Results with everything in them, and with texts that mean harm."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from pytest_quantguard.prompts.analysis import Composition, analyze
from pytest_quantguard.prompts.prompt import Prompt
from pytest_quantguard.results import (
    RELATIVE,
    CheckResult,
    GeneratedText,
    GenerationAnswer,
    GenerationFigures,
    GenerationResult,
    RunResult,
    SpeedResult,
    SpeedVerdict,
)
from tests.report.test_terminal import check, result

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31mred\x1b]0;title\x07"
    "\u202egnp.exe\u2066\u200b`*_[a](javascript:x)|&amp;\"'\x00\ud800\n::error::owned\r\n##[group]x"
)
"""Markup, terminal commands, bidi controls, a lone surrogate, Markdown, commands of a CI runner."""
CELLS = [(phase, size) for phase in ("prefill", "decode") for size in (1, 8)]


def _token(text: str, probability: float, elsewhere: float | None = None) -> dict[str, Any]:
    return {"id": 7, "text": text, "probability": probability, "elsewhere": elsewhere}


def details(text: str) -> dict[str, Any]:
    """Details of two prompts and one worst position."""
    names = [f"{phase}-bs{size}" for phase, size in CELLS]
    span = [
        {"begin": at, "end": at + 1, "kl_mean": 0.1 * at, "kl_p90": 0.2, "agreement": 0.9} for at in range(8)
    ]
    histogram = {"edges": [1e-3, 1e-2, 1e-1, 1.0], "candidate": [1, 5, 2], "noise": [8, 0, 0]}
    return {
        "cells": [
            {"phase": phase, "batch_size": size, "along_span": span, "histogram": histogram}
            for phase, size in CELLS
        ],
        "prompts": [
            {
                "id": f"{text}{number}",
                "task": text,
                "tokens": 40,
                "kl_mean": dict.fromkeys(names, value),
                "agreement": dict.fromkeys(names, 0.9),
            }
            for number, value in enumerate((0.0, 0.3))
        ],
        "worst": [
            {
                "prompt": text,
                "task": text,
                "position": 3,
                "span": 8,
                "phase": "decode",
                "batch_size": 8,
                "kl": 4.2,
                "kl_by_cell": dict.fromkeys(names, 4.2),
                "before": f"before {text}",
                "reference": text,
                "after": text,
                "flip": True,
                "confident": True,
                "baseline": [_token(text, 0.9, 0.01), _token("b", 0.1)],
                "candidate": [_token("\ufffd", 0.7, 0.0), _token(text, 0.01, 0.9)],
            }
        ],
    }


def cells(text: str) -> list[dict[str, Any]]:
    """Figures of all cells."""
    metrics = {"kl_mean": 0.41, "kl_p99": 2.0, "agreement": 0.7, "log_perplexity_ratio": 0.3, "kl_max": 9.0}
    return [
        {
            "phase": phase,
            "batch_size": size,
            "mode": "prefill",
            "requests": 1,
            "seconds": 1.0,
            "input_tokens": 1,
            "output_tokens": 1,
            "cached_tokens": 0,
            "metrics": metrics,
            "standard_errors": {"kl_mean": 0.02},
            "by_task": {text: {"kl_mean": 0.4, "agreement": 0.7}},
            "by_position": {"0-15": {"kl_mean": 0.4, "agreement": 0.7}},
            "notes": [text],
        }
        for phase, size in CELLS
    ]


def checks(text: str) -> list[CheckResult]:
    """One of each kind and outcome."""
    interval = {"interval": (0.3, 0.5), "noise_floor": 0.001, "detectable_change": 0.05}
    found = [
        check("validity", phase, size, "", None, bound=None, bound_side=None, message="")
        for phase, size in CELLS
    ]
    found += [check("accuracy", phase, size, "kl_mean", 0.41, **interval) for phase, size in CELLS[:2]]
    found += [
        check("accuracy", *CELLS[2], "kl_mean", 0.9, outcome="failed", message=f"it is bad\n{text}"),
        check("accuracy", *CELLS[3], "kl_mean", None, outcome="error", message=f"{text}\nserver died"),
        check("drift", *CELLS[0], "kl_mean", 0.12, unit=RELATIVE, bound=0.1, outcome="warned", message=text),
        check(
            "self_consistency", *CELLS[1], "kl_mean", math.nan, extra={"comparison": "batch"}, near_bound=True
        ),
    ]
    return [*found, *speed_checks(text)]


def speed_checks(text: str) -> list[CheckResult]:
    """A cell that became slower, and a score."""
    timed = SpeedResult(
        scenario=text,
        level="8",
        requests=8,
        concurrency=8,
        input_tokens=128,
        output_tokens=32,
        rounds=3,
        warmup_rounds=1,
        steady=False,
        compared="duration",
        figures={"duration": 2.5, "output_throughput": 102.4, "median_ttft_ms": 80.0},
        intervals={"duration": (2.4, 2.6)},
        by_round={"duration": [2.4, 2.5, 2.6]},
        scatter=0.03,
        errors=1,
        error_examples=[text],
        machine={"idle": 0.5, "disturbances": [text]},
        verdicts=[
            SpeedVerdict(
                against="accepted",
                figure="duration",
                status="regressed",
                value=1.25,
                bound=1.1,
                bound_side="max",
                interval=(1.2, 1.3),
                noise=0.045,
                runs=5,
                spread=0.0149,
                sentence=f"25 % slower\n{text}",
            )
        ],
    )
    slow = {"id": "speed[toy-8]", "kind": "speed", "metric": "duration", "unit": "s", "value": 2.5}
    score = {
        "id": "speed[score]",
        "kind": "speed",
        "metric": "score",
        "value": 0.9,
        "bound": 1.0,
        "bound_side": "min",
    }
    return [
        CheckResult.model_validate({**slow, "outcome": "failed", "message": "slower", "speed": timed}),
        CheckResult.model_validate({**score, "outcome": "passed", "extra": {"coefficient": 1.0}}),
    ]


def generation(text: str) -> GenerationResult:
    """One task with a question that was lost."""
    figures = GenerationFigures(
        prompts=2,
        score=0.5,
        reference_score=1.0,
        relative_score=0.5,
        relative_interval=(0.2, 0.8),
        lost=1,
        won=0,
        mcnemar_p=1.0,
        runaways=1,
        empty_answers=0,
        loops=0,
        echoes=0,
        reference_runaways=1,
        reference_empty=0,
        reference_loops=0,
        reference_echoes=0,
        length_ratio=1.5,
        text_agreement=0.5,
        output_tokens=10,
        reference_tokens=8,
    )
    answer = GenerationAnswer(
        id=text,
        task=text,
        question=text,
        gold=[text],
        reference=GeneratedText(text="reference's", tokens=2, ending="stop", score=1.0, seconds=0.1),
        candidate=GeneratedText(text=text, truncated=True, tokens=8, ending="length", score=0.0, seconds=0.2),
        signs=["lost", "runaway"],
        first_divergence=1,
    )
    return GenerationResult(
        route="native",
        tasks={text: figures},
        overall=figures,
        answers=[answer],
        left_out=3,
        skipped=[text],
        concurrency=4,
        seconds=1.0,
        notes=[text],
    )


def composition(text: str, **more: Any) -> Composition:
    """Of two prompts of one task, with `text` for every name."""
    prompts = [
        Prompt(text, text, "a needle in the hay " * 20),
        Prompt("other", text, "x9k2 7f3qz 81vv " * 20),
    ]
    return replace(analyze(prompts, name=text, look_for_near_duplicates=False).composition, **more)


def full(text: str = "plain", **more: Any) -> RunResult:
    """A run of everything that failed, with `text` wherever a server, model or user can put one."""
    fields = {
        "verdict": "failed",
        "partial": True,
        "cells": cells(text),
        "details": details(text),
        "generation": generation(text),
        "prompts": composition(text),
        "diagnosis": [f"look at the scales of {text}"],
        "notes": [text],
        "environment": {"pytest_quantguard": "0.1.0", "commit": "a" * 40, "fingerprint": {"gpu": text}},
        "config": {"candidate": {"model_path": text}, "accuracy": {"kl_mean": {"max": 0.5}}},
        "accepted": {"name": text, "model": {"model_path": text}},
        "candidate": {"backend": "attach", "model_path": text, "capabilities": {"version": text}},
        **more,
    }
    return result(checks(text), **fields)
