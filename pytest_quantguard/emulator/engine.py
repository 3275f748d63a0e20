"""Continuous batching: one thread that turns submitted sequences into forward passes.

As in SGLang's default scheduler, waiting prompts come first: all that fit are prefilled together, in
passes of at most `chunked_prefill_size` rows; when none waits, all running sequences decode one token
together. The same sequences, submitted together to an idle engine, meet in the same passes and give the
same bits. Not here: the arithmetic (model.py), where keys and values live (cache.py), HTTP (server.py).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from pytest_quantguard.emulator.active import ActiveSequence
from pytest_quantguard.emulator.admission import Limits, check_request
from pytest_quantguard.emulator.batch import BatchEntry, ForwardBatch, Int32, Phase
from pytest_quantguard.emulator.cache import KeyValueCache, Slot
from pytest_quantguard.emulator.hooks import Float32, Hooks
from pytest_quantguard.emulator.model import Model
from pytest_quantguard.emulator.sampling import score_rows
from pytest_quantguard.emulator.sequences import LogprobRows, Sequence, SequenceRequest, SequenceResult
from pytest_quantguard.errors import QuantguardError, RequestRejectedError, ServerError

__all__ = ["Engine", "LogprobRows", "Sequence", "SequenceRequest", "SequenceResult"]

_LOGIT_ROWS = 64


@dataclass(slots=True)
class _Group:
    """Sequences submitted together. finished: results held back, by place, where a fault reorders whole
    batches."""

    waiting: list[Sequence]
    handles: list[Sequence]
    finished: dict[str, SequenceResult] = field(default_factory=dict)


class Engine:
    """Runs a model on its own thread; every method may be called from any thread."""

    def __init__(
        self,
        model: Model,
        *,
        max_running_requests: int = 48,
        chunked_prefill_size: int = 4096,
        radix_cache: bool = True,
        page_size: int = 1,
        max_total_tokens: int = 131072,
        max_cached_tokens: int = 16384,
    ) -> None:
        """max_total_tokens: room in the key/value cache, in tokens; memory is taken when it is used.
        max_cached_tokens: the part of it that prefixes of finished sequences may hold."""
        config = model.config
        self._model = model
        self._cache = KeyValueCache(
            layers=config.num_layers,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_total_tokens=max_total_tokens,
            max_cached_tokens=max_cached_tokens if radix_cache else 0,
        )
        self._limits = Limits(config.vocab_size, config.max_position_embeddings, self._cache.largest_sequence)
        self._max_running = max_running_requests
        self._chunk = chunked_prefill_size
        self._radix_cache = radix_cache
        self._page_size = page_size
        self._changed = threading.Condition()
        self._waiting: deque[_Group] = deque()
        self._groups: dict[str, _Group] = {}
        self._active: list[ActiveSequence] = []
        self._aborted: set[str] = set()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._stopped: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="emulator-engine", daemon=True)
        self._thread.start()

    def submit(
        self, request: SequenceRequest, on_progress: Callable[[Sequence], None] | None = None
    ) -> Sequence:
        """Queue one sequence. Raises RequestRejectedError for a request that could not run, before
        anything runs."""
        return self.submit_batch([request], on_progress)[0]

    def submit_batch(
        self, requests: Iterable[SequenceRequest], on_progress: Callable[[Sequence], None] | None = None
    ) -> list[Sequence]:
        """Queue sequences that enter the same forward passes; all are checked before any is queued.

        Raises RequestRejectedError for the first that could not run, ServerError if the engine has stopped.
        """
        handles = [Sequence(request, on_progress) for request in requests]
        for handle in handles:
            check_request(handle.request, self._limits)
        rids = [handle.request.rid for handle in handles]
        with self._changed:
            if self._stopped is not None:
                raise ServerError(f"the engine has stopped: {self._stopped}") from self._stopped
            repeated = [rid for rid in rids if rid in self._groups or rids.count(rid) > 1]
            if repeated:
                raise RequestRejectedError(f"request {repeated[0]}: another request with this id is running")
            if handles:
                group = _Group(waiting=list(handles), handles=handles)
                self._groups.update(dict.fromkeys(rids, group))
                self._waiting.append(group)
                self._changed.notify_all()
        return handles

    def abort(self, rid: str) -> bool:
        """End a sequence with finish reason "abort" before its next token; False if none of this id is
        alive."""
        with self._changed:
            if rid not in self._groups:
                return False
            self._aborted.add(rid)
            self._changed.notify_all()
            return True

    def flush_cache(self) -> bool:
        """Forget all prefixes; False (and nothing done) while sequences are queued or running, as SGLang
        answers."""
        with self._changed:
            if self._groups:
                return False
            done = self._command(self._cache.flush)
        done.result()
        return True

    def switch_hooks(self, hooks: Hooks) -> None:
        """Wait until nothing runs, then serve with other hooks: the prefix cache is emptied and weights
        that the old or the new hooks change are read again. Raises what reading them raises; the old
        hooks then stay."""

        def switch() -> None:
            self._cache.flush()
            self._model.switch_hooks(hooks)

        with self._changed:
            done = self._command(switch)
        done.result()

    def load(self) -> tuple[int, int]:
        """(running, queued) sequences."""
        with self._changed:
            queued = sum(len(group.waiting) for group in self._waiting)
            return len(self._groups) - queued, queued

    @property
    def cached_tokens(self) -> int:
        """Tokens of prefixes that finished sequences left in the cache."""
        return self._cache.cached_tokens

    def stop(self) -> None:
        """End the thread; sequences that still run fail with ServerError."""
        with self._changed:
            if self._stopped is None:
                self._stopped = ServerError("it was asked to")
            self._changed.notify_all()
        self._thread.join()

    def _command(self, run: Callable[[], Any]) -> Future[Any]:
        """Have the engine's thread call `run` as soon as no sequence is active; the lock is held."""
        if self._stopped is not None:
            raise ServerError(f"the engine has stopped: {self._stopped}") from self._stopped
        done: Future[Any] = Future()
        self._commands.append((run, done))
        self._changed.notify_all()
        return done

    # ------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        try:
            with np.errstate(all="ignore"):
                while self._wait_for_work():
                    self._drop_aborted()
                    self._run_commands()
                    self._admit()
                    if self._active:
                        self._pass()
        except BaseException as error:
            with self._changed:
                self._stopped = ServerError(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._end_everything()

    def _wait_for_work(self) -> bool:
        """Sleep while there is nothing to do; False when the engine must stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._active or self._waiting or self._commands)
            return self._stopped is None

    def _run_commands(self) -> None:
        while not self._active:
            with self._changed:
                if not self._commands:
                    return
                run, done = self._commands.popleft()
            try:
                done.set_result(run())
            except Exception as error:
                done.set_exception(error)

    def _drop_aborted(self) -> None:
        with self._changed:
            aborted, self._aborted = self._aborted, set()
            waiting = [
                handle for group in self._waiting for handle in group.waiting if handle.request.rid in aborted
            ]
            for group in self._waiting:
                group.waiting = [handle for handle in group.waiting if handle.request.rid not in aborted]
            self._waiting = deque(group for group in self._waiting if group.waiting)
        reason = {"type": "abort", "message": "Abort in waiting queue"}
        for handle in waiting:
            request = handle.request
            result = SequenceResult(request.rid, len(request.input_ids), 0, (), reason, None, None)
            self._publish_final(handle, result)
        for sequence in [active for active in self._active if active.handle.request.rid in aborted]:
            sequence.finish_reason = {"type": "abort", "message": "Aborted by request"}
            self._finish(sequence)

    def _admit(self) -> None:
        """Give slots to waiting sequences, whole groups at a time where the engine can hold them."""
        while True:
            with self._changed:
                room = self._max_running - len(self._active)
                if self._commands or not self._waiting or not room:
                    return
                group = self._waiting[0]
                count = min(len(group.waiting), room)
                if count < len(group.waiting) and self._active:
                    return
                handles = group.waiting[:count]
                requests = [self._hooked(handle.request) for handle in handles]
                slots = self._allocate(requests)
                if slots is None:
                    return
                del group.waiting[: len(slots)]
                if not group.waiting:
                    self._waiting.popleft()
            for handle, request, slot in zip(handles, requests, slots, strict=False):
                sequence = ActiveSequence(handle, request, slot)
                self._reuse_prefix(sequence)
                self._active.append(sequence)

    def _allocate(self, requests: list[SequenceRequest]) -> list[Slot] | None:
        """Slots for all, or for as many as an idle engine can hold; None if the running ones must end
        first. The last new token needs no room."""
        lengths = [len(request.input_ids) + max(request.new_tokens - 1, 0) for request in requests]
        slots = self._cache.allocate(lengths)
        while slots is None and not self._active and len(lengths) > 1:
            lengths.pop()
            slots = self._cache.allocate(lengths)
        return slots

    def _hooked(self, request: SequenceRequest) -> SequenceRequest:
        for hook in self._model.hooks.request:
            request = hook(request)
        return request

    def _reuse_prefix(self, sequence: ActiveSequence) -> None:
        """Copy the longest known prefix, but leave every position whose logits are wanted to be
        computed."""
        if not self._radix_cache:
            return
        prompt = sequence.tokens[: sequence.first_wanted(0)]
        found = self._cache.longest_prefix(prompt, self._page_size)
        if found is not None:
            source, length = found
            self._cache.copy_prefix(source, sequence.slot, length)
            sequence.cached_tokens = length
            for hook in self._model.hooks.prefix:
                hook(sequence.slot.keys[:, :, :length], sequence.slot.values[:, :, :length])

    def _pass(self) -> None:
        """One forward pass; an error of the model ends the sequences in it."""
        batch, sequences = self._next_batch()
        started = time.perf_counter()
        try:
            final = self._model.forward(batch)
            for entry, sequence in zip(batch.entries, sequences, strict=True):
                place = slice(entry.context_length, entry.length)
                sequence.slot.tokens[place] = sequence.tokens[place]
                sequence.slot.length = entry.length
                sequence.chunks += 1
            self._score(batch, sequences, final)
        except (QuantguardError, ArithmeticError, ValueError, IndexError, MemoryError) as error:
            for sequence in sequences:
                self._fail(sequence, error)
            return
        for hook in self._model.hooks.step:
            hook(batch, time.perf_counter() - started)
        for sequence in sequences:
            if sequence.finish_reason is not None:
                self._finish(sequence)
            elif not sequence.prefill_left:
                sequence.handle.publish(sequence.generated, sequence.snapshot(), final=False)

    def _next_batch(self) -> tuple[ForwardBatch, list[ActiveSequence]]:
        """Waiting prompts up to the chunk size, else one decode step of all."""
        prefill = [sequence for sequence in self._active if sequence.prefill_left]
        if not prefill:
            in_order = sorted(self._active, key=lambda one: (one.slot.pool.capacity, one.slot.index))
            return self._batch("decode", [(sequence, 1) for sequence in in_order])
        spans, room = [], self._chunk
        for sequence in prefill:
            rows = min(sequence.prefill_left, room)
            if rows:
                spans.append((sequence, rows))
                room -= rows
        return self._batch("prefill", spans)

    def _batch(
        self, phase: Phase, spans: list[tuple[ActiveSequence, int]]
    ) -> tuple[ForwardBatch, list[ActiveSequence]]:
        entries, token_ids, positions, logit_rows = [], [], [], []
        row = 0
        for sequence, rows in spans:
            start = sequence.slot.length
            entry = BatchEntry(sequence.request.rid, sequence.slot, row, row + rows, start, sequence.chunks)
            entries.append(entry)
            token_ids.append(sequence.tokens[start : entry.length])
            positions.append(np.arange(start, entry.length, dtype=np.int32))
            wanted = start if phase == "decode" else sequence.first_wanted(start)
            logit_rows.append(np.arange(row + wanted - start, row + rows))
            row += rows
        batch = ForwardBatch(
            phase=phase,
            entries=tuple(entries),
            token_ids=np.concatenate(token_ids),
            positions=np.concatenate(positions),
            logit_rows=np.concatenate(logit_rows),
        )
        return batch, [sequence for sequence, _ in spans]

    def _score(self, batch: ForwardBatch, sequences: list[ActiveSequence], final: Float32) -> None:
        """Logits of the wanted rows, in parts that bound memory; their scores go to their sequences."""
        ends = np.array([entry.row_stop for entry in batch.entries])
        owners = np.searchsorted(ends, batch.logit_rows, side="right")
        for start in range(0, len(final), _LOGIT_ROWS):
            part = slice(start, min(start + _LOGIT_ROWS, len(final)))
            logits = self._model.logits(final[part], batch, batch.logit_rows[part])
            self._score_part(
                logits, batch.positions[batch.logit_rows[part]], [sequences[i] for i in owners[part]]
            )

    def _score_part(self, logits: Float32, positions: Int32, owners: list[ActiveSequence]) -> None:
        """logits: float32 [rows, vocabulary] of these positions of these sequences; each row's scores are
        for the token after it, which for a sequence's last row is chosen here."""
        last = [
            position >= owner.prompt_tokens - 1 for position, owner in zip(positions, owners, strict=True)
        ]
        chosen = self._choose(logits, [row for row, is_last in enumerate(last) if is_last], owners)
        targets = np.array(
            [
                chosen[row] if last[row] else owner.tokens[positions[row] + 1]
                for row, owner in enumerate(owners)
            ]
        )
        wanted = [owner.request.top_logprobs_num for owner in owners if owner.request.return_logprob]
        scores = score_rows(logits, targets, max(wanted)) if wanted else None
        start = 0
        for owner, group in groupby(owners):
            stop = start + len(list(group))
            request = owner.request
            ends = stop - 1 if last[stop - 1] else stop
            own = None
            if scores is not None and request.return_logprob:
                own = scores.part(start, stop, request.top_logprobs_num, logits, request.token_ids_logprob)
                if start < ends:
                    owner.add_prompt_scores(own.rows(0, ends - start))
            if ends < stop:
                own = None if own is None else own.rows(ends - start, stop - start)
                owner.add_output(chosen[ends], own, self._model.config.eos_token_ids)
            start = stop

    def _choose(self, logits: Float32, rows: list[int], owners: list[ActiveSequence]) -> dict[int, int]:
        """The next token at each of `rows`; divides sampled rows of `logits` by their temperature."""
        for row in rows:
            temperature = owners[row].request.temperature
            if temperature not in (0.0, 1.0):
                logits[row] /= np.float32(temperature)
        chosen = {}
        for row in rows:
            choices = logits[row]
            for hook in self._model.hooks.select:
                choices = hook(choices, self._model.config.eos_token_ids)
            chosen[row] = owners[row].next_token(choices)
            if not np.isfinite(logits[row].max()):
                owners[row].slot.clear_when_freed = True
        return chosen

    def _finish(self, sequence: ActiveSequence) -> None:
        """The sequence has its finish reason: free its slot and hand over its result."""
        self._leave(sequence, keep=self._radix_cache and not sequence.prefill_left)
        result = sequence.snapshot()()
        for hook in self._model.hooks.result:
            result = hook(sequence.handle.request, result)
        self._publish_final(sequence.handle, result)

    def _fail(self, sequence: ActiveSequence, error: Exception) -> None:
        sequence.slot.clear_when_freed = True
        self._leave(sequence, keep=False)
        with self._changed:
            self._groups.pop(sequence.handle.request.rid, None)
        sequence.handle.fail(error)

    def _leave(self, sequence: ActiveSequence, *, keep: bool) -> None:
        self._active.remove(sequence)
        self._cache.release(sequence.slot, keep=keep)

    def _publish_final(self, handle: Sequence, result: SequenceResult) -> None:
        """Hand over a final result; where a fault acts on whole batches, once the batch is complete."""
        with self._changed:
            group = self._groups.pop(handle.request.rid)
            self._aborted.discard(handle.request.rid)
        group.finished[handle.request.rid] = result
        if self._model.hooks.batch_result:
            self._publish_batch(group)
        else:
            handle.publish(len(result.output_ids), lambda: result, final=True)

    def _publish_batch(self, group: _Group) -> None:
        handles = [handle for handle in group.handles if not handle.failed]
        if len(group.finished) < len(handles):
            return
        results = [group.finished[handle.request.rid] for handle in handles]
        for hook in self._model.hooks.batch_result:
            results = hook(results)
        for handle, result in zip(handles, results, strict=True):
            answered = replace(result, rid=handle.request.rid)
            handle.publish(len(answered.output_ids), partial(_identity, answered), final=True)

    def _end_everything(self) -> None:
        """The engine's thread ends: nobody may wait for ever."""
        with self._changed:
            error = self._stopped or ServerError("the engine's thread has ended")
            groups = {id(group): group for group in self._groups.values()}
            commands, self._commands = self._commands, deque()
            self._groups.clear()
            self._waiting.clear()
            self._active.clear()
        failure = ServerError(f"the engine has stopped: {error}")
        for group in groups.values():
            for handle in group.handles:
                if not handle.done:
                    handle.fail(failure)
        for _, done in commands:
            done.set_exception(failure)


def _identity(result: SequenceResult) -> SequenceResult:
    return result
