"""Grouped-query attention over cache views, as flash kernels compute it.

Scores, softmax and the weighted sum accumulate in float32; with a BF16 compute type the unnormalised
weights exp(score - max) are rounded to BF16 before they meet the values, their sum is not, and the caller
rounds the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from pytest_quantguard.emulator.batch import BatchEntry, Bool, ForwardBatch, Int32
from pytest_quantguard.emulator.cache import Pool
from pytest_quantguard.emulator.hooks import Float32, Hooks
from pytest_quantguard.emulator.workers import Workers

Round = Callable[[Float32], object]
"""Rounds an array to the compute type, in place."""

_QUERY_BLOCK = 128
_MINUS_INFINITY = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Rows of a decode step whose slots lie side by side in one pool.

    hidden: bool [sequences, 1, 1, 1, longest], the keys beyond each sequence's end.
    """

    pool: Pool
    rows: slice
    slots: slice
    entries: tuple[BatchEntry, ...]
    longest: int
    hidden: Bool


def decode_runs(batch: ForwardBatch) -> list[DecodeRun]:
    """Split a decode step's entries (in order of pool and slot) into runs that are views of the cache."""

    def run_key(pair: tuple[int, BatchEntry]) -> tuple[int, int]:
        place, entry = pair
        return id(entry.slot.pool), entry.slot.index - place

    runs = []
    for _, group in groupby(enumerate(batch.entries), key=run_key):
        entries = tuple(entry for _, entry in group)
        lengths = np.array([entry.length for entry in entries])
        longest = int(lengths.max())
        first = entries[0]
        runs.append(
            DecodeRun(
                pool=first.slot.pool,
                rows=slice(first.row_start, first.row_start + len(entries)),
                slots=slice(first.slot.index, first.slot.index + len(entries)),
                entries=entries,
                longest=longest,
                hidden=(np.arange(longest) >= lengths[:, None])[:, None, None, None, :],
            )
        )
    return runs


class Attention:
    """Attention of one model's shape: `query_heads` share `kv_heads` in groups of query_heads /
    kv_heads."""

    def __init__(
        self, query_heads: int, kv_heads: int, head_dim: int, round_: Round | None, workers: Workers
    ) -> None:
        self._kv_heads = kv_heads
        self._group = query_heads // kv_heads
        self._head_dim = head_dim
        self._scale = np.float32(head_dim**-0.5)
        self._round = round_
        self._workers = workers

    def prefill(self, layer: int, batch: ForwardBatch, queries: Float32, out: Float32, hooks: Hooks) -> None:
        """queries, out: float32 [rows, query_heads * head_dim]; every entry's keys and values are in its
        slot."""
        shape = (-1, self._kv_heads, self._group, self._head_dim)
        scaled = (queries * self._scale).reshape(shape).transpose(1, 2, 0, 3)[None]
        result = out.reshape(shape).transpose(1, 2, 0, 3)[None]
        blocks = list(_query_blocks(batch))

        def work(share: slice) -> None:
            for entry, start, stop in blocks[share]:
                part = _part_of_entry(layer, entry, start, stop)
                rows = slice(start, stop)
                self._attend(layer, batch, part, scaled[..., rows, :], result[..., rows, :], hooks)

        self._workers.each_item(len(blocks), work)

    def decode(
        self,
        layer: int,
        batch: ForwardBatch,
        runs: list[DecodeRun],
        queries: Float32,
        out: Float32,
        hooks: Hooks,
    ) -> None:
        """As `prefill`, for one row per entry."""
        # The heads of a group take the place of the queries: one product per sequence and key/value head.
        shape = (-1, self._kv_heads, 1, self._group, self._head_dim)
        scaled = (queries * self._scale).reshape(shape)
        result = out.reshape(shape)
        for run in runs:

            def work(share: slice, run: DecodeRun = run) -> None:
                part = _part_of_run(layer, batch, run, share)
                self._attend(layer, batch, part, scaled[run.rows][share], result[run.rows][share], hooks)

            self._workers.each_item(len(run.entries), work)

    def _attend(
        self, layer: int, batch: ForwardBatch, part: _Part, queries: Float32, out: Float32, hooks: Hooks
    ) -> None:
        """queries, out: float32 [sequences, kv_heads, a, b, head_dim] with a * b = group * queries per
        sequence."""
        keys, values = part.keys, part.values
        if hooks.kv_read:
            for read in hooks.kv_read:
                keys, values = read(layer, batch, part.entries, keys, values)
        weights = np.matmul(queries, keys[:, :, None].swapaxes(-1, -2))
        np.copyto(weights[..., part.masked], _MINUS_INFINITY, where=part.hidden)
        if hooks.attention_scores:
            for hook in hooks.attention_scores:
                hook(layer, batch, self._by_query(weights, part), part.positions)
        weights -= weights.max(axis=-1, keepdims=True)
        np.exp(weights, out=weights)
        total = weights.sum(axis=-1, keepdims=True)
        if self._round is not None:
            self._round(weights)
        if hooks.attention_weights:
            for hook in hooks.attention_weights:
                hook(layer, batch, self._by_query(weights, part), part.positions)
        np.matmul(weights, values[:, :, None], out=out)
        out /= total

    def _by_query(self, weights: Float32, part: _Part) -> Float32:
        """A view [sequences, kv_heads, group, queries, keys] of the scores or weights."""
        sequences, queries = part.positions.shape
        return weights.reshape(sequences, self._kv_heads, self._group, queries, weights.shape[-1])


@dataclass(frozen=True, slots=True)
class _Part:
    """The keys and values of some sequences, and which of them a query must not see.

    positions: int32 [sequences, queries]. keys, values: float32 [sequences, kv_heads, keys, head_dim],
    views. hidden: bool, broadcasts against scores[..., masked]; True where the key lies after the query.
    """

    entries: tuple[BatchEntry, ...]
    positions: Int32
    keys: Float32
    values: Float32
    masked: slice
    hidden: Bool


def _part_of_entry(layer: int, entry: BatchEntry, start: int, stop: int) -> _Part:
    """Rows start to stop of a prefill pass, all of one entry."""
    first = entry.context_length + start - entry.row_start
    end = first + stop - start
    pool, index = entry.slot.pool, entry.slot.index
    return _Part(
        entries=(entry,),
        positions=np.arange(first, end, dtype=np.int32)[None],
        keys=pool.keys[layer, index, :, :end][None],
        values=pool.values[layer, index, :, :end][None],
        masked=slice(first, end),
        hidden=np.triu(np.ones((stop - start, stop - start), bool), k=1),
    )


def _part_of_run(layer: int, batch: ForwardBatch, run: DecodeRun, share: slice) -> _Part:
    return _Part(
        entries=run.entries[share],
        positions=batch.positions[run.rows, None][share],
        keys=run.pool.keys[layer, run.slots, :, : run.longest][share],
        values=run.pool.values[layer, run.slots, :, : run.longest][share],
        masked=slice(0, run.longest),
        hidden=run.hidden[share],
    )


def _query_blocks(batch: ForwardBatch) -> Iterator[tuple[BatchEntry, int, int]]:
    """(entry, first row, end row) of blocks small enough that scores stay in the processor's cache."""
    for entry in batch.entries:
        for start in range(entry.row_start, entry.row_stop, _QUERY_BLOCK):
            yield entry, start, min(start + _QUERY_BLOCK, entry.row_stop)
