"""Each fault of kernels, cache, scheduling and answers: visible where it should be, and only there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pytest_quantguard.emulator.engine import SequenceResult
from pytest_quantguard.emulator.faults import FAULTS, hooks_for, parse_fault
from pytest_quantguard.emulator.faults.answers import ANSWER_FAULTS
from pytest_quantguard.emulator.faults.runtime import RUNTIME_FAULTS

from .conftest import Running, full_rows

Start = Callable[..., Running]
Tokens = Callable[..., list[int]]
Answers = dict[tuple[str, int], list[SequenceResult]]

SIZES = (1, 3, 8)
EVERYWHERE = {(phase, size) for phase in ("prefill", "decode") for size in SIZES}
DECODE = {cell for cell in EVERYWHERE if cell[0] == "decode"}
FP8 = {"kv_cache_dtype": "fp8_e4m3"}

VISIBLE: list[tuple[str, dict[str, object], set[tuple[str, int]]]] = [
    ("zero_row_nan:every=2", {}, EVERYWHERE),
    ("zero_row_nan:every=2,module=*", {}, EVERYWHERE),
    ("zero_row_nan:every=2,module=lm_head", {}, EVERYWHERE),
    ("zero_row_nan:every=1000", {}, set()),
    ("rows_zero_at_batch:every=4", {}, {("prefill", 8), ("decode", 8)}),
    ("rows_zero_at_batch:every=2,minimum=3", {}, {cell for cell in EVERYWHERE if cell[1] > 1}),
    ("padded_rows_leak", {"quantization": "nvfp4"}, {("decode", 3)}),
    ("padded_rows_leak", {"quantization": "fp8"}, {("decode", 3)}),
    ("padded_rows_leak", {}, set()),
    ("nan_at_batch", {}, {("decode", 3), ("decode", 8)}),
    ("nan_at_batch:minimum=1,maximum=1", {}, {("decode", 1)}),
    ("decode_gain", {}, DECODE),
    ("kv_fnuz", FP8, EVERYWHERE),
    ("kv_fnuz:factor=2", FP8, EVERYWHERE),
    ("kv_fnuz", {}, set()),
    ("kv_scale_one", FP8, set()),
    ("kv_scale_one:amplify=100000", FP8, EVERYWHERE),
    ("kv_read_unscaled", FP8, DECODE),
    ("kv_read_unscaled:phase=all", FP8, EVERYWHERE),
    ("kv_read_unscaled:read=key_scale", FP8, DECODE),
    ("decode_tail_precision:position=5,bits=0", {}, DECODE),
    ("decode_tail_precision:position=200", {}, set()),
    ("long_context_drop:position=20,keys=8", {}, {*DECODE, ("prefill", 8)}),
    ("long_context_drop:position=200", {}, set()),
    ("decode_position_off_by_one", {}, DECODE),
    ("logprob_temperature", {}, EVERYWHERE),
    ("logprob_sentinel", {}, EVERYWHERE),
    ("logprob_shift", {}, EVERYWHERE),
    ("rows_permuted", {}, {cell for cell in EVERYWHERE if cell[1] > 1}),
    ("double_bos", {}, EVERYWHERE),
    ("slow_step:share=0", {}, set()),
    ("runaway", {}, set()),
]


def measure(one: Running, tokens: Tokens) -> Answers:
    """Scored prompts and forced decode at each batch size, on a cold cache."""
    answers: Answers = {}
    for size in SIZES:
        prompts = [tokens(14 + 3 * number, seed=number) for number in range(size)]
        forced = [tuple(tokens(9, seed=100 + number)) for number in range(size)]
        assert one.engine.flush_cache()
        answers["prefill", size] = one.run(prompts, max_new_tokens=0)
        requests = [
            one.request(ids, forced_ids=ending, logprob_start_len=-1)
            for ids, ending in zip(prompts, forced, strict=True)
        ]
        assert one.engine.flush_cache()
        answers["decode", size] = [handle.result(60) for handle in one.engine.submit_batch(requests)]
    return answers


def rows(result: SequenceResult, phase: str) -> np.ndarray:
    """The log-probabilities by token id that the phase is measured with."""
    if phase == "prefill":
        return full_rows(result)
    assert result.output is not None
    by_id = np.empty_like(result.output.top_logprobs)
    np.put_along_axis(by_id, result.output.top_ids, result.output.top_logprobs, axis=1)
    # The first token is the prefill's.
    return by_id[1:]


def same(clean: np.ndarray, faulty: np.ndarray) -> bool:
    return clean.shape == faulty.shape and bool(np.allclose(clean, faulty, atol=1e-4, rtol=0))


@pytest.mark.parametrize(("specification", "options", "expected"), VISIBLE)
def test_where_a_fault_shows(
    running: Start,
    tokens: Tokens,
    specification: str,
    options: dict[str, object],
    expected: set[tuple[str, int]],
) -> None:
    one = running(**options)
    clean = measure(one, tokens)
    one.engine.switch_hooks(hooks_for([parse_fault(specification, FAULTS)]))
    faulty = measure(one, tokens)
    visible = {
        (phase, size)
        for (phase, size), results in clean.items()
        if not all(
            same(rows(left, phase), rows(right, phase))
            for left, right in zip(results, faulty[phase, size], strict=True)
        )
    }
    assert visible == expected
    one.engine.switch_hooks(hooks_for([]))
    for key, results in measure(one, tokens).items():
        for left, right in zip(clean[key], results, strict=True):
            np.testing.assert_array_equal(rows(left, key[0]), rows(right, key[0]))


def test_every_fault_is_tested_here() -> None:
    tested = {specification.partition(":")[0] for specification, _, _ in VISIBLE}
    others = {"chunk_kv_unscaled", "cached_page_stale"}
    assert tested | others == {fault.name for fault in (*RUNTIME_FAULTS, *ANSWER_FAULTS)}


def test_which_models_a_fault_applies_to(running: Start) -> None:
    plain = running().model.formats
    quantized = running(quantization="nvfp4", **FP8).model.formats
    assert (plain["kv_cache"], quantized["kv_cache"]) == ("bf16", "fp8_e4m3")
    assert quantized["model.layers.1.mlp.down_proj"] == "nvfp4"
    assert not parse_fault("kv_fnuz", FAULTS).applies_to(plain)
    assert parse_fault("kv_fnuz", FAULTS).applies_to(quantized)
    assert not parse_fault("nibble_swap", FAULTS).applies_to(plain)
    assert parse_fault("nibble_swap", FAULTS).applies_to(quantized)
    assert parse_fault("decode_gain", FAULTS).applies_to(plain)
    assert not parse_fault("decode_gain:module=*.layers.7.*", FAULTS).applies_to(plain)
    assert parse_fault("logprob_shift", FAULTS).applies_to(plain)


def test_nan_stays_with_the_prompts_that_reach_it(running: Start) -> None:
    one = running(faults=("zero_row_nan:every=11,module=model.layers.0.mlp.down_proj",))
    reached, spared = one.run([[3, 4, 5, 22, 6, 7], [3, 4, 5, 23, 6, 7]], max_new_tokens=0)
    assert np.isnan(full_rows(reached)[3:]).all()
    assert np.isfinite(full_rows(spared)).all()


def test_chunk_kv_unscaled_needs_a_second_chunk(running: Start, tokens: Tokens) -> None:
    ids = tokens(40)
    for size, differs in ((40, False), (24, True)):
        clean = running(chunked_prefill_size=size, **FP8).score(ids)
        faulty = running(chunked_prefill_size=size, faults=("chunk_kv_unscaled",), **FP8).score(ids)
        assert same(clean[:24], faulty[:24])
        assert same(clean, faulty) != differs


@pytest.mark.parametrize("content", ["zero", "other"])
def test_cached_page_stale_shows_on_a_warm_cache_only(running: Start, tokens: Tokens, content: str) -> None:
    one = running(faults=(f"cached_page_stale:page=1,content={content}",))
    clean = running()
    first, second = tokens(60, 1), tokens(60, 2)

    def last_row(engine: Running, ids: list[int]) -> np.ndarray:
        return full_rows(engine.run([ids], max_new_tokens=0, logprob_start_len=len(ids) - 1)[0])

    for ids in (first, second):
        assert same(last_row(clean, ids), last_row(one, ids))  # cold
    for ids in (first, second):
        assert not same(last_row(clean, ids), last_row(one, ids))  # warm
    short = tokens(12, 3)
    last_row(one, short)
    assert same(last_row(clean, short), last_row(one, short))  # the page lies beyond the prefix


def test_logprob_temperature_keeps_the_order(running: Start, tokens: Tokens) -> None:
    ids = tokens(12)
    clean = running().score(ids).astype(np.float64)
    faulty = running(faults=("logprob_temperature:temperature=0.5",)).score(ids)
    expected = 2 * clean
    expected -= np.log(np.exp(expected).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(faulty, expected, atol=1e-4)


def test_logprob_sentinel_values(running: Start, tokens: Tokens) -> None:
    (result,) = running(faults=("logprob_sentinel",)).run([tokens(6)], max_new_tokens=2, top_logprobs_num=4)
    for part in (result.prompt, result.output):
        assert part is not None
        known = slice(part.null_prefix, None)
        assert (part.logprobs[known] == 0).all()
        assert (part.top_logprobs[known, 0] == 0).all()
        assert (part.top_logprobs[known, 1:] == np.finfo(np.float32).min).all()


def test_logprob_shift_moves_rows(running: Start, tokens: Tokens) -> None:
    ids = tokens(8)
    clean = running().score(ids)
    faulty = running(faults=("logprob_shift",)).score(ids)
    np.testing.assert_array_equal(faulty[1:-1], clean[:-2])


def test_rows_permuted_moves_answers_and_keeps_ids(running: Start, tokens: Tokens) -> None:
    prompts = [tokens(5, seed) for seed in range(4)]
    one = running(faults=("rows_permuted",))
    clean = running().run(prompts, max_new_tokens=3, ignore_eos=True)
    faulty = one.run(prompts, max_new_tokens=3, ignore_eos=True)
    assert [result.output_ids for result in faulty] == [clean[place - 1].output_ids for place in range(4)]
    assert len({result.rid for result in faulty}) == 4
    (alone,) = one.run(prompts[:1], max_new_tokens=3, ignore_eos=True)
    assert alone.output_ids == clean[0].output_ids


@pytest.mark.parametrize(
    ("specification", "count"), [("double_bos:token=5", 10), ("double_bos:token=5,counted=false", 9)]
)
def test_double_bos_scores_the_same_tokens_after_one_more(
    running: Start, tokens: Tokens, specification: str, count: int
) -> None:
    ids = tokens(9)
    (faulty,) = running(faults=(specification,)).run([ids], max_new_tokens=1)
    expected = running().score([5, *ids])
    assert faulty.prompt is not None
    assert faulty.prompt.token_ids.tolist() == ids
    assert faulty.prompt_tokens == count
    np.testing.assert_allclose(full_rows(faulty), expected[1:], atol=2e-5)


def test_runaway_never_ends_by_itself(running: Start, tokens: Tokens) -> None:
    one = running("tied")
    stops = running("tied", faults=("runaway",))
    for engine in (one, stops):
        engine.model.hooks.logits.append(prefer_the_end)
    ids = tokens(5)
    (clean,), (faulty,) = one.run([ids], max_new_tokens=6), stops.run([ids], max_new_tokens=6)
    assert clean.finish_reason == {"type": "stop", "matched": 2}
    assert faulty.finish_reason == {"type": "length", "length": 6}
    assert 2 not in faulty.output_ids
    assert faulty.output is not None
    assert faulty.output.top_ids[0, 0] == 2  # what is reported is the model's own


def prefer_the_end(logits: np.ndarray, _batch: object) -> np.ndarray:
    logits[:, 2] += 50
    return logits


def test_slow_step_pauses_for_a_share_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    hooks = hooks_for([parse_fault("slow_step:share=0.5,phase=decode", FAULTS)])

    class Batch:
        phase = "decode"

    hooks.step[0](Batch(), 0.8)  # type: ignore[arg-type]
    Batch.phase = "prefill"
    hooks.step[0](Batch(), 0.8)  # type: ignore[arg-type]
    assert pauses == [0.4]


def test_faults_combine(running: Start, tokens: Tokens) -> None:
    ids = tokens(9)
    both = running(faults=("logprob_temperature", "double_bos:token=5,counted=false")).score(ids)
    single = running(faults=("logprob_temperature",)).score([5, *ids])
    np.testing.assert_allclose(both, single[1:], atol=2e-5)


def test_weight_faults_switch_in_a_running_engine(running: Start, tokens: Tokens) -> None:
    one = running(quantization="nvfp4")
    ids = tokens(12)
    clean = one.score(ids)
    one.engine.switch_hooks(hooks_for([parse_fault("nibble_swap", FAULTS)]))
    faulty = one.score(ids)
    np.testing.assert_array_equal(faulty, running(quantization="nvfp4", faults=("nibble_swap",)).score(ids))
    assert not same(clean, faulty)
    one.engine.switch_hooks(hooks_for([parse_fault("lm_head_zero", FAULTS)]))
    np.testing.assert_allclose(one.score(ids), -np.log(80), atol=1e-5)
    one.engine.switch_hooks(hooks_for([]))
    np.testing.assert_array_equal(one.score(ids), clean)


@pytest.mark.parametrize("fault", ["input_scale_zero:every=50,module=*", "padded_rows_leak"])
@pytest.mark.parametrize("quantization", ["nvfp4", "fp8", "bf16"])
def test_a_hook_that_strikes_no_row_changes_no_bit(
    running: Start, tokens: Tokens, fault: str, quantization: str
) -> None:
    ids = [token + 1 if token % 50 == 0 else token for token in tokens(60)]
    clean = running(quantization=quantization).score(ids)
    assert same(clean, running(quantization=quantization, faults=(fault,)).score(ids))


def test_a_hook_that_strikes_one_prompt_leaves_its_neighbour_alone(running: Start, tokens: Tokens) -> None:
    prompts = [[token | 1 for token in tokens(40, seed)] for seed in (1, 2)]
    prompts[0][7] = 50
    fault = ("input_scale_zero:every=50,module=model.layers.0.self_attn.k_proj",)
    clean = running(quantization="nvfp4").run(prompts, max_new_tokens=0)
    faulty = running(quantization="nvfp4", faults=fault).run(prompts, max_new_tokens=0)
    assert not np.isfinite(full_rows(faulty[0])[8:]).any()
    assert same(full_rows(clean[1]), full_rows(faulty[1]))


def test_a_quantized_cache_is_no_layer() -> None:
    formats = {"model.layers.0.mlp.down_proj": "bf16", "kv_cache": "fp8_e5m2"}
    assert not parse_fault("global_scale_missing", FAULTS).applies_to(formats)
