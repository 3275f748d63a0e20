"""Rows of top log-probabilities <-> small integers, without losing a bit.

Pure arrays: how the integers become bytes is the codec's business.

**Log-probabilities.** A server that computes its logits in BF16 answers `(logit - max) - log(sum)` in
float32. Differences of BF16 numbers are multiples of a power of two, so a row's values are its first one plus
such a multiple, rounded to float32 once: a small integer (*level*) restores them exactly. Rows of float32
logits get a finer grid and what is missing in units in the last place (*residual*), and are exact too.

**Token ids** are renamed by how often they occur; a row that resembles a row of another cell is written as
the change of each token's rank.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pytest_quantguard.logprobs.arrays import Float32, Int32

UInt32 = npt.NDArray[np.uint32]
UInt8 = npt.NDArray[np.uint8]

FINEST_GRID = 16
"""Rows that are no multiples of 2**-FINEST_GRID are taken as float32 logits."""
FLOAT_GRID = 23
MAX_GRID_ERROR = 2
"""Units in the last place by which a row may miss its grid: servers differ in where they round."""


class RowFormError(Exception):
    """Integers that no row leads to."""


# --- log-probabilities ----------------------------------------------------------------------------------


def to_levels(logprobs: Float32) -> tuple[UInt8, Int32, Int32]:
    """(grid exponents uint8 [N], levels int32 [N, K], residuals int32 [N, K]) of float32 [N, K]."""
    first = logprobs[:, 0]
    drop = logprobs.astype(np.float64) - first.astype(np.float64)[:, None]
    target = _ordered(logprobs)
    grids = np.full(len(logprobs), FLOAT_GRID, dtype=np.uint8)
    levels = np.zeros(logprobs.shape, dtype=np.int32)
    open_rows = np.arange(len(logprobs))
    for grid in (*range(FINEST_GRID + 1), FLOAT_GRID):
        scaled = np.clip(np.rint(np.ldexp(drop[open_rows], grid)), -(2**31), 2**31 - 1).astype(np.int32)
        predicted = _predict(first[open_rows], scaled, np.full(len(open_rows), grid, dtype=np.uint8))
        miss = np.abs(target[open_rows].astype(np.int64) - predicted).max(axis=1, initial=0)
        fits = (miss <= MAX_GRID_ERROR) | (grid == FLOAT_GRID)
        grids[open_rows[fits]] = grid
        levels[open_rows[fits]] = scaled[fits]
        open_rows = open_rows[~fits]
    residuals = (target.view(np.uint32) - _predict(first, levels, grids).view(np.uint32)).view(np.int32)
    return grids, levels, residuals


def from_levels(first: Float32, grids: UInt8, levels: Int32, residuals: Int32) -> Float32:
    """float32 [N, K]: inverse of `to_levels`; first: float32 [N]."""
    predicted = _predict(first, levels, grids)
    ordered = (predicted.view(np.uint32) + residuals.view(np.uint32)).view(np.int32)
    logprobs = (ordered ^ ((ordered >> 31) & np.int32(0x7FFFFFFF))).view(np.float32)
    if not np.isfinite(logprobs).all():
        raise RowFormError("non-finite log-probabilities")
    return np.asarray(logprobs, dtype=np.float32)


def _predict(first: Float32, levels: Int32, grids: UInt8) -> Int32:
    """The float32 nearest to first + level * 2**-grid, in `_ordered` form."""
    step = -grids.astype(np.int32)[:, None]
    exact = first.astype(np.float64)[:, None] + np.ldexp(levels.astype(np.float64), step)
    return _ordered(exact.astype(np.float32))


def _ordered(values: Float32) -> Int32:
    """int32 in the order of the floats; neighbouring floats differ by 1."""
    bits = np.ascontiguousarray(values).view(np.int32)
    return np.asarray(bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF)), dtype=np.int32)


def steps_of(levels: Int32) -> UInt32:
    """uint32 [N, K-1]: by how much each level is below the one before it; wraps for rows that rise."""
    bits = levels.view(np.uint32)
    return bits[:, :-1] - bits[:, 1:]


def levels_of(steps: UInt32) -> Int32:
    """int32 [N, K]: inverse of `steps_of`; a row's first level is 0."""
    levels = np.zeros((steps.shape[0], steps.shape[1] + 1), dtype=np.uint32)
    np.subtract(np.uint32(0), np.cumsum(steps, axis=1, dtype=np.uint32), out=levels[:, 1:])
    return levels.view(np.int32)


def zigzag(values: Int32) -> UInt32:
    """0, -1, 1, -2, ... -> 0, 1, 2, 3, ..."""
    return ((values << 1) ^ (values >> 31)).view(np.uint32)


def unzigzag(values: UInt32) -> Int32:
    """Inverse of `zigzag`."""
    return np.asarray((values >> 1) ^ (np.uint32(0) - (values & np.uint32(1)))).view(np.int32)


# --- token ids ------------------------------------------------------------------------------------------


