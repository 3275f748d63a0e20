"""How a self-test reduces a gate: prompts, spans, batch sizes, and the order in which checks are judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pytest_quantguard.baseline.recording import CellKey
from pytest_quantguard.config import GateConfig
from pytest_quantguard.gate.plan import plan_checks
from pytest_quantguard.selftest.plan import (
    plan_selftest,
    select_prompts,
    shorten_spans,
    shuffle_prompts,
    spread_over_lengths,
)
from tests.baseline.samples import make_recording
from tests.selftest.models import tiny_config


def config_of(sizes: list[int], **changes: object) -> GateConfig:
    config = tiny_config()
    config["suite"] = {**config["suite"], "batch_sizes": sizes}
    return GateConfig.model_validate({**config, **changes, "baseline": Path("baseline")})


def test_fewer_prompts_and_positions_of_the_same_recording() -> None:
    recording = make_recording(count=5, span=6)
    chosen = select_prompts(recording, [3, 1])
    assert [prompt.id for prompt in chosen.prompts] == ["p3", "p1"]
    key = CellKey("decode", 1)
    assert chosen.cells[key].rows[0] is recording.cells[key].rows[3]
    assert chosen.cells[key].batches == ((0,), (1,))
    short = shorten_spans(chosen, 4)
    assert short.positions == 8
    for before, after, rows in zip(chosen.prompts, short.prompts, short.cells[key].rows, strict=True):
        np.testing.assert_array_equal(after.span_ids, before.span_ids[:4])
        np.testing.assert_array_equal(after.prefix_ids, before.prefix_ids)
        np.testing.assert_array_equal(rows.chosen_ids, after.span_ids)
    np.testing.assert_array_equal(
        short.cells[key].rows[1].logprobs, recording.cells[key].rows[1].logprobs[:4]
    )


def test_another_order_keeps_prompts_and_rows_together() -> None:
    recording = make_recording(count=5)
    ids = [prompt.id for prompt in recording.prompts]
    turned = shuffle_prompts(recording, 2)
    orders = {tuple(prompt.id for prompt in shuffle_prompts(recording, seed).prompts) for seed in range(18)}
    assert len(orders) > 12
    assert all(sorted(order) == ids for order in orders)
    for prompt, rows in zip(turned.prompts, turned.cells[CellKey("prefill", 8)].rows, strict=True):
        np.testing.assert_array_equal(prompt.span_ids, rows.chosen_ids)
    assert shuffle_prompts(recording, 0) is recording


@pytest.mark.parametrize(
    ("count", "expected"), [(1, [50]), (2, [25, 75]), (4, [12, 37, 62, 87]), (100, list(range(100)))]
)
def test_lengths_are_spread_evenly(count: int, expected: list[int]) -> None:
    lengths = np.random.default_rng(0).permutation(100).tolist()
    found = spread_over_lengths(lengths, count)
    assert found == sorted(found)
    assert sorted(lengths[index] for index in found) == expected


@pytest.mark.parametrize(
    ("prompts", "sizes", "kept"),
    [
        (8, [1, 3, 8, 32], [1, 3, 8]),
        (12, [1, 3, 8, 32, 64], [1, 3, 8, 32]),
        (2, [8, 1], [8, 1]),
        (1, [4], [4]),
        (5, [4, 8, 16], [4, 8]),
    ],
)
def test_batch_sizes_that_would_repeat_others_are_left_out(
    prompts: int, sizes: list[int], kept: list[int]
) -> None:
    recording = make_recording(count=prompts)
    plan = plan_selftest(config_of(sizes), recording, prompts=None, score_tokens=None)
    assert plan.config.suite.batch_sizes == kept
    left_out = ", ".join(str(size) for size in sizes if size not in kept)
    said = f"batch size {left_out} is left out: with {prompts} prompts it would be {max(kept)} again"
    assert (said in plan.notes) == (kept != sizes)
    assert any("left out" in note for note in plan.notes) == (kept != sizes)


def test_every_check_but_timing_is_judged_once_and_in_stages() -> None:
    config = config_of(
        [1, 3],
        speed={},
        self_consistency={"warm_cache": {}, "repeat": {}},
    )
    plan = plan_selftest(config, make_recording(), prompts=None, score_tokens=None)
    stages = plan.stages()
    judged = [check.name for stage in stages for check in stage]
    assert sorted(judged) == sorted(
        check.name for check in plan_checks(config) if check.kind != "speed" and check.comparison != "repeat"
    )
    assert len(judged) == len(set(judged))
    names = [[check.name for check in stage] for stage in stages]
    assert names[0][0] == "server"
    assert "accuracy[prefill-bs1-kl_mean]" in names[0]
    assert names[1] == ["self_consistency[prefill-bs1-warm_cache]"]
    assert "self_consistency[prefill-bs3-batch]" in names[2]
    assert "self_consistency[decode-bs1-decode_against_prefill]" in names[3]
    assert names[4] == ["self_consistency[decode-bs1-warm_cache]"]
    assert any("repeat is left out" in note for note in plan.notes)
    assert any("nothing is timed" in note for note in plan.notes)


@pytest.mark.parametrize(("prompts", "scored"), [(3, None), (None, 4), (3, 4)])
def test_bounds_set_for_the_whole_suite_are_judged_by_intervals_on_a_part(
    prompts: int | None, scored: int | None
) -> None:
    recording, config = make_recording(count=5, span=6), config_of([1])
    plan = plan_selftest(config, recording, prompts=prompts, score_tokens=scored)
    assert plan.config.accuracy.decision == "proven_bad"
    assert any("whole interval" in note for note in plan.notes)
    bounds = plan.config.accuracy.bounds_of("prefill", 1)
    assert bounds == config.accuracy.bounds_of("prefill", 1)
    whole = plan_selftest(config, recording, prompts=5, score_tokens=6)
    assert whole.config.accuracy.decision == "point"
    assert not any("whole interval" in note for note in whole.notes)


def test_a_chunk_is_shorter_than_the_longest_text_unless_the_config_says() -> None:
    recording = make_recording(count=5, span=6)
    longest = max(prompt.token_ids.size for prompt in recording.prompts)
    plan = plan_selftest(config_of([1]), recording, prompts=None, score_tokens=None)
    assert plan.chunk_size is not None
    assert plan.chunk_size < longest
    assert plan.config.candidate.server_args["chunked_prefill_size"] == plan.chunk_size  # type: ignore[union-attr]
    assert plan.reduced
    candidate = {**tiny_config()["candidate"], "server_args": {"chunked-prefill-size": 512}}
    config = config_of([1], candidate=candidate)
    plan = plan_selftest(config, recording, prompts=9, score_tokens=9)
    assert plan.chunk_size is None
    assert not plan.reduced
    for prompts, scored in ((4, None), (None, 5)):
        assert plan_selftest(config, recording, prompts=prompts, score_tokens=scored).reduced


@pytest.mark.parametrize(
    ("longest", "chunk"), [(7, 16), (42, 16), (43, 32), (85, 32), (86, 64), (512, 256), (700, 512)]
)
def test_a_chunk_is_the_largest_power_of_two_in_three_quarters_of_the_longest_text(
    longest: int, chunk: int
) -> None:
    recording = make_recording(count=2, span=6)
    first, second = recording.prompts
    text = np.arange(1, longest + 1, dtype=np.int32)
    prompts = (
        replace(first, token_ids=text, prompt_tokens=longest - 6, span_start=longest - 6),
        replace(second, token_ids=text[:7], prompt_tokens=1, span_start=1),
    )
    recording = replace(recording, prompts=prompts)
    assert plan_selftest(config_of([1]), recording, prompts=None, score_tokens=None).chunk_size == chunk


def test_what_is_not_tried_is_said() -> None:
    config = config_of([1], generation={"tasks": {"qa": {"size": 1}}})
    plan = plan_selftest(config, make_recording(), prompts=None, score_tokens=None)
    assert "no text is generated: faults of generation are not tried" in plan.notes
    assert plan.config.generation is None
