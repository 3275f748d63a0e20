"""From logits to log-probabilities, the best K, and the next token. Pure functions over rows of logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pytest_quantguard.emulator.batch import Int32
from pytest_quantguard.emulator.hooks import Float32


@dataclass(frozen=True, slots=True)
class RowScores:
    """Natural log-probabilities of some rows.

    normalizer float32 [rows]: log of the sum of exponentials of the row's logits. target float32 [rows]:
    of each row's target token. top_ids int32 [rows, k], top float32 [rows, k]: the k best, best first,
    ties by lowest id. selected float32 [rows, ids].
    """

    normalizer: Float32
    target: Float32
    top_ids: Int32
    top: Float32
    selected: Float32

    def part(self, start: int, stop: int, k: int, logits: Float32, selected: tuple[int, ...]) -> RowScores:
        """Some rows, with `k` best only, and with the log-probabilities of the tokens `selected`."""
        normalizer = self.normalizer[start:stop]
        return RowScores(
            normalizer=normalizer,
            target=self.target[start:stop],
            top_ids=self.top_ids[start:stop, :k],
            top=self.top[start:stop, :k],
            selected=logits[start:stop, list(selected)] - normalizer[:, None],
        )

    def rows(self, start: int, stop: int) -> RowScores:
        """Some rows."""
        part = slice(start, stop)
        return RowScores(
            self.normalizer[part], self.target[part], self.top_ids[part], self.top[part], self.selected[part]
        )


def log_normalizer(logits: Float32) -> Float32:
    """log of the sum of exponentials of each row: float32 [rows]; NaN where a row holds NaN or +Inf.

    logits: float32 [rows, vocabulary].
    """
    with np.errstate(all="ignore"):
        peak = logits.max(axis=1, keepdims=True)
        shifted = logits - peak
        np.exp(shifted, out=shifted)
        return np.asarray(np.log(shifted.sum(axis=1)) + peak[:, 0])


def score_rows(logits: Float32, targets: Int32, k: int) -> RowScores:
    """logits: float32 [rows, vocabulary]; targets: int32 [rows]; 0 <= k <= vocabulary."""
    normalizer = log_normalizer(logits)
    rows = np.arange(len(logits))
    top_ids = np.empty((len(logits), k), np.int32)
    for row in rows if k else ():
        top_ids[row] = top_tokens(logits[row], k)
    with np.errstate(all="ignore"):
        return RowScores(
            normalizer=normalizer,
            target=logits[rows, targets] - normalizer,
            top_ids=top_ids,
            top=np.take_along_axis(logits, top_ids.astype(np.int64), axis=1) - normalizer[:, None],
            selected=np.empty((len(logits), 0), np.float32),
        )


def top_tokens(logits: Float32, k: int) -> Int32:
    """The ids of the k largest of float32 [vocabulary], largest first, ties by lowest id; NaN counts as
    smallest."""
    if 0 < k < len(logits) // 2:
        smallest = np.partition(logits, len(logits) - k)[len(logits) - k]
        candidates = np.flatnonzero(logits >= smallest)
        if len(candidates) >= k:
            order = np.argsort(-logits[candidates], kind="stable")[:k]
            return candidates[order].astype(np.int32)
    return np.argsort(-logits, kind="stable")[:k].astype(np.int32)


def sample(logits: Float32, top_p: float, top_k: int, generator: np.random.Generator) -> int:
    """Draw a token from softmax(logits) cut to the `top_k` best (-1: all) and to the smallest set of mass
    `top_p`.

    logits: float32 [vocabulary], already divided by the temperature.
    """
    width = len(logits) if top_k < 0 else min(top_k, len(logits))
    ids = top_tokens(logits, width)
    with np.errstate(all="ignore"):
        weights = np.exp(logits[ids].astype(np.float64) - float(logits[ids[0]]))
    cumulative = np.cumsum(weights / weights.sum())
    kept = int(np.searchsorted(cumulative, top_p)) + 1
    cumulative = cumulative[:kept]
    drawn = int(np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right"))
    return int(ids[min(drawn, len(cumulative) - 1)])
