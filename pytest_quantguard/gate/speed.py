"""Times requests through pytest-benchmark. What is timed is what the accuracy checks ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_quantguard.baseline.recording import PromptRecord
from pytest_quantguard.errors import BaselineError
from pytest_quantguard.gate.plan import Check
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.measure.decode import token_tuple
from pytest_quantguard.results import CheckResult
from pytest_quantguard.serving.answers import Answer, GenerateRequest


def time_requests(trial: Trial, check: Check, benchmark: Any) -> CheckResult:
    """Time one request of `check.cell` and put tokens/s into `extra_info`.

    prefill: the scoring request of the first batch; tokens/s counts its input. decode: `speed.decode_tokens`
    new tokens for each prompt of the first batch, without log-probabilities; tokens/s counts the output.
    """
    assert check.cell is not None
    speed = trial.config.speed
    assert speed is not None
    client, cell = trial.server().client, check.cell
    prompts = trial.baseline().prompts[: cell.batch_size]
    if len(prompts) < cell.batch_size:
        raise BaselineError(
            f"{check.name}: the baseline has {len(prompts)} prompts, a batch of {cell.batch_size} cannot be "
            "timed. Remove the batch size from suite.batch_sizes, or enlarge the suite."
        )
    if cell.phase == "prefill":
        requests, top_logprobs = [_scoring(prompt) for prompt in prompts], trial.config.suite.top_logprobs
    else:
        requests, top_logprobs = [_decoding(prompt, speed.decode_tokens) for prompt in prompts], 0
    benchmark.group = f"{trial.config.name}: {cell.phase}"
    answers = benchmark.pedantic(
        client.generate,
        args=(requests,),
        kwargs={"top_logprobs": top_logprobs},
        setup=client.flush_cache,
        rounds=speed.rounds,
        warmup_rounds=speed.warmup_rounds,
    )
    figures = _figures(answers, cell.phase == "decode", benchmark.stats.stats)
    benchmark.extra_info.update(figures, batch_size=cell.batch_size, phase=cell.phase)
    return CheckResult(
        id=check.name,
        kind=check.kind,
        phase=cell.phase,
        batch_size=cell.batch_size,
        metric=check.metric,
        unit="tokens/s",
        value=figures["tokens_per_s"],
        outcome="passed",
        extra=figures,
    )


def _scoring(prompt: PromptRecord) -> GenerateRequest:
    return GenerateRequest(input_ids=token_tuple(prompt.token_ids), logprob_start_len=prompt.span_start - 1)


def _decoding(prompt: PromptRecord, tokens: int) -> GenerateRequest:
    return GenerateRequest(input_ids=token_tuple(prompt.prefix_ids), max_new_tokens=tokens)


def _figures(answers: Sequence[Answer], decode: bool, stats: Any) -> dict[str, float]:
    """Token counts of one request, and tokens/s by the median of the rounds."""
    counted = [answer.completion_tokens if decode else answer.prompt_tokens for answer in answers]
    return {
        "input_tokens": float(sum(answer.prompt_tokens for answer in answers)),
        "output_tokens": float(sum(answer.completion_tokens for answer in answers)),
        "seconds_median": float(stats.median),
        "seconds_min": float(stats.min),
        "seconds_max": float(stats.max),
        "tokens_per_s": sum(counted) / float(stats.median),
    }
