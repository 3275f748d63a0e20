"""Where keys and values live: preallocated arrays, one slot per sequence, prefixes kept for reuse.

A slot is a contiguous run of token positions for every layer and head, so attention reads views and
nothing is copied per step. Slots of one capacity share a pool: the sequences of a decode step that lie
side by side in a pool are read as one array. A finished sequence's slot can stay as a cached prefix until
its memory is wanted. Not here: number formats (formats/kv_cache.py), attention (attention.py), which
sequence runs when (engine.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]

_SMALLEST_CAPACITY = 64


class Pool:
    """Slots of one capacity.

    keys, values: float32 [layers, slots, kv_heads, capacity, head_dim]. Positions that were never written
    are zero (and untouched memory is not resident), so that masked reads beyond a sequence's end are
    finite.
    """

    def __init__(self, layers: int, kv_heads: int, capacity: int, head_dim: int) -> None:
        self.capacity = capacity
        self._shape = (layers, kv_heads, capacity, head_dim)
        self.keys = self._empty(0)
        self.values = self._empty(0)
        self._free: list[int] = []

    def _empty(self, slots: int) -> Float32:
        layers, kv_heads, capacity, head_dim = self._shape
        return np.zeros((layers, slots, kv_heads, capacity, head_dim), np.float32)

    @property
    def slots(self) -> int:
        """Slots that exist, used or free."""
        return int(self.keys.shape[1])

    def take(self, count: int, in_use: Iterable[Slot]) -> list[int]:
        """Reserve `count` slots, side by side where possible. in_use: the pool's slots whose content must
        survive."""
        if len(self._free) < count:
            self._grow(max(self.slots + count - len(self._free), 2 * self.slots), in_use)
        self._free.sort()
        for start in range(len(self._free) - count + 1):
            if self._free[start + count - 1] - self._free[start] == count - 1:
                break
        else:
            start = 0
        taken = self._free[start : start + count]
        del self._free[start : start + count]
        return taken

    def give_back(self, index: int, length: int, *, clear: bool) -> None:
        """Make a slot free again; `clear` wipes the `length` positions that were written (non-finite
        content)."""
        if clear:
            self.keys[:, index, :, :length] = 0.0
            self.values[:, index, :, :length] = 0.0
        self._free.append(index)

    def _grow(self, slots: int, in_use: Iterable[Slot]) -> None:
        keys, values = self._empty(slots), self._empty(slots)
        for slot in in_use:
            keys[:, slot.index, :, : slot.length] = self.keys[:, slot.index, :, : slot.length]
            values[:, slot.index, :, : slot.length] = self.values[:, slot.index, :, : slot.length]
        self._free.extend(range(self.slots, slots))
        self.keys, self.values = keys, values


@dataclass(slots=True, eq=False)
class Slot:
    """One sequence's place in the cache.

    tokens: int32 [capacity]; the first `length` are the tokens whose keys and values are stored.
    """

    pool: Pool
    index: int
    tokens: Int32
    length: int = 0
    last_used: int = 0
    clear_when_freed: bool = False

    @property
    def keys(self) -> Float32:
        """float32 [layers, kv_heads, capacity, head_dim], a view."""
        return self.pool.keys[:, self.index]

    @property
    def values(self) -> Float32:
        """float32 [layers, kv_heads, capacity, head_dim], a view."""
        return self.pool.values[:, self.index]


@dataclass(slots=True)
class KeyValueCache:
    """All pools, and the prefixes that finished sequences left behind.

    max_total_tokens bounds the capacity of running and cached slots together; max_cached_tokens that of
    cached ones.
    """

    layers: int
    kv_heads: int
    head_dim: int
    max_total_tokens: int
    max_cached_tokens: int
    _pools: dict[int, Pool] = field(default_factory=dict)
    _running: list[Slot] = field(default_factory=list)
    _cached: list[Slot] = field(default_factory=list)
    _clock: int = 0

    def capacity_for(self, tokens: int) -> int:
        """The capacity of the slot that a sequence of at most `tokens` tokens gets."""
        capacity = _SMALLEST_CAPACITY
        while capacity < tokens:
            capacity *= 2
        return capacity

    @property
    def largest_sequence(self) -> int:
        """Tokens of the longest sequence that fits."""
        capacity = _SMALLEST_CAPACITY
        while 2 * capacity <= self.max_total_tokens:
            capacity *= 2
        return capacity if capacity <= self.max_total_tokens else 0

    def allocate(self, lengths: list[int]) -> list[Slot] | None:
        """Slots for sequences that will hold up to these many tokens each, or None while memory is short.

        Cached prefixes give way, least recently used first.
        """
        capacities = [self.capacity_for(length) for length in lengths]
        available = self.max_total_tokens - sum(slot.pool.capacity for slot in self._running)
        if sum(capacities) > available:
            return None
        self._shrink_cached(available - sum(capacities))
        slots: list[Slot | None] = [None] * len(lengths)
        for capacity in sorted(set(capacities)):
            places = [place for place, wanted in enumerate(capacities) if wanted == capacity]
            pool = self._pools.get(capacity)
            if pool is None:
                pool = self._pools[capacity] = Pool(self.layers, self.kv_heads, capacity, self.head_dim)
            for place, index in zip(places, pool.take(len(places), self._slots_of(pool)), strict=True):
                slots[place] = Slot(pool, index, np.zeros(capacity, np.int32))
        taken = [slot for slot in slots if slot is not None]
        self._running.extend(taken)
        return taken

    def _slots_of(self, pool: Pool) -> list[Slot]:
        return [slot for slot in (*self._running, *self._cached) if slot.pool is pool]

    def release(self, slot: Slot, *, keep: bool) -> None:
        """The sequence has ended. keep: leave its tokens as a cached prefix."""
        self._running.remove(slot)
        if not keep or slot.clear_when_freed or not slot.length:
            self._free(slot)
            return
        longer = [other for other in self._cached if _starts_with(other, slot)]
        if longer:
            self._free(slot)
            self._touch(longer[0])
            return
        for shorter in [other for other in self._cached if _starts_with(slot, other)]:
            self._cached.remove(shorter)
            self._free(shorter)
        self._touch(slot)
        self._cached.append(slot)
        self._shrink_cached(self.max_cached_tokens)

    def longest_prefix(self, tokens: Int32, page_size: int) -> tuple[Slot, int] | None:
        """The slot that shares the longest prefix with `tokens`, and its length, a multiple of
        page_size."""
        best: Slot | None = None
        longest = 0
        for slot in (*self._cached, *self._running):
            span = min(slot.length, len(tokens))
            if span <= longest or slot.clear_when_freed:
                continue
            differs = np.flatnonzero(slot.tokens[:span] != tokens[:span])
            common = int(differs[0]) if differs.size else span
            if common > longest:
                best, longest = slot, common
        longest -= longest % page_size
        if best is None or not longest:
            return None
        self._touch(best)
        return best, longest

    def copy_prefix(self, source: Slot, target: Slot, length: int) -> None:
        """Give `target` the first `length` tokens of `source`."""
        target.keys[:, :, :length] = source.keys[:, :, :length]
        target.values[:, :, :length] = source.values[:, :, :length]
        target.tokens[:length] = source.tokens[:length]
        target.length = length

    @property
    def cached_tokens(self) -> int:
        """Tokens of cached prefixes; running sequences not counted."""
        return sum(slot.length for slot in self._cached)

    @property
    def running_tokens(self) -> int:
        """Tokens of running sequences."""
        return sum(slot.length for slot in self._running)

    def flush(self) -> None:
        """Forget all cached prefixes; where nothing runs, give the memory back too."""
        self._shrink_cached(0)
        if not self._running:
            self._pools.clear()

    def _touch(self, slot: Slot) -> None:
        self._clock += 1
        slot.last_used = self._clock

    def _shrink_cached(self, tokens: int) -> None:
        """Drop cached prefixes, least recently used first, until their capacity is at most `tokens`."""
        held = sum(slot.pool.capacity for slot in self._cached)
        while self._cached and held > tokens:
            oldest = min(self._cached, key=lambda slot: slot.last_used)
            self._cached.remove(oldest)
            held -= oldest.pool.capacity
            self._free(oldest)

    def _free(self, slot: Slot) -> None:
        slot.pool.give_back(slot.index, slot.length, clear=slot.clear_when_freed)


def _starts_with(longer: Slot, shorter: Slot) -> bool:
    length = shorter.length
    return length <= longer.length and np.array_equal(longer.tokens[:length], shorter.tokens[:length])