def frequency_order(ids: Int32) -> tuple[Int32, list[int]]:
    """The distinct ids, frequent ones first: in groups of similar frequency, ascending by id; and group
    sizes.
    """
    distinct, counts = np.unique(ids, return_counts=True)
    rarity = -np.floor(np.log2(counts)).astype(np.int64)
    _, sizes = np.unique(rarity, return_counts=True)
    return distinct[np.lexsort((distinct, rarity))].astype(np.int32), [int(size) for size in sizes]


def dictionary_steps(dictionary: Int32, groups: list[int]) -> UInt32:
    """Differences of consecutive ids within each group; a group's first id counts from 0."""
    starts = np.cumsum([0, *groups[:-1]])
    steps = np.diff(dictionary, prepend=0)
    steps[starts] = dictionary[starts]
    return steps.astype(np.uint32)


def read_dictionary(steps: UInt32, groups: list[int], vocab_size: int) -> Int32:
    """Inverse of `dictionary_steps`."""
    if not groups or min(groups) < 1 or sum(groups) != len(steps):
        raise RowFormError("the groups of the token dictionary do not add up")
    parts = np.split(steps.astype(np.uint64), np.cumsum(groups[:-1]))
    ids = np.concatenate([np.cumsum(part) for part in parts])
    if ids.max() >= vocab_size:
        raise RowFormError("the token dictionary holds a token outside the vocabulary")
    return ids.astype(np.int32)


def look_up(dictionary: Int32, names: UInt32) -> Int32:
    """Token ids of names; same shape."""
    if names.size and int(names.max()) >= len(dictionary):
        raise RowFormError("a token's name is outside the dictionary")
    return dictionary[names]


def ranks_in(base: Int32, ids: Int32, vocab_size: int) -> npt.NDArray[np.int64]:
    """int64 [N, K]: the rank of each id in the same row of `base` int32 [N, B], -1 where it is not there."""
    offset = np.arange(len(ids), dtype=np.int64)[:, None] * vocab_size
    keys = (base + offset).ravel()
    order = np.argsort(keys, kind="stable")
    wanted = (ids + offset).ravel()
    place = order[np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)]
    return np.where(keys[place] == wanted, place % base.shape[1], -1).reshape(ids.shape)


def rank_changes(ranks: npt.NDArray[np.int64]) -> UInt32:
    """Symbols, uint32 [N, K]: 0 for an id that the base row lacks, else 1 + zigzag of its rank's change."""
    symbols: UInt32 = zigzag((ranks - np.arange(ranks.shape[1])).astype(np.int32)) + np.uint32(1)
    symbols[ranks < 0] = 0
    return symbols


def apply_rank_changes(base: Int32, symbols: UInt32, missing_ids: Int32) -> Int32:
    """int32 [N, K]: inverse of `rank_changes`; missing_ids: the ids that the base lacks, in reading order."""
    missing = symbols == 0
    if int(missing.sum()) != len(missing_ids):
        raise RowFormError("the number of ids outside the base row is wrong")
    change = unzigzag(symbols - np.uint32(1)).astype(np.int64)
    ranks = np.where(missing, 0, np.arange(symbols.shape[1]) + change)
    if ranks.min(initial=0) < 0 or ranks.max(initial=0) >= base.shape[1]:
        raise RowFormError("a change of rank leads outside the row")
    token_ids = np.take_along_axis(base, ranks, axis=1)
    token_ids[missing] = missing_ids
    return token_ids


# --- the reference token's own log-probability ----------------------------------------------------------

CHOSEN_IN_TOP, CHOSEN_UNKNOWN, CHOSEN_EXPLICIT = 0, 1, 2


def chosen_states(
    token_ids: Int32, logprobs: Float32, chosen_ids: Int32, chosen_logprobs: Float32
) -> tuple[UInt8, Float32]:
    """How to find each chosen log-probability again, uint8 [N]; and those to be written out, float32 [M]."""
    hits = token_ids == chosen_ids[:, None]
    in_top = logprobs[np.arange(len(hits)), hits.argmax(axis=1)]
    same = hits.any(axis=1) & (in_top.view(np.int32) == chosen_logprobs.view(np.int32))
    states = np.where(np.isnan(chosen_logprobs), CHOSEN_UNKNOWN, CHOSEN_EXPLICIT).astype(np.uint8)
    states[same] = CHOSEN_IN_TOP
    return states, chosen_logprobs[states == CHOSEN_EXPLICIT]


def chosen_values(
    token_ids: Int32, logprobs: Float32, chosen_ids: Int32, states: UInt8, explicit: Float32
) -> Float32:
    """float32 [N]: inverse of `chosen_states`; NaN where the server did not say."""
    hits = token_ids == chosen_ids[:, None]
    if (states > CHOSEN_EXPLICIT).any() or (~hits.any(axis=1) & (states == CHOSEN_IN_TOP)).any():
        raise RowFormError("the log-probabilities of the reference tokens are marked wrongly")
    if len(explicit) != int((states == CHOSEN_EXPLICIT).sum()):
        raise RowFormError("the number of written-out log-probabilities is wrong")
    values: Float32 = logprobs[np.arange(len(hits)), hits.argmax(axis=1)].copy()
    values[states == CHOSEN_UNKNOWN] = np.nan
    values[states == CHOSEN_EXPLICIT] = explicit
    return values
