"""Slots, pools and prefixes."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_quantguard.emulator.cache import KeyValueCache, Slot


@pytest.fixture
def cache() -> KeyValueCache:
    return KeyValueCache(layers=2, kv_heads=3, head_dim=4, max_total_tokens=1024, max_cached_tokens=512)


def fill(slot: Slot, tokens: list[int]) -> None:
    """Store keys and values that tell the token and the position."""
    slot.tokens[: len(tokens)] = tokens
    slot.length = len(tokens)
    slot.keys[:, :, : len(tokens)] = np.array(tokens)[:, None]
    slot.values[:, :, : len(tokens)] = np.arange(len(tokens))[:, None]


def take(cache: KeyValueCache, *lengths: int) -> list[Slot]:
    slots = cache.allocate(list(lengths))
    assert slots is not None
    return slots


def test_capacities_are_powers_of_two(cache: KeyValueCache) -> None:
    assert [cache.capacity_for(tokens) for tokens in (1, 64, 65, 200, 512)] == [64, 64, 128, 256, 512]


def test_a_batch_lies_side_by_side(cache: KeyValueCache) -> None:
    first = take(cache, 10, 100, 20, 30)
    assert [slot.index for slot in first] == [0, 0, 1, 2]
    cache.release(first[2], keep=False)
    assert [slot.index for slot in take(cache, 5, 5)] == [3, 4]
    assert [slot.index for slot in take(cache, 5)] == [1]


def test_growth_keeps_what_slots_hold(cache: KeyValueCache) -> None:
    (slot,) = take(cache, 10)
    fill(slot, [4, 5, 6])
    view = slot.keys
    take(cache, 10, 10, 10)
    assert not np.shares_memory(view, slot.keys)
    np.testing.assert_array_equal(slot.keys[1, 2, :3, 0], [4, 5, 6])
    np.testing.assert_array_equal(slot.values[1, 2, :3, 0], [0, 1, 2])
    assert not slot.keys[:, :, 3:].any()


def test_views_are_of_the_pool(cache: KeyValueCache) -> None:
    slots = take(cache, 10, 10)
    fill(slots[1], [9])
    assert np.shares_memory(slots[1].keys, slots[0].pool.keys)
    np.testing.assert_array_equal(slots[0].pool.keys[0, :2, 0, 0, 0], [0, 9])


def test_memory_is_bounded_by_capacity(cache: KeyValueCache) -> None:
    assert cache.allocate([512, 513]) is None
    take(cache, 512, 256, 129)
    assert cache.allocate([1]) is None


def test_cached_prefixes_give_way_to_running_sequences(cache: KeyValueCache) -> None:
    slots = take(cache, 200, 200)
    for number, slot in enumerate(slots):
        fill(slot, [number, 1, 2])
        cache.release(slot, keep=True)
    assert cache.cached_tokens == 6
    take(cache, 512, 200)
    assert cache.cached_tokens == 3
    assert cache.longest_prefix(np.array([1, 1, 2]), 1) is not None
    assert cache.longest_prefix(np.array([0, 1, 2]), 1) is None


def test_the_longest_prefix_wins_and_is_cut_to_pages(cache: KeyValueCache) -> None:
    slots = take(cache, 60, 60)
    fill(slots[0], [1, 2, 3, 4, 9, 9])
    fill(slots[1], [1, 2, 3, 4, 5, 9])
    wanted = np.array([1, 2, 3, 4, 5, 6, 7])
    assert cache.longest_prefix(wanted, 1) == (slots[1], 5)
    assert cache.longest_prefix(wanted, 4) == (slots[1], 4)
    assert cache.longest_prefix(wanted, 8) is None
    assert cache.longest_prefix(np.array([7]), 1) is None
    (target,) = take(cache, 60)
    cache.copy_prefix(slots[1], target, 5)
    np.testing.assert_array_equal(target.tokens[:6], [1, 2, 3, 4, 5, 0])
    np.testing.assert_array_equal(target.keys[0, 0, :6, 0], [1, 2, 3, 4, 5, 0])
    assert target.length == 5


def test_no_prefix_is_kept_twice(cache: KeyValueCache) -> None:
    for tokens in ([1, 2], [1, 2, 3], [1, 4], [1, 2]):
        (slot,) = take(cache, 10)
        fill(slot, tokens)
        cache.release(slot, keep=True)
    assert cache.cached_tokens == 3 + 2


def test_damaged_content_is_wiped_and_never_reused(cache: KeyValueCache) -> None:
    (slot,) = take(cache, 10)
    fill(slot, [1, 2, 3])
    slot.keys[0, 0, 1] = np.nan
    slot.clear_when_freed = True
    assert cache.longest_prefix(np.array([1, 2, 3]), 1) is None
    cache.release(slot, keep=True)
    assert cache.cached_tokens == 0
    (again,) = take(cache, 10)
    assert again.index == slot.index
    assert not again.keys.any()


def test_flush_gives_memory_back_when_nothing_runs(cache: KeyValueCache) -> None:
    slots = take(cache, 10, 10)
    for slot in slots:
        fill(slot, [slot.index, 5])
    cache.release(slots[0], keep=True)
    cache.flush()
    assert cache.cached_tokens == 0
    assert cache.running_tokens == 2
    np.testing.assert_array_equal(slots[1].keys[0, 0, :2, 0], [1, 5])
    cache.release(slots[1], keep=True)
    cache.flush()
    assert cache._pools == {}
