"""Scheduling, batching, caching and the shape of results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pytest_quantguard.emulator.batch import ForwardBatch
from pytest_quantguard.emulator.engine import SequenceRequest, SequenceResult
from pytest_quantguard.emulator.formats import FORMATS
from pytest_quantguard.emulator.hooks import Hooks, WeightRule
from pytest_quantguard.errors import RequestRejectedError, ServerError

from .conftest import Running, full_rows

Start = Callable[..., Running]
Tokens = Callable[..., list[int]]


def watch(one: Running) -> list[ForwardBatch]:
    """The batches that the engine computes from now on."""
    seen: list[ForwardBatch] = []
    one.engine.switch_hooks(Hooks(step=[lambda batch, _seconds: seen.append(batch)]))
    return seen


def outputs(result: SequenceResult) -> np.ndarray:
    assert result.output is not None
    return result.output.top_logprobs


class TestBatching:
    def test_a_batch_runs_together(self, running: Start, tokens: Tokens) -> None:
        one = running()
        batches = watch(one)
        one.run([tokens(count, count) for count in (4, 9, 2)], max_new_tokens=3, ignore_eos=True)
        assert [(batch.phase, batch.size, batch.rows) for batch in batches] == [
            ("prefill", 3, 15),
            ("decode", 3, 3),
            ("decode", 3, 3),
        ]

    def test_any_number_of_threads_gives_the_same_bits(self, running: Start, tokens: Tokens) -> None:
        prompts = [tokens(count, count) for count in (150, 9, 40, 2)]
        found = []
        for threads in (1, 2, 5):
            results = running(threads=threads).run(prompts, max_new_tokens=4, ignore_eos=True)
            found.append([full_rows(result) for result in results])
        for other in found[1:]:
            assert all(np.array_equal(one, same) for one, same in zip(found[0], other, strict=True))

    def test_a_later_prompt_joins_the_running_ones(self, running: Start, tokens: Tokens) -> None:
        one = running()
        batches: list[ForwardBatch] = []
        joined = []

        def join(batch: ForwardBatch, _seconds: float) -> None:
            batches.append(batch)
            if len(batches) == 3:
                joined.extend(one.start([tokens(6, 1)], max_new_tokens=2, ignore_eos=True))

        one.engine.switch_hooks(Hooks(step=[join]))
        (first,) = one.run([tokens(5)], max_new_tokens=6, ignore_eos=True)
        assert [(batch.phase, batch.size) for batch in batches] == [
            ("prefill", 1),
            ("decode", 1),
            ("decode", 1),
            ("prefill", 1),
            ("decode", 2),
            ("decode", 1),
            ("decode", 1),
        ]
        assert len(first.output_ids) == 6
        assert len(joined[0].result(10).output_ids) == 2

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_the_same_batch_gives_the_same_bits(self, running: Start, tokens: Tokens, dtype: str) -> None:
        one = running(dtype=dtype, radix_cache=False)
        prompts = [tokens(count, count) for count in (40, 3, 17, 17, 90)]
        first, second = (one.run(prompts, max_new_tokens=7, ignore_eos=True) for _ in range(2))
        for left, right in zip(first, second, strict=True):
            assert left.output_ids == right.output_ids
            np.testing.assert_array_equal(full_rows(left), full_rows(right))

    def test_batch_size_changes_float32_rounding_only(self, running: Start, tokens: Tokens) -> None:
        one = running()
        prompts = [tokens(count, count) for count in (40, 3, 17, 60)]
        together = one.run(prompts, max_new_tokens=5, ignore_eos=True)
        for ids, batched in zip(prompts, together, strict=True):
            (alone,) = one.run([ids], max_new_tokens=5, ignore_eos=True)
            np.testing.assert_allclose(full_rows(alone), full_rows(batched), atol=2e-5, rtol=0)

    def test_more_sequences_than_may_run_wait_their_turn(self, running: Start, tokens: Tokens) -> None:
        one = running(max_running_requests=2)
        batches = watch(one)
        results = one.run([tokens(4, seed) for seed in range(5)], max_new_tokens=3, ignore_eos=True)
        assert [len(result.output_ids) for result in results] == [3] * 5
        assert max(batch.size for batch in batches) == 2
        assert one.engine.load() == (0, 0)

    def test_a_whole_batch_waits_for_room(self, running: Start, tokens: Tokens) -> None:
        """With 2 of 4 places taken a batch of 3 waits instead of being torn apart."""
        one = running(max_running_requests=4)
        batches: list[ForwardBatch] = []
        waiting = []

        def submit(batch: ForwardBatch, _seconds: float) -> None:
            batches.append(batch)
            if len(batches) == 1:
                waiting.extend(one.start([tokens(3, seed) for seed in (7, 8, 9)], max_new_tokens=1))

        one.engine.switch_hooks(Hooks(step=[submit]))
        one.run([tokens(5), tokens(6)], max_new_tokens=3, ignore_eos=True)
        for sequence in waiting:
            sequence.result(10)
        assert [batch.size for batch in batches] == [2, 2, 2, 3]

    def test_memory_for_fewer_than_the_batch(self, running: Start, tokens: Tokens) -> None:
        one = running(max_total_tokens=128)
        results = one.run([tokens(40, seed) for seed in range(4)], max_new_tokens=2, ignore_eos=True)
        assert [result.finish_reason for result in results] == [{"type": "length", "length": 2}] * 4

    def test_sequences_of_very_different_lengths_decode_together(
        self, running: Start, tokens: Tokens
    ) -> None:
        """Slots of two capacities, one of them between others: several runs of views in one step."""
        one = running()
        prompts = [tokens(count, count) for count in (10, 150, 12, 70, 9)]
        together = one.run(prompts, max_new_tokens=4, ignore_eos=True)
        for ids, batched in zip(prompts, together, strict=True):
            (alone,) = one.run([ids], max_new_tokens=4, ignore_eos=True)
            assert alone.output_ids == batched.output_ids
            np.testing.assert_allclose(outputs(alone), outputs(batched), atol=2e-5, rtol=0)


class TestChunks:
    @pytest.mark.parametrize("size", [1, 7, 16, 33])
    def test_chunked_prefill_equals_one_pass(self, running: Start, tokens: Tokens, size: int) -> None:
        whole, chunked = running(), running(chunked_prefill_size=size)
        prompts = [tokens(count, count) for count in (33, 20)]
        for left, right in zip(
            whole.run(prompts, max_new_tokens=2), chunked.run(prompts, max_new_tokens=2), strict=True
        ):
            np.testing.assert_allclose(full_rows(left), full_rows(right), atol=2e-5, rtol=0)

    def test_passes_hold_at_most_the_chunk_size(self, running: Start, tokens: Tokens) -> None:
        one = running(chunked_prefill_size=16)
        batches = watch(one)
        one.run([tokens(20, 1), tokens(20, 2)], max_new_tokens=0)
        assert [batch.rows for batch in batches] == [16, 16, 8]
        chunks = [[(entry.rid, entry.chunk) for entry in batch.entries] for batch in batches]
        assert chunks == [[("r1", 0)], [("r1", 1), ("r2", 0)], [("r2", 1)]]


class TestPrefixCache:
    def test_a_hit_gives_the_cold_answer(self, running: Start, tokens: Tokens) -> None:
        one = running()
        ids = tokens(40)
        (cold,) = one.run([ids], max_new_tokens=3, logprob_start_len=-1)
        (warm,) = one.run([[*ids[:30], *tokens(8, 5)]], max_new_tokens=3, logprob_start_len=-1)
        (fresh,) = running(radix_cache=False).run(
            [[*ids[:30], *tokens(8, 5)]], max_new_tokens=3, logprob_start_len=-1
        )
        assert (cold.cached_tokens, warm.cached_tokens, fresh.cached_tokens) == (0, 30, 0)
        np.testing.assert_allclose(outputs(warm), outputs(fresh), atol=2e-5, rtol=0)

    def test_generated_tokens_are_cached_too(self, running: Start, tokens: Tokens) -> None:
        one = running()
        ids = tokens(10)
        (first,) = one.run([ids], max_new_tokens=5, ignore_eos=True)
        (second,) = one.run([[*ids, *first.output_ids, 7]], max_new_tokens=1, logprob_start_len=-1)
        assert second.cached_tokens == 14  # the last token's keys and values were never computed

    def test_the_same_prompt_computes_its_last_token(self, running: Start, tokens: Tokens) -> None:
        one = running()
        ids = tokens(12)
        assert [one.run([ids], logprob_start_len=-1)[0].cached_tokens for _ in range(2)] == [0, 11]

    def test_scored_positions_are_never_taken_from_the_cache(self, running: Start, tokens: Tokens) -> None:
        """As recorded of SGLang: cached_tokens = logprob_start_len."""
        one = running()
        ids = tokens(26)
        expected = one.score(ids)
        (warm,) = one.run([ids], max_new_tokens=0, logprob_start_len=5)
        assert warm.cached_tokens == 5
        np.testing.assert_allclose(full_rows(warm), expected[5:], atol=2e-5, rtol=0)

    def test_pages(self, running: Start, tokens: Tokens) -> None:
        one = running(page_size=16)
        ids = tokens(40)
        one.run([ids], logprob_start_len=-1)
        assert one.run([[*ids[:37], 5, 6, 7]], logprob_start_len=-1)[0].cached_tokens == 32

    def test_flush_and_switch_off(self, running: Start, tokens: Tokens) -> None:
        one, off = running(), running(radix_cache=False)
        ids = tokens(20)
        for engine in (one, off):
            engine.run([ids], logprob_start_len=-1)
        assert one.engine.cached_tokens == 20 + 127
        assert one.engine.flush_cache()
        assert one.engine.cached_tokens == 0
        for engine in (one, off):
            assert engine.run([ids], logprob_start_len=-1)[0].cached_tokens == 0

    def test_flush_is_refused_while_something_runs(self, running: Start, tokens: Tokens) -> None:
        one = running()
        answers = []
        one.engine.switch_hooks(Hooks(step=[lambda *_: answers.append(one.engine.flush_cache())]))
        one.run([tokens(5)], max_new_tokens=2, ignore_eos=True)
        assert answers == [False, False]

    def test_least_recently_used_prefixes_give_way(self, running: Start, tokens: Tokens) -> None:
        one = running(max_cached_tokens=128)  # two slots of the smallest capacity
        prompts = [tokens(30, seed) for seed in range(3)]
        for ids in prompts:
            one.run([ids], max_new_tokens=1, logprob_start_len=-1)
        cached = [
            one.run([ids], max_new_tokens=0, logprob_start_len=-1)[0].cached_tokens for ids in prompts[::-1]
        ]
        assert cached == [29, 29, 0]

    def test_a_running_sequence_lends_its_prefix(self, running: Start, tokens: Tokens) -> None:
        one = running()
        ids, later = tokens(20), []

        def submit(batch: ForwardBatch, _seconds: float) -> None:
            if batch.phase == "decode" and not later:
                later.extend(one.start([[*ids, 9, 9]], max_new_tokens=1, logprob_start_len=-1))

        one.engine.switch_hooks(Hooks(step=[submit]))
        one.run([ids], max_new_tokens=4, ignore_eos=True)
        assert later[0].result(10).cached_tokens == 20


class TestDecoding:
    def test_forced_tokens_leave_the_distributions_alone(self, running: Start, tokens: Tokens) -> None:
        one = running()
        ids, forced = tokens(11), tokens(9, 4)
        (result,) = one.run([ids], forced_ids=tuple(forced), max_new_tokens=50)
        assert list(result.output_ids) == forced
        assert result.finish_reason == {"type": "length", "length": 9}
        scored = one.score([*ids, *forced])
        np.testing.assert_allclose(full_rows(result), scored[:-1], atol=2e-5, rtol=0)
        assert result.output is not None
        np.testing.assert_allclose(result.output.logprobs, scored[range(10, 19), forced], atol=2e-5, rtol=0)

    def test_bfloat16_decode_agrees_with_prefill_to_its_rounding(
        self, running: Start, tokens: Tokens
    ) -> None:
        one = running(dtype="bfloat16", radix_cache=False)
        ids, forced = tokens(11), tokens(30, 4)
        (result,) = one.run([ids], forced_ids=tuple(forced))
        scored = one.score([*ids, *forced])[len(ids) - 1 : -1]
        p, q = scored.astype(np.float64), full_rows(result)[len(ids) - 1 :].astype(np.float64)
        assert np.mean(np.sum(np.exp(p) * (p - q), axis=1)) < 1e-4

    def test_greedy_ties_go_to_the_lowest_id(self, running: Start, tokens: Tokens) -> None:
        one = running()
        one.engine.switch_hooks(Hooks(logits=[lambda logits, _batch: np.floor(logits / 4)]))
        (result,) = one.run([tokens(6)], max_new_tokens=3, ignore_eos=True)
        assert result.output is not None
        for token, ids, values in zip(
            result.output_ids, result.output.top_ids, result.output.top_logprobs, strict=True
        ):
            best = ids[values == values[0]]
            assert token == ids[0] == best.min()
            assert all(np.all(np.diff(ids[values == value]) > 0) for value in np.unique(values))

    def test_end_tokens(self, running: Start, tokens: Tokens) -> None:
        one = running()
        ids = tokens(7)
        (free,) = one.run([ids], max_new_tokens=8, ignore_eos=True)
        third = free.output_ids[2]
        stop = free.output_ids.index(third)
        (stopped,) = one.run([ids], max_new_tokens=8, stop_token_ids=(third,))
        assert stopped.output_ids == free.output_ids[: stop + 1]
        assert stopped.finish_reason == {"type": "stop", "matched": third}
        (ignored,) = one.run([ids], max_new_tokens=8, stop_token_ids=(third,), ignore_eos=True)
        assert ignored.output_ids == free.output_ids

    def test_the_models_own_end_token(self, running: Start, tokens: Tokens) -> None:
        one = running()

        def prefer_two(logits: np.ndarray, _batch: ForwardBatch) -> np.ndarray:
            logits[:, 2] += 100
            return logits

        one.engine.switch_hooks(Hooks(logits=[prefer_two]))
        (result,) = one.run([tokens(4)], max_new_tokens=5)
        assert (result.output_ids, result.finish_reason) == ((2,), {"type": "stop", "matched": 2})
        (forced,) = one.run([tokens(4)], forced_ids=(2, 2, 5))
        assert forced.output_ids == (2, 2, 5)

    def test_sampling_is_seeded_and_scaled(self, running: Start, tokens: Tokens) -> None:
        one = running()
        ids = tokens(6)
        draws = [
            one.run([ids], temperature=0.7, seed=seed, max_new_tokens=12, ignore_eos=True)[0]
            for seed in (1, 1, 2)
        ]
        assert draws[0].output_ids == draws[1].output_ids != draws[2].output_ids
        greedy = full_rows(one.run([ids], max_new_tokens=1)[0])[-1].astype(np.float64)
        scaled = greedy / 0.7
        scaled -= np.log(np.exp(scaled).sum())
        assert draws[0].output is not None
        first = np.empty(80)
        first[draws[0].output.top_ids[0]] = draws[0].output.top_logprobs[0]
        np.testing.assert_allclose(first, scaled, atol=1e-4)
        np.testing.assert_allclose(draws[0].output.logprobs[0], scaled[draws[0].output_ids[0]], atol=1e-4)

    def test_a_sampled_sequence_does_not_change_its_neighbours(self, running: Start, tokens: Tokens) -> None:
        one = running()
        requests = [one.request(tokens(6, seed), max_new_tokens=4, ignore_eos=True) for seed in (1, 2)]
        plain = [handle.result(10) for handle in one.engine.submit_batch(requests)]
        hot = [replace(requests[0], temperature=2.0, seed=3, rid="hot"), replace(requests[1], rid="cold")]
        mixed = [handle.result(10) for handle in one.engine.submit_batch(hot)]
        assert mixed[0].output_ids != plain[0].output_ids
        np.testing.assert_array_equal(full_rows(mixed[1]), full_rows(plain[1]))


class TestResults:
    def test_rows_of_a_scored_prompt(self, running: Start, tokens: Tokens) -> None:
        one = running()
        ids = tokens(10)
        (result,) = one.run(
            [ids],
            max_new_tokens=2,
            logprob_start_len=4,
            top_logprobs_num=5,
            token_ids_logprob=(7, 3),
            ignore_eos=True,
        )
        prompt, output = result.prompt, result.output
        assert prompt is not None
        assert output is not None
        assert prompt.token_ids.tolist() == ids[4:]
        assert prompt.null_prefix == 1
        assert np.isnan(prompt.logprobs[0])
        assert np.isfinite(prompt.logprobs[1:]).all()
        assert prompt.top_ids.shape == prompt.top_logprobs.shape == (6, 5)
        assert (prompt.top_ids[0] == -1).all()
        assert output.token_ids.tolist() == list(result.output_ids)
        assert output.top_ids.shape == (2, 5)
        assert output.selected_logprobs.shape == (2, 2)
        everything = one.score([*ids, *result.output_ids])
        np.testing.assert_allclose(prompt.logprobs[1:], everything[range(4, 9), ids[5:]], atol=2e-5)
        np.testing.assert_allclose(prompt.selected_logprobs[1:], everything[4:9][:, [7, 3]], atol=2e-5)
        np.testing.assert_allclose(output.selected_logprobs, everything[9:11][:, [7, 3]], atol=2e-5)
        assert {array.dtype for array in (prompt.logprobs, prompt.top_logprobs)} == {np.dtype(np.float32)}
        assert {array.dtype for array in (prompt.token_ids, prompt.top_ids)} == {np.dtype(np.int32)}

    def test_no_new_tokens_gives_the_next_distribution(self, running: Start, tokens: Tokens) -> None:
        (result,) = running().run([tokens(5)], max_new_tokens=0, top_logprobs_num=3)
        assert result.output is not None
        assert result.output_ids == ()
        assert result.output.token_ids.shape == result.output.logprobs.shape == (0,)
        assert result.output.top_ids.shape == (1, 3)
        assert result.finish_reason == {"type": "length", "length": 0}

    def test_what_was_not_asked_for_is_absent(self, running: Start, tokens: Tokens) -> None:
        one = running()
        (silent,) = one.run([tokens(5)], return_logprob=False, max_new_tokens=1)
        assert (silent.prompt, silent.output) == (None, None)
        (output_only,) = one.run([tokens(5)], logprob_start_len=-1, max_new_tokens=1)
        assert output_only.prompt is None
        (end,) = one.run([tokens(5)], logprob_start_len=5, max_new_tokens=1)
        assert end.prompt is not None
        assert end.prompt.token_ids.shape == (0,)
        assert end.prompt.null_prefix == 0

    def test_requests_of_one_batch_keep_their_own_wishes(self, running: Start, tokens: Tokens) -> None:
        one = running()
        requests = [
            one.request(tokens(5, 1), top_logprobs_num=2, max_new_tokens=1),
            one.request(tokens(6, 2), return_logprob=False, max_new_tokens=3, ignore_eos=True),
            one.request(
                tokens(7, 3), top_logprobs_num=9, logprob_start_len=2, max_new_tokens=2, ignore_eos=True
            ),
        ]
        results = [handle.result(10) for handle in one.engine.submit_batch(requests)]
        assert [len(result.output_ids) for result in results] == [1, 3, 2]
        assert results[0].prompt is not None
        assert results[2].prompt is not None
        assert results[0].prompt.top_ids.shape == (5, 2)
        assert results[1].prompt is None
        assert results[2].prompt.top_ids.shape == (5, 9)
        np.testing.assert_array_equal(results[0].rid, requests[0].rid)

    def test_events_grow_and_end(self, running: Start, tokens: Tokens) -> None:
        one = running()
        (handle,) = one.start([tokens(5)], max_new_tokens=6, ignore_eos=True)
        states = list(handle.events())
        counts = [len(state.output_ids) for state in states]
        assert counts == sorted(counts)
        assert counts[-1] == 6
        assert states[-1].finish_reason == {"type": "length", "length": 6}
        assert all(state.output_ids == states[-1].output_ids[: len(state.output_ids)] for state in states)
        assert all(len(outputs(state)) == len(state.output_ids) for state in states)

    def test_progress_is_reported_once_per_token(self, running: Start, tokens: Tokens) -> None:
        one = running()
        seen: list[tuple[int, bool]] = []
        request = one.request(tokens(5), max_new_tokens=3, ignore_eos=True)
        handle = one.engine.submit(
            request, lambda sequence: seen.append((len(sequence.partial().output_ids), sequence.done))
        )
        handle.result(10)
        one.engine.stop()
        assert seen == [(1, False), (2, False), (3, True)]


class TestEnds:
    def test_abort(self, running: Start, tokens: Tokens) -> None:
        one = running()
        running_id = one.request(tokens(5), max_new_tokens=100, ignore_eos=True)
        seen = []

        def abort(batch: ForwardBatch, _seconds: float) -> None:
            seen.append(batch)
            if len(seen) == 3:
                assert one.engine.abort(running_id.rid)

        one.engine.switch_hooks(Hooks(step=[abort]))
        result = one.engine.submit(running_id).result(10)
        assert result.finish_reason is not None
        assert result.finish_reason["type"] == "abort"
        assert len(result.output_ids) == 3
        assert not one.engine.abort(running_id.rid)
        assert one.engine.load() == (0, 0)

    def test_abort_while_waiting(self, running: Start, tokens: Tokens) -> None:
        one = running(max_running_requests=1)
        waiting = one.request(tokens(4), max_new_tokens=5)
        handles = []

        def submit(_batch: ForwardBatch, _seconds: float) -> None:
            if not handles:
                handles.append(one.engine.submit(waiting))
                one.engine.abort(waiting.rid)

        one.engine.switch_hooks(Hooks(step=[submit]))
        one.run([tokens(5)], max_new_tokens=3, ignore_eos=True)
        result = handles[0].result(10)
        assert result.finish_reason == {"type": "abort", "message": "Abort in waiting queue"}
        assert result.output_ids == ()

    def test_an_error_of_the_model_reaches_the_handle_and_the_engine_lives_on(
        self, running: Start, tokens: Tokens
    ) -> None:
        one = running()

        def break_once(_logits: np.ndarray, _batch: ForwardBatch) -> np.ndarray:
            raise ValueError("the kernel is broken")

        one.engine.switch_hooks(Hooks(logits=[break_once]))
        (handle,) = one.start([tokens(4)])
        with pytest.raises(ValueError, match="the kernel is broken"):
            handle.result(10)
        one.engine.switch_hooks(Hooks())
        assert one.run([tokens(4)], max_new_tokens=1)[0].finish_reason == {"type": "length", "length": 1}

    def test_stop_ends_what_runs(self, running: Start, tokens: Tokens) -> None:
        one = running()
        started = threading.Event()
        one.engine.switch_hooks(Hooks(step=[lambda *_: started.set()]))
        (handle,) = one.start([tokens(4)], max_new_tokens=200, ignore_eos=True)
        assert started.wait(10)
        one.engine.stop()
        with pytest.raises(ServerError, match="the engine has stopped"):
            handle.result(10)
        with pytest.raises(ServerError, match="the engine has stopped"):
            one.run([tokens(4)])
        with pytest.raises(ServerError, match="the engine has stopped"):
            one.engine.flush_cache()

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_an_internal_error_ends_everything_with_its_cause(self, running: Start, tokens: Tokens) -> None:
        one = running()

        def break_engine(_batch: ForwardBatch, _seconds: float) -> None:
            raise SystemError("impossible")

        one.engine.switch_hooks(Hooks(step=[break_engine]))
        (handle,) = one.start([tokens(4)], max_new_tokens=3)
        with pytest.raises(ServerError, match="the engine has stopped: SystemError: impossible"):
            handle.result(10)

    def test_non_finite_content_does_not_reach_the_next_sequence(
        self, running: Start, tokens: Tokens
    ) -> None:
        """A slot that held NaN is used again by a shorter neighbour, whose padding lies over it."""
        one = running(radix_cache=False)
        clean = [one.run([tokens(5, seed)], max_new_tokens=3, ignore_eos=True)[0] for seed in (1, 2)]
        poison = Hooks(linear_output=[lambda _name, values, _batch: values * np.float32(np.nan)])
        one.engine._model.switch_hooks(poison)
        (bad,) = one.run([tokens(40)], max_new_tokens=2)
        assert np.isnan(outputs(bad)).all()
        one.engine._model.switch_hooks(Hooks())
        together = one.run([tokens(5, 1), tokens(5, 2)], max_new_tokens=3, ignore_eos=True)
        for left, right in zip(clean, together, strict=True):
            np.testing.assert_allclose(full_rows(left), full_rows(right), atol=2e-5)

    def test_an_aborted_id_can_be_used_again(self, running: Start, tokens: Tokens) -> None:
        one = running()
        request = one.request(tokens(5), max_new_tokens=3, ignore_eos=True)
        handle = one.engine.submit(request, lambda _sequence: one.engine.abort(request.rid))
        assert handle.result(10).finish_reason == {"type": "abort", "message": "Aborted by request"}
        assert len(one.engine.submit(request).result(10).output_ids) == 3


class TestSwitching:
    def test_weights_stay_as_they_were_if_reading_them_fails(self, running: Start, tokens: Tokens) -> None:
        one = running(quantization="nvfp4")
        clean = one.score(tokens(9))
        calls = []

        def break_later(group: Any) -> Any:
            calls.append(sorted(group))
            if len(calls) == 4:
                raise RuntimeError("cannot read")
            return {
                name: FORMATS["bf16"].quantize([np.zeros(tensor.shape, np.float32)])[0]
                for name, tensor in group.items()
            }

        with pytest.raises(RuntimeError, match="cannot read"):
            one.engine.switch_hooks(
                Hooks(weight=[WeightRule(lambda name: "lm_head" not in name, break_later)])
            )
        assert len(calls) == 4
        np.testing.assert_array_equal(one.score(tokens(9)), clean)

    def test_only_concerned_modules_are_read_again(self, running: Start) -> None:
        one = running(quantization="nvfp4")
        seen: list[str] = []

        def look(group: Any) -> Any:
            seen.extend(group)
            return group

        one.engine.switch_hooks(Hooks(weight=[WeightRule(lambda name: name.endswith("0.mlp.up_proj"), look)]))
        assert seen == ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]


REFUSED = {
    "input_ids is empty; at least one token is needed": {"input_ids": ()},
    "input_ids[1] is 80; token ids 0 to 79, the model's vocabulary, are possible": {"input_ids": (1, 80)},
    "input_ids[0] is -1; token ids 0 to 79": {"input_ids": (-1,)},
    "250 prompt tokens and 10 new ones exceed the model's context of 256 tokens": {
        "input_ids": (5,) * 250,
        "max_new_tokens": 10,
    },
    "max_new_tokens is -3; a number from 0 on is needed": {"max_new_tokens": -3},
    "logprob_start_len is -2; -1 (nothing) to 3, the length of the prompt": {"logprob_start_len": -2},
    "logprob_start_len is 4; -1 (nothing) to 3": {"logprob_start_len": 4},
    "top_logprobs_num is 81; 0 to 80, the size of the vocabulary": {"top_logprobs_num": 81},
    "token_ids_logprob[0] is 99; token ids 0 to 79": {"token_ids_logprob": (99,)},
    "forced_ids[2] is 80; token ids 0 to 79": {"forced_ids": (1, 2, 80)},
    "stop_token_ids[0] is -5; token ids from 0 on": {"stop_token_ids": (-5,)},
    "temperature is nan; a finite number from 0 on is needed": {"temperature": float("nan")},
    "temperature is -1.0; a finite number": {"temperature": -1.0},
    "top_p is 0.0; a number above 0 and up to 1 is needed": {"top_p": 0.0},
    "top_k is 0; -1 (all tokens) or a number from 1 on is needed": {"top_k": 0},
}


@pytest.mark.parametrize("message", REFUSED)
def test_impossible_requests_are_refused_before_anything_runs(running: Start, message: str) -> None:
    one = running()
    batches = watch(one)
    good = SequenceRequest("good", (4, 5, 6), max_new_tokens=1)
    bad = replace(SequenceRequest("bad", (4, 5, 6), max_new_tokens=1), **REFUSED[message])  # type: ignore[arg-type]
    with pytest.raises(RequestRejectedError) as refusal:
        one.engine.submit_batch([good, bad])
    assert str(refusal.value).startswith("request bad: ")
    assert message in str(refusal.value)
    assert one.engine.load() == (0, 0)
    assert not batches
    assert one.engine.submit(good).result(10).rid == "good"


def test_a_request_larger_than_the_cache_is_refused(running: Start) -> None:
    """Slots are powers of two: 64 is the largest within 100."""
    one = running(max_total_tokens=100)
    message = "exceed the 64 that one sequence may hold in the key/value cache; raise max_total_tokens"
    with pytest.raises(RequestRejectedError, match=message):
        one.engine.submit(SequenceRequest("big", (4,) * 60, max_new_tokens=5))
    assert one.engine.submit(SequenceRequest("fits", (4,) * 60, max_new_tokens=4)).result(10).output_ids


def test_the_longest_request_fits_even_when_a_fault_lengthens_it(running: Start) -> None:
    one = running(max_total_tokens=64, faults=("double_bos:token=5",))
    for new in (0, 1, 5):
        (result,) = one.run([[4] * (64 - max(new, 1))], max_new_tokens=new, ignore_eos=True)
        assert len(result.output_ids) == new


def test_an_id_in_use_is_refused(running: Start) -> None:
    one = running()
    twice = SequenceRequest("same", (4, 5), max_new_tokens=1)
    with pytest.raises(RequestRejectedError, match="request same: another request with this id is running"):
        one.engine.submit_batch([twice, twice])
    assert one.engine.submit(twice).result(10).finish_reason is not None
    assert one.engine.submit(twice).result(10).finish_reason is not None
