"""The requests of scenarios: exact lengths, no common beginnings, arrivals, replayed files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_quantguard.config_speed import DecodeHeavy, Mixed, PrefillHeavy, Replay, Scenario
from pytest_quantguard.errors import ConfigError
from pytest_quantguard.measure.load.workload import Workload, build_workload


def build(scenario: Scenario, seed: int = 0, vocab_size: int = 1000, folder: Path = Path()) -> Workload:
    return build_workload(
        scenario, seed=seed, vocab_size=vocab_size, tokenize=lambda text: list(map(ord, text)), folder=folder
    )


@pytest.mark.parametrize(
    ("scenario", "tokens_in", "tokens_out"),
    [
        (PrefillHeavy(kind="prefill_heavy", input_tokens=100, requests=20), 100, 1),
        (DecodeHeavy(kind="decode_heavy", input_tokens=5, output_tokens=300, requests=20), 5, 300),
        (DecodeHeavy(kind="decode_heavy", input_tokens=1, output_tokens=2, requests=20), 1, 2),
    ],
)
def test_lengths_are_exact_and_beginnings_differ(scenario: Scenario, tokens_in: int, tokens_out: int) -> None:
    workload = build(scenario)
    assert len(workload.requests) == 20
    assert all(len(request.input_ids) == tokens_in for request in workload.requests)
    assert all(request.output_tokens == tokens_out for request in workload.requests)
    assert (workload.input_tokens, workload.output_tokens) == (20 * tokens_in, 20 * tokens_out)
    assert len({request.input_ids[0] for request in workload.requests}) == 20
    used = np.concatenate([request.input_ids for request in workload.requests])
    assert used.min() >= 100
    assert used.max() < 900


def test_mixed_lengths_lie_in_their_ranges_and_reach_both_ends() -> None:
    workload = build(Mixed(kind="mixed", input_tokens=(3, 5), output_tokens=(2, 4), requests=100))
    assert {len(request.input_ids) for request in workload.requests} == {3, 4, 5}
    assert {request.output_tokens for request in workload.requests} == {2, 3, 4}


def test_a_shared_prefix_is_shared_and_what_follows_differs() -> None:
    scenario = PrefillHeavy(kind="prefill_heavy", input_tokens=50, shared_prefix=30, requests=10)
    ids = [request.input_ids for request in build(scenario).requests]
    assert len({one[:30] for one in ids}) == 1
    assert len({one[30] for one in ids}) == 10
    assert all(len(one) == 50 for one in ids)


def test_the_seed_decides_and_the_digest_tells() -> None:
    scenario = DecodeHeavy(kind="decode_heavy")
    assert build(scenario).requests == build(scenario).requests
    assert build(scenario).digest == build(scenario).digest
    assert build(scenario, seed=1).digest != build(scenario).digest
    for change in ({"output_tokens": 255}, {"requests": 31}, {"request_rate": 3.0}):
        changed = scenario.model_copy(update=change)
        assert build(changed).digest != build(scenario).digest, change


def test_a_small_vocabulary_cannot_tell_many_prompts_apart() -> None:
    scenario = PrefillHeavy(kind="prefill_heavy", requests=81)
    with pytest.raises(ConfigError, match="81 requests; with a vocabulary of 100 only 80 prompts can begin"):
        build(scenario, vocab_size=100)


def test_levels() -> None:
    workload = build(DecodeHeavy(kind="decode_heavy", requests=32))
    assert [workload.concurrency(level) for level in (1, 8, 64, "max")] == [1, 8, 32, 32]


def test_arrivals() -> None:
    constant = DecodeHeavy(kind="decode_heavy", requests=5, request_rate=4, arrivals="constant")
    assert build(constant).offsets == (0.0, 0.25, 0.5, 0.75, 1.0)
    poisson = build(DecodeHeavy(kind="decode_heavy", requests=700, request_rate=10)).offsets
    assert poisson is not None
    gaps = np.diff(poisson)
    assert poisson[0] == 0
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.1, rel=0.15)
    assert gaps.std() == pytest.approx(0.1, rel=0.2), "as spread as exponential gaps are"
    assert build(DecodeHeavy(kind="decode_heavy")).offsets is None


QUESTION = {"question": "abc", "model_response": "de"}
TURNS = {"conversations": [{"content": "hello"}, {"content": "you"}, {"content": "ignored"}]}
OLDER = {"conversation": [{"value": "hi"}, {"value": "four"}]}


def replay(folder: Path, *lines: Any, requests: int | None = None) -> Workload:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "r.jsonl").write_text(text, encoding="utf-8")
    return build(Replay(kind="replay", file=Path("r.jsonl"), requests=requests), folder=folder)


def test_replay_reads_both_forms(tmp_path: Path) -> None:
    workload = replay(tmp_path, QUESTION, "", TURNS, OLDER)
    found = [(len(request.input_ids), request.output_tokens) for request in workload.requests]
    assert found == [(3, 2), (5, 3), (2, 4)]
    assert len(replay(tmp_path, QUESTION, TURNS, OLDER, requests=2).requests) == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{broken", "r.jsonl, line 3 is not JSON"),
        ('{"question": "x"}', "line 3 has no question with an answer: a line is"),
        ('{"question": "x", "model_response": 3}', "line 3 has no question with an answer"),
        ('{"conversations": [{"content": "x"}]}', "line 3 has no question with an answer"),
        ('["x", "y"]', "line 3 has no question with an answer"),
        ('{"question": "x", "model_response": ""}', "line 3: its answer has no tokens"),
        ('{"question": "", "model_response": "x"}', "line 3: its question has no tokens"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replay(tmp_path, QUESTION, "", line, QUESTION)


def test_replay_without_requests_or_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no requests"):
        replay(tmp_path, "", "")
    with pytest.raises(ConfigError, match="There is no file"):
        build(Replay(kind="replay", file=tmp_path / "no.jsonl"))
    with pytest.raises(ConfigError, match="cannot be read"):
        build(Replay(kind="replay", file=tmp_path))
