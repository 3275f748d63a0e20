"""Values that come in clusters (positions in prompts), prepared for many reweightings of whole clusters.

A reweighting gives every cluster a count: how often it was drawn. All sums and order statistics under R
reweightings are computed together, without building any resampled array.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

_BLOCK = 64


class ClusteredValues:
    """The known (not NaN) values of a column, with the cluster of each.

    values: float64 [T]. labels: int64 [T], dense cluster numbers 0 .. count - 1. sizes: float64 [count].
    """

    def __init__(self, values: Float64, clusters: Int64) -> None:
        if values.shape != clusters.shape or values.ndim != 1:
            raise ValueError(f"values {values.shape} and clusters {clusters.shape} must be equal and flat")
        known = ~np.isnan(values)
        self.values = values[known]
        if not np.isfinite(self.values).all():
            raise ValueError("values must be finite, or NaN where unknown")
        distinct, labels = np.unique(clusters[known], return_inverse=True)
        self.labels: Int64 = labels.astype(np.int64)
        self.count = int(distinct.size)
        self.sizes = np.bincount(self.labels, minlength=self.count).astype(np.float64)
        self._order: _OrderStatistics | None = None

    def sums(self, values: Float64) -> Float64:
        """float64 [count]: sum over each cluster of `values` [T], which are a function of `self.values`."""
        sums: Float64 = np.bincount(self.labels, weights=values, minlength=self.count).astype(np.float64)
        return sums

    def order_statistics(self, weights: Float64, ranks: Int64) -> Float64:
        """float64 [R]: for each reweighting float64 [R, count] the value of rank int64 [R], from 0.

        There is at least one value.
        """
        if self._order is None:
            self._order = _OrderStatistics(self.values, self.labels, self.count)
        return self._order.take(weights, ranks)


class _OrderStatistics:
    """Finds ranks in two steps: the block of sorted values, by a matrix product; then the place in it."""

    def __init__(self, values: Float64, labels: Int64, count: int) -> None:
        order = np.argsort(values, kind="stable")
        blocks = -(-values.size // _BLOCK)
        padding = blocks * _BLOCK - values.size
        self._sorted = np.concatenate([values[order], np.full(padding, values[order[-1]])])
        self._labels = np.concatenate([labels[order], np.full(padding, count)])  # `count` never has weight
        flat = self._labels + np.repeat(np.arange(blocks), _BLOCK) * (count + 1)
        per_block = np.bincount(flat, minlength=blocks * (count + 1)).reshape(blocks, count + 1)
        self._per_block = per_block[:, :count].T.astype(np.float64)
        self._cumulated: dict[int, tuple[Float64, Float64, Float64]] = {}

    def take(self, weights: Float64, ranks: Int64) -> Float64:
        cumulated, padded = self._cumulate(weights)
        rows = np.arange(weights.shape[0])
        block = np.minimum((cumulated <= ranks[:, None]).sum(axis=1), cumulated.shape[1] - 1)
        before = np.where(block > 0, cumulated[rows, block - 1], 0.0)
        members = block[:, None] * _BLOCK + np.arange(_BLOCK)
        counts = np.cumsum(padded[rows[:, None], self._labels[members]], axis=1)
        place = np.minimum((counts <= (ranks - before)[:, None]).sum(axis=1), _BLOCK - 1)
        taken: Float64 = self._sorted[block * _BLOCK + place]
        return taken

    def _cumulate(self, weights: Float64) -> tuple[Float64, Float64]:
        """float64 [R, blocks], drawn values up to the end of each block; float64 [R, count + 1].

        Kept for the next quantile under the same weights; they are held too, so that their id stays theirs.
        """
        if id(weights) not in self._cumulated:
            padded = np.concatenate([weights, np.zeros((weights.shape[0], 1))], axis=1)
            self._cumulated[id(weights)] = (weights, np.cumsum(weights @ self._per_block, axis=1), padded)
        return self._cumulated[id(weights)][1:]
