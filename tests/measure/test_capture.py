"""Capture, noise floor and accepted runs on the toy model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from pytest_quantguard.baseline.recording import CellKey, Recording
from pytest_quantguard.baseline.store import read_recording, write_recording
from pytest_quantguard.config import GateConfig
from pytest_quantguard.errors import BaselineError, ConfigError, InvalidAnswerError
from pytest_quantguard.logprobs.divergence import compare
from pytest_quantguard.logprobs.metrics import METRICS
from pytest_quantguard.measure.capture import accept, capture, cell_keys
from pytest_quantguard.measure.cells import measure_cell
from pytest_quantguard.measure.comparison import compare_cells, noise_floor
from pytest_quantguard.measure.decode import DecodeChoice
from pytest_quantguard.prompts.prompt import Prompt
from pytest_quantguard.prompts.suite import PromptSuite
from pytest_quantguard.serving.answers import Capabilities

from .toy import EOS, VOCAB, ToyClient, ToyModel, toy_prompts

CAPABILITIES = Capabilities(
    kind="emulator",
    version="1",
    model_path=None,
    dtype="bfloat16",
    quantization=None,
    kv_cache_dtype="auto",
    vocab_size=VOCAB,
    context_length=64,
    flat_logprobs=True,
    forced_decode="emulator_field",
    deterministic=True,
    radix_cache=True,
    chunked_prefill_size=None,
    device="cpu",
    server_args={"tp_size": 1, "port": 1234, "api_key": "hush", "hf_token": "hush"},
)


@dataclass
class ToyServer:
    client: ToyClient = field(default_factory=ToyClient)
    capabilities: Capabilities = CAPABILITIES


def make_suite(*texts: str) -> PromptSuite:
    prompts = tuple(
        Prompt(f"p{index}", "qa" if index % 2 else "code", text=text) for index, text in enumerate(texts)
    )
    return PromptSuite("builtin", prompts, "ab" * 32)


SUITE = make_suite("one two", "three", "a longer text", "four", "five!")


def make_config(**suite: object) -> GateConfig:
    asked = {"score_tokens": 4, "top_logprobs": 8, "batch_sizes": [1, 3], "repeats": 2, **suite}
    return GateConfig.model_validate(
        {
            "version": 1,
            "name": "toy",
            "reference": {"backend": "emulator", "model_path": "toy-model"},
            "candidate": {"backend": "emulator", "model_path": "toy-model", "quantization": "nvfp4"},
            "baseline": "baselines/toy",
            "suite": asked,
            "accuracy": {"kl_mean": {"max": 0.1}},
        }
    )


def test_capture_records_continuations_and_all_cells(tmp_path: Path) -> None:
    server = ToyServer()
    lines: list[str] = []
    recording = capture(server, SUITE, make_config(), progress=lines.append)
    for prompt, source in zip(recording.prompts, SUITE.prompts, strict=True):
        start = server.client.tokenize(source.text or "")
        assert prompt.token_ids.tolist() == start + server.client.model.continuation(start, 4)
        assert (prompt.id, prompt.task) == (source.id, source.task)
        assert prompt.prompt_tokens == prompt.span_start == len(start)
    assert list(recording.cells) == [CellKey(p, n) for p in ("prefill", "decode") for n in (1, 3)]
    assert all(
        value == 0 for floor in recording.noise_floor.values() for value in (floor["kl_max"], floor["js_max"])
    )
    assert all(floor["agreement"] == 1 for floor in recording.noise_floor.values())
    manifest = recording.manifest
    assert manifest.kind == "baseline"
    assert manifest.suite.decode_mode == "forced"
    assert manifest.suite.width == 8
    assert manifest.server.arguments == {"tp_size": 1, "api_key": "***", "hf_token": "***"}
    assert "hush" not in manifest.model_dump_json()
    write_recording(tmp_path / "toy", recording)
    stored = read_recording(tmp_path / "toy")
    assert stored.noise_floor == recording.noise_floor
    for key, cell in recording.cells.items():
        for ours, theirs in zip(cell.rows, stored.cells[key].rows, strict=True):
            assert np.array_equal(ours.logprobs, theirs.logprobs)
    assert lines[0] == "capture: greedy continuations, batch 1 of 2"
    assert "capture, repeat 2 of 2: decode-bs3: batch 2 of 2" in lines


def test_capture_needs_a_reference() -> None:
    config = make_config().model_copy(update={"reference": None})
    with pytest.raises(ConfigError, match="no `reference` to capture"):
        capture(ToyServer(), SUITE, config)


def test_a_continuation_that_ends_lets_the_span_reach_into_the_prompt() -> None:
    server = ToyServer(ToyClient(ToyModel(end_after=9)))
    recording = capture(server, make_suite("seven t", "eight to"), make_config())
    seven, eight = recording.prompts
    # Tokens 7 and 8 are generated before the end token at 9, which counts as generated.
    assert (seven.token_ids.size, seven.prompt_tokens, seven.span_start) == (10, 7, 6)
    assert (eight.token_ids.size, eight.prompt_tokens, eight.span_start) == (10, 8, 6)
    assert seven.token_ids[-1] == EOS
    ends_at_once = capture(server, make_suite("eleven char"), make_config()).prompts[0]
    assert (ends_at_once.token_ids.size, ends_at_once.span_start) == (12, 8)


def test_score_tokens_beyond_what_there_is() -> None:
    server = ToyServer(ToyClient(ToyModel(end_after=0)))
    suite = make_suite("abc", "a text of some length")
    with pytest.raises(BaselineError) as caught:
        capture(server, suite, make_config(score_tokens=6))
    message = str(caught.value)
    assert "suite.score_tokens is 6" in message
    assert "p0 (3 prompt tokens + 1 generated)" in message
    assert "p1" not in message
    assert "Lower it to 3 or replace them by longer prompts." in message


def test_prompts_beyond_the_context() -> None:
    with pytest.raises(BaselineError, match=r"context of 64 tokens: p0 \(62 tokens\).*max_prompt_tokens"):
        capture(ToyServer(), make_suite("x" * 62), make_config())


def test_prompts_without_tokens() -> None:
    server = ToyServer(ToyClient(texts={"odd": []}))
    with pytest.raises(BaselineError, match="no tokens: p0"):
        capture(server, make_suite("odd"), make_config())


def jitter(scale: float):
    def perturb(asked, logits):
        generator = np.random.default_rng([asked.call, asked.slot, asked.position])
        return logits + generator.normal(0, scale, logits.size)

    return perturb


def test_noise_floor_is_the_worst_of_all_pairs() -> None:
    server = ToyServer(ToyClient(perturb=jitter(0.1)))
    prompts = toy_prompts(4, 5)
    recordings = {
        CellKey("prefill", size): [
            measure_cell(server.client, prompts, CellKey("prefill", size), top_logprobs=8).cell
            for _ in range(2)
        ]
        for size in (1, 4)
    }
    floor = noise_floor(recordings)

    def between(one, other) -> float:
        values = [
            compare(a, b).kl
            for x, y in ((one, other), (other, one))
            for a, b in zip(x.rows, y.rows, strict=True)
        ]
        half = len(values) // 2
        return max(float(np.concatenate(values[:half]).mean()), float(np.concatenate(values[half:]).mean()))

    one, four = recordings[CellKey("prefill", 1)], recordings[CellKey("prefill", 4)]
    expected = max(between(one[0], one[1]), between(one[0], four[0]))
    assert expected > 0
    assert floor[CellKey("prefill", 1)]["kl_mean"] == pytest.approx(expected)
    for values in floor.values():
        assert values["probability_shift_mean"] < 0 < values["log_perplexity_ratio"]
        assert values.keys() <= METRICS.keys()
    assert noise_floor({CellKey("prefill", 1): one[:1]}) == {}


def test_a_batch_dependent_reference_has_a_floor_across_batch_sizes() -> None:
    def perturb(asked, logits):
        return logits * (1.01 if asked.batch_size > 1 else 1.0)

    recording = capture(ToyServer(ToyClient(perturb=perturb)), SUITE, make_config())
    assert all(floor["kl_mean"] > 0 for floor in recording.noise_floor.values())


def test_a_narrower_cell_stays_narrower(tmp_path: Path) -> None:
    class Narrow(ToyClient):
        def generate(self, batch, *, top_logprobs=0):
            self.most_logprobs = 6 if batch[0].forced_ids else None
            return super().generate(batch, top_logprobs=top_logprobs)

    recording = capture(ToyServer(Narrow()), SUITE, make_config())
    widths = {key.phase: {rows.width for rows in cell.rows} for key, cell in recording.cells.items()}
    assert widths == {"prefill": {8}, "decode": {6}}
    assert (recording.manifest.suite.width, recording.manifest.suite.top_logprobs) == (6, 8)
    write_recording(tmp_path / "toy", recording)


def measured(server: ToyServer, baseline: Recording, config: GateConfig):
    return [
        measure_cell(server.client, baseline.prompts, key, top_logprobs=8, decode=DecodeChoice("forced"))
        for key in cell_keys(config.suite)
    ]


def test_accept_makes_a_recording_of_the_candidate(tmp_path: Path) -> None:
    config = make_config()
    baseline = capture(ToyServer(), SUITE, config)
    candidate = ToyServer(ToyClient(perturb=jitter(0.05)))
    measurements = measured(candidate, baseline, config)
    key = measurements[0].key
    again = [measure_cell(candidate.client, baseline.prompts, key, top_logprobs=8) for _ in range(2)]
    accepted = accept(
        measurements,
        config=config,
        capabilities=candidate.capabilities,
        baseline=baseline,
        repeats={key: [repeat.cell for repeat in again]},
    )
    assert accepted.manifest.kind == "accepted"
    assert accepted.manifest.model.quantization == "nvfp4"
    assert accepted.manifest.suite.prompts_digest == baseline.manifest.suite.prompts_digest
    assert accepted.manifest.repeats == 3
    assert (
        accepted.cells[measurements[1].key].rows[0].logprobs.tolist()
        == measurements[1].cell.rows[0].logprobs.tolist()
    )
    write_recording(tmp_path / "accepted", accepted)
    assert read_recording(tmp_path / "accepted").manifest.kind == "accepted"
    with pytest.raises(BaselineError, match="did not measure decode-bs3"):
        accept(measurements[:-1], config=config, capabilities=candidate.capabilities, baseline=baseline)


def test_vocabularies_that_differ_by_padding_are_compared_with_a_reason() -> None:
    prompts = toy_prompts(2, 4)
    plain = measure_cell(ToyClient(), prompts, CellKey("prefill", 2), top_logprobs=8).cell
    padded = measure_cell(
        ToyClient(vocab_size=VOCAB + 128), prompts, CellKey("prefill", 2), top_logprobs=8
    ).cell
    comparison = compare_cells(plain, padded)
    assert comparison.divergence.aggregate("kl_max") == 0
    assert comparison.notes == (
        "the baseline's vocabulary has 64 entries, the candidate's 192; the last 128 of the larger pad "
        "it to a multiple of 64 and occur in no row, so 64 are compared",
    )
    assert compare_cells(plain, plain).notes == ()


def test_other_vocabularies_are_refused() -> None:
    prompts = toy_prompts(2, 4)
    key = CellKey("prefill", 2)
    plain = measure_cell(ToyClient(), prompts, key, top_logprobs=8).cell
    other = measure_cell(ToyClient(vocab_size=5000), prompts, key, top_logprobs=8).cell
    with pytest.raises(
        InvalidAnswerError, match="has 5000 entries where the baseline has 64, and 4936 more are no padding"
    ):
        compare_cells(plain, other)
    ids = plain.rows[0].token_ids.copy()
    ids[0, 3] = 70
    rows = (dataclasses.replace(plain.rows[0], token_ids=ids, vocab_size=128), plain.rows[1])
    used = dataclasses.replace(plain, rows=tuple(dataclasses.replace(part, vocab_size=128) for part in rows))
    with pytest.raises(
        InvalidAnswerError,
        match=r"token id 70 is used: these are different models.*quantguard capture CONFIG",
    ):
        compare_cells(plain, used)


def test_cells_of_other_prompts_are_refused() -> None:
    key = CellKey("prefill", 2)
    two = measure_cell(ToyClient(), toy_prompts(2, 4), key, top_logprobs=8).cell
    three = measure_cell(ToyClient(), toy_prompts(3, 4), key, top_logprobs=8).cell
    with pytest.raises(InvalidAnswerError, match="3 prompts cannot be compared with 2"):
        compare_cells(two, three)
    longer = measure_cell(ToyClient(), toy_prompts(2, 5), key, top_logprobs=8).cell
    with pytest.raises(InvalidAnswerError, match=r"prompt number 0.*5 positions where the baseline has 4"):
        compare_cells(two, longer)
