"""What a report shows beyond figures: where in the texts a candidate is far off, and what it would have said
there.

Asks the server for nothing but the texts of a few tokens, and stops asking at the first answer that does not
come.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pytest_quantguard.baseline.recording import CellKey, Recording
from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.logprobs.arrays import TopLogprobs
from pytest_quantguard.logprobs.divergence import Divergence
from pytest_quantguard.measure.comparison import compare_cells
from pytest_quantguard.results import (
    CellDetail,
    Details,
    Histogram,
    PromptDetail,
    SpanPart,
    TokenProbability,
    WorstPosition,
)

SPAN_PARTS = 32
EDGES = tuple(float(edge) for edge in np.logspace(-6, 2, 33))
"""Four bins to a decade, in nats."""
PROMPTS = 200
WORST = 10
SHOWN_TOKENS = 10
TOKENS_BEFORE, TOKENS_AFTER = 40, 8
TEXT_LENGTH = 400

Place = tuple[int, int]
"""Prompt number and position in its scored span."""


def details_of(trial: Trial) -> Details:
    """Everything about the cells that were compared so far, as first measured."""
    baseline, cells = trial.known_baseline(), trial.compared()
    if baseline is None or not cells:
        return Details()
    prompts = _prompts(baseline, cells)
    return Details(
        cells=[_cell(baseline, key, divergence) for key, divergence in cells.items()],
        prompts=prompts[:PROMPTS],
        prompts_left_out=max(0, len(prompts) - PROMPTS),
        worst=_worst(trial, baseline, cells),
    )


def _cell(baseline: Recording, key: CellKey, divergence: Divergence) -> CellDetail:
    noise = _noise(baseline, key)
    return CellDetail(
        phase=key.phase,
        batch_size=key.batch_size,
        along_span=_along_span(divergence),
        histogram=Histogram(
            edges=list(EDGES),
            candidate=_counts(divergence.kl),
            noise=None if noise is None else _counts(noise.kl),
        ),
    )


def _along_span(divergence: Divergence) -> list[SpanPart]:
    length = int(divergence.position.max()) + 1
    edges = np.unique(np.linspace(0, length, min(SPAN_PARTS, length) + 1).round().astype(int))
    parts = []
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        inside = (divergence.position >= begin) & (divergence.position < end)
        kl = divergence.kl[inside]
        parts.append(
            SpanPart(
                begin=begin,
                end=end,
                kl_mean=float(kl.mean()),
                kl_p90=float(np.quantile(kl, 0.9)),
                agreement=float(divergence.agreement[inside].mean()),
            )
        )
    return parts


def _counts(kl: npt.NDArray[np.float64]) -> list[int]:
    """int [len(EDGES) - 1]; what lies beyond the outermost edges is counted in the outermost bins."""
    counts: list[int] = np.histogram(np.clip(kl, EDGES[0], EDGES[-1]), bins=EDGES)[0].tolist()
    return counts


def _noise(baseline: Recording, key: CellKey) -> Divergence | None:
    """The reference against itself at the smallest other batch size; None where it has no other."""
    others = [other for other in sorted(baseline.cells) if other.phase == key.phase and other != key]
    if not others or key not in baseline.cells:
        return None
    return compare_cells(baseline.cells[others[0]], baseline.cells[key]).divergence


def _prompts(baseline: Recording, cells: dict[CellKey, Divergence]) -> list[PromptDetail]:
    """Every prompt, the one with the largest KL in any cell first."""
    found = []
    for number, prompt in enumerate(baseline.prompts):
        kl, agreement = {}, {}
        for key, divergence in cells.items():
            own = divergence.prompt == number
            if own.any():
                kl[str(key)] = float(divergence.kl[own].mean())
                agreement[str(key)] = float(divergence.agreement[own].mean())
        detail = PromptDetail(
            id=prompt.id[:TEXT_LENGTH],
            task=prompt.task[:TEXT_LENGTH],
            tokens=int(prompt.token_ids.size),
            kl_mean=kl,
            agreement=agreement,
        )
        found.append(detail)
    return sorted(found, key=lambda detail: -max(detail.kl_mean.values(), default=0.0))


def _worst(trial: Trial, baseline: Recording, cells: dict[CellKey, Divergence]) -> list[WorstPosition]:
    return [_position(trial, baseline, cells, place, key) for place, key in worst_places(cells)]


def worst_places(cells: dict[CellKey, Divergence], count: int = WORST) -> list[tuple[Place, CellKey]]:
    """The places with the largest KL in any cell, with that cell; first one of each prompt, then further
    ones.
    """
    worst: dict[Place, tuple[float, CellKey]] = {}
    for key, divergence in cells.items():
        for index in np.argsort(-divergence.kl, kind="stable")[: 50 * count].tolist():
            place = int(divergence.prompt[index]), int(divergence.position[index])
            value = float(divergence.kl[index])
            if place not in worst or value > worst[place][0]:
                worst[place] = (value, key)
    ranked = sorted(worst, key=lambda place: (-worst[place][0], place))
    firsts = {place[0]: place for place in reversed(ranked)}.values()
    chosen = sorted(firsts, key=ranked.index)[:count]
    chosen += [place for place in ranked if place not in chosen][: count - len(chosen)]
    return [(place, worst[place][1]) for place in sorted(chosen, key=ranked.index)]


def _position(
    trial: Trial,
    baseline: Recording,
    cells: dict[CellKey, Divergence],
    place: Place,
    key: CellKey,
) -> WorstPosition:
    number, position = place
    prompt, divergence = baseline.prompts[number], cells[key]
    at = prompt.span_start + position
    ids = prompt.token_ids
    index = _index(divergence, place)
    rows = baseline.cells[key].rows[number], trial.measurement(key).cell.rows[number]
    return WorstPosition(
        prompt=prompt.id[:TEXT_LENGTH],
        task=prompt.task[:TEXT_LENGTH],
        position=position,
        span=int(prompt.span_ids.size),
        phase=key.phase,
        batch_size=key.batch_size,
        kl=float(divergence.kl[index]),
        kl_by_cell={str(other): _at(values, place) for other, values in cells.items()},
        before=trial.text(ids[max(0, at - TOKENS_BEFORE) : at].tolist())[-TEXT_LENGTH:],
        reference=trial.text([int(ids[at])])[:TEXT_LENGTH],
        after=trial.text(ids[at + 1 : at + 1 + TOKENS_AFTER].tolist())[:TEXT_LENGTH],
        flip=not divergence.agreement[index],
        confident=bool(divergence.confident_flip[index]),
        baseline=_best(trial, rows[0], rows[1], position),
        candidate=_best(trial, rows[1], rows[0], position),
    )


def _index(divergence: Divergence, place: Place) -> int:
    return int(np.flatnonzero((divergence.prompt == place[0]) & (divergence.position == place[1]))[0])


def _at(divergence: Divergence, place: Place) -> float:
    return float(divergence.kl[_index(divergence, place)])


def _best(trial: Trial, rows: TopLogprobs, others: TopLogprobs, position: int) -> list[TokenProbability]:
    there = dict(zip(others.token_ids[position].tolist(), others.logprobs[position].tolist(), strict=True))
    found = []
    for rank in range(min(SHOWN_TOKENS, rows.width)):
        token = int(rows.token_ids[position, rank])
        found.append(
            TokenProbability(
                id=token,
                text=trial.text([token])[:TEXT_LENGTH],
                probability=float(np.exp(rows.logprobs[position, rank])),
                elsewhere=float(np.exp(there[token])) if token in there else None,
            )
        )
    return found
