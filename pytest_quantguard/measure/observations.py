"""What a run saw of a candidate, as one typed table, and the few questions that diagnosis asks of it.

No rules here, and no sentences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pytest_quantguard.baseline.recording import Cell, CellKey, NoiseFloor, PromptRecord
from pytest_quantguard.config import Phase
from pytest_quantguard.logprobs.arrays import TopLogprobs
from pytest_quantguard.logprobs.divergence import Divergence
from pytest_quantguard.logprobs.lookup import Lookup
from pytest_quantguard.logprobs.metrics import metric_change
from pytest_quantguard.measure.consistency import SelfComparison
from pytest_quantguard.measure.drift import DriftMeasurement
from pytest_quantguard.stats.paired import PairedChange

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

CLEARLY_WORSE = 0.25
"""A change of mean KL below this share of what it was is not called a pattern."""

LEAST_SIDE = 0.1
"""Share of the positions that must lie before, and after, a place where something sets in."""


@dataclass(frozen=True, slots=True)
class LogitScale:
    """How the candidate's log-probabilities spread, over the tokens that both sides returned.

    Medians over positions. stretch: their standard deviation over the baseline's. (Not the slope of a
    regression, which noise flattens; a final normalisation keeps the spread as it is, however noisy the
    layers before it.)
    fit: squared correlation.
    """

    stretch: float
    fit: float


@dataclass(frozen=True, slots=True)
class Observations:
    """Everything that a run measured of a candidate.

    prompts: in the order of every divergence. cells: divergence from BF16, cold. noise: the reference's
        own.
    comparisons: the candidate against itself. drifts: against its accepted run. logit_scales: per cell.
    permuted: ids of prompts whose rows fit another place better than their own. unusable: cells that were
        refused, and why.
    chunk_size: tokens that the server prefills at once.
    """

    prompts: tuple[PromptRecord, ...]
    cells: Mapping[CellKey, Divergence]
    noise: NoiseFloor = field(default_factory=dict)
    comparisons: Sequence[SelfComparison] = ()
    drifts: Sequence[DriftMeasurement] = ()
    logit_scales: Mapping[CellKey, LogitScale] = field(default_factory=dict)
    permuted: Mapping[CellKey, Sequence[str]] = field(default_factory=dict)
    unusable: Mapping[CellKey, str] = field(default_factory=dict)
    chunk_size: int | None = None

    def batch_sizes(self, phase: Phase) -> list[int]:
        """Batch sizes with usable answers, ascending."""
        return sorted(key.batch_size for key in self.cells if key.phase == phase)

    def noise_of(self, key: CellKey) -> float:
        """Mean KL between two recordings of the reference; 0 where it is not known."""
        return self.noise.get(key, {}).get("kl_mean", 0.0)

    def text_positions(self) -> Int64:
        """int64 [T]: number of tokens before each scored position."""
        return np.concatenate(
            [np.arange(prompt.span_start, prompt.token_ids.size) for prompt in self.prompts]
        )


def clearly_worse(before: Divergence, after: Divergence, *, noise: float) -> PairedChange | None:
    """The change of mean KL to BF16 between two ways of asking for the same positions, if it is a pattern.

    That is: its whole interval is an increase, and it exceeds the noise and a quarter of what there was.
    """
    change = metric_change(before, after, "kl_mean")
    if change.interval is None or change.interval.low <= 0:
        return None
    return change if change.change > CLEARLY_WORSE * change.before + noise else None


def show_change(change: PairedChange) -> str:
    """Figures of a change with an interval, for evidence."""
    figures = f"{change.before:.3g} to {change.after:.3g} nats ({change.change:+.2g}"
    if change.interval is not None:
        figures += f", 95 % interval {change.interval.low:+.2g} to {change.interval.high:+.2g}"
    return figures + ")"


@dataclass(frozen=True, slots=True)
class Onset:
    """A place from which an amount is high: its mean before and after."""

    place: int
    before: float
    after: float


def onset(amount: Float64, place: Int64, *, most_before: float) -> Onset | None:
    """The place from which `amount` is high, having been low before it; None where there is no such place.

    amount: float64 [T]; place: int64 [T]. Low means a mean of at most `most_before` times the mean after
        it. Of all places with enough positions on both sides, the one with the greatest contrast is taken
        (the split of a regression tree: difference of means, weighted by sqrt(n1 n2 / n)).
    """
    places, start = np.unique(np.sort(place), return_index=True)
    order = np.argsort(place, kind="stable")
    total = np.concatenate([[0.0], np.cumsum(amount[order])])
    below = start[1:].astype(np.float64)
    above = place.size - below
    if below.size == 0:
        return None
    mean_below = total[start[1:]] / below
    mean_above = (total[-1] - total[start[1:]]) / above
    contrast = (mean_above - mean_below) * np.sqrt(below * above / place.size)
    contrast[np.minimum(below, above) < LEAST_SIDE * place.size] = -np.inf
    best = int(contrast.argmax())
    if contrast[best] <= 0 or mean_below[best] > most_before * mean_above[best]:
        return None
    return Onset(int(places[1:][best]), float(mean_below[best]), float(mean_above[best]))


def fit_logit_scale(baseline: Cell, candidate: Cell) -> LogitScale:
    """How the candidate's log-probabilities spread: a temperature stretches them by a factor."""
    lookup = Lookup(max(rows.vocab_size for cell in (baseline, candidate) for rows in cell.rows))
    parts = [_spreads(*pair, lookup) for pair in zip(baseline.rows, candidate.rows, strict=True)]
    spreads = np.concatenate(parts)
    if spreads.size == 0:
        return LogitScale(1.0, 0.0)
    return LogitScale(*np.median(spreads, axis=0).tolist())


def _spreads(ours: TopLogprobs, theirs: TopLogprobs, lookup: Lookup) -> Float64:
    """float64 [rows, 2]: stretch and fit of each row where both sides vary over what they share."""
    place = lookup.find(ours.token_ids, theirs.token_ids)
    shared = place >= 0
    count = np.maximum(shared.sum(axis=1, keepdims=True), 1)

    def centred(values: Float64) -> Float64:
        kept = np.where(shared, values, 0.0)
        return np.where(shared, kept - kept.sum(axis=1, keepdims=True) / count, 0.0)

    x = centred(ours.logprobs.astype(np.float64))
    y = centred(np.take_along_axis(theirs.logprobs, np.maximum(place, 0), axis=1).astype(np.float64))
    xx, xy, yy = (np.einsum("ij,ij->i", a, b) for a, b in ((x, x), (x, y), (y, y)))
    known = (xx > 0) & (yy > 0)
    xx, xy, yy = xx[known], xy[known], yy[known]
    return np.stack([np.sqrt(yy / xx), xy * xy / (xx * yy)], axis=1)
