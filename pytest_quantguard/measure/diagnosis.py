"""Rules that turn a pattern of measurements into a sentence about where to look.

Each rule looks at the table of a run, names what it saw, and says nothing unless its pattern is there. They
judge
nothing: a candidate within its bounds may show a pattern, and one beyond them may show none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pytest_quantguard.baseline.recording import CellKey
from pytest_quantguard.config import Phase
from pytest_quantguard.logprobs.divergence import Divergence
from pytest_quantguard.measure.asking import shorten
from pytest_quantguard.measure.observations import (
    Float64,
    Int64,
    Observations,
    clearly_worse,
    onset,
    show_change,
)
from pytest_quantguard.stats.paired import PairedChange

HUGE_KL, HUGE_AGREEMENT, HUGE_FLOOR = 2.0, 0.5, 0.5
"""Mean KL and agreement of a model that no longer is one; the KL that nine positions in ten exceed."""

STRETCHED, STRETCHED_FIT = 0.1, 0.5
"""How far from 1 the spread of log-probabilities must be, and how well they must correlate."""

OUTLYING = 10.0
"""A prompt is apart from the others where its KL is this many times their median."""

PHASES: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A pattern that was seen: the rule's name, what it suggests, and the figures it saw."""

    rule: str
    sentence: str
    evidence: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.sentence} ({'; '.join(self.evidence)})"


Rule = Callable[[Observations], Iterator[Diagnosis]]


def diagnose(seen: Observations) -> tuple[Diagnosis, ...]:
    """All patterns of `seen`, in the order of the rules."""
    return tuple(diagnosis for rule in RULES for diagnosis in rule(seen))


def unusable_answers(seen: Observations) -> Iterator[Diagnosis]:
    """Answers that were refused in one phase or at some batch sizes, and usable elsewhere."""
    if not seen.unusable or not seen.cells:
        return
    bad = sorted(seen.unusable)
    phases, sizes = sorted({key.phase for key in bad}), sorted({key.batch_size for key in bad})
    good_sizes = [key.batch_size for key in seen.cells if key.phase in phases]
    where = f"in {' and '.join(phases)}"
    advice = "look at the kernels of that phase"
    if good_sizes:
        beyond = min(sizes) > max(good_sizes)
        where += (
            f" from batch size {sizes[0]} on" if beyond else f" at batch size {' and '.join(map(str, sizes))}"
        )
        advice = (
            "look at kernels that depend on the batch size, at the padding of batches, or at the order "
            "in which a batch is answered"
        )
    yield Diagnosis(
        "unusable_answers",
        f"Answers cannot be used {where}, and can elsewhere: {advice}",
        tuple(f"{key}: {seen.unusable[key].removeprefix(str(key)).lstrip(',: ')}" for key in bad[:3]),
    )


def rows_misplaced(seen: Observations) -> Iterator[Diagnosis]:
    """Rows that fit another prompt, or another position, better than their own."""
    cells = {key: ids for key, ids in sorted(seen.permuted.items()) if ids}
    evidence = tuple(f"{key}: {shorten(list(ids))}" for key, ids in cells.items())
    if _shifted(seen):
        yield Diagnosis(
            "rows_misplaced",
            "Rows fit another position or prompt better than their own, even one prompt at a time: look for "
            "log-probabilities that are reported a position early or late, or for answers to other requests",
            evidence,
        )
    elif cells and all(key.batch_size > 1 for key in cells):
        yield Diagnosis(
            "rows_misplaced",
            "Rows of a batch come back under other prompts: look at how the server orders the rows of a "
            "batch",
            evidence,
        )


def output_destroyed(seen: Observations) -> Iterator[Diagnosis]:
    """Everything is wrong, everywhere."""
    if _shifted(seen):
        return
    worst = {key: divergence for key, divergence in seen.cells.items() if _destroyed(divergence)}
    if worst and len(worst) == len(seen.cells):
        key, divergence = next(iter(sorted(worst.items(), key=lambda item: item[0])))
        yield Diagnosis(
            "output_destroyed",
            "All positions are far off in every cell: look at the scale or the layout of a weight "
            "(scales swizzled, missing or inverted, nibbles swapped), or at the output layer",
            (
                f"{key}: mean KL {divergence.aggregate('kl_mean'):.2f}, agreement "
                f"{divergence.aggregate('agreement'):.2f}",
            ),
        )


def decode_worse(seen: Observations) -> Iterator[Diagnosis]:
    """Decode is worse than prefill of the same positions, whatever the batch size."""
    sizes = sorted(set(seen.batch_sizes("prefill")) & set(seen.batch_sizes("decode")))
    if not sizes or not _decode_change(seen, sizes[0]):
        return
    changes = [(size, change) for size in sizes if (change := _decode_change(seen, size)) is not None]
    evidence = [f"batch size {size}, prefill to decode: {show_change(change)}" for size, change in changes]
    sentence = (
        "Decode is worse than prefill of the same positions: look at the KV cache (its format, its "
        "scales, the positions of its keys) and at the decode attention kernel"
    )
    prefill, decode = seen.cells[CellKey("prefill", sizes[0])], seen.cells[CellKey("decode", sizes[0])]
    where = _decode_onset(decode.kl - prefill.kl, decode.position, seen.text_positions())
    if where is not None:
        sentence += f"; it sets in at {where}"
        evidence.append("there is no such difference before")
    yield Diagnosis("decode_worse", sentence, tuple(evidence))


def batch_dependent(seen: Observations) -> Iterator[Diagnosis]:
    """Some batch sizes are worse than others."""
    for phase in PHASES:
        sizes = seen.batch_sizes(phase)
        changes = {
            size: change
            for size in sizes[1:]
            if (change := _batch_change(seen, phase, sizes[0], size)) is not None
        }
        if changes:
            evidence = tuple(
                f"{phase}, batch size {sizes[0]} to {n}: {show_change(change)}"
                for n, change in changes.items()
            )
            yield Diagnosis("batch_dependent", _batch_sentence(phase, sizes, list(changes)), evidence)
        elif len(sizes) > 1:
            alone = [_batch_change(seen, phase, size, sizes[0]) for size in sizes[1:]]
            if alone[0] is not None and all(alone):
                yield Diagnosis(
                    "batch_dependent",
                    f"{phase.capitalize()} is worse at batch size {sizes[0]} than at every larger one: "
                    "look at the kernels for the smallest batch",
                    (f"{phase}, batch size {sizes[1]} to {sizes[0]}: {show_change(alone[0])}",),
                )


def sets_in_late(seen: Observations) -> Iterator[Diagnosis]:
    """Long texts are worse, from some number of tokens on."""
    place = seen.text_positions()
    for drift in seen.drifts:
        begin = onset((~np.concatenate(drift.bits.identical)).astype(np.float64), place, most_before=0.0)
        if begin is not None:
            yield _late(seen, begin.place, f"{drift.key}: equal to the accepted run before, not after")
            return
    for key, divergence in sorted(seen.cells.items()):
        begin = onset(divergence.kl, place, most_before=0.2)
        if begin is not None and key.phase == "prefill":
            means = f"mean KL {begin.before:.3g} before, {begin.after:.3g} after"
            yield _late(seen, begin.place, f"{key}: {means}")
            return


def logits_scaled(seen: Observations) -> Iterator[Diagnosis]:
    """The ranking of tokens has survived, their log-probabilities are stretched."""
    for key, scale in sorted(seen.logit_scales.items()):
        if key in seen.cells and abs(scale.stretch - 1) > STRETCHED and scale.fit > STRETCHED_FIT:
            divergence = seen.cells[key]
            yield Diagnosis(
                "logits_scaled",
                "The ranking of tokens has survived but log-probabilities are stretched by "
                f"{scale.stretch:.2f}: look for a temperature of about {1 / scale.stretch:.2f}, or a "
                "scale on the logits",
                (
                    f"{key}: squared correlation with the baseline's log-probabilities {scale.fit:.2f}",
                    f"agreement {divergence.aggregate('agreement'):.3f}, "
                    f"mean KL {divergence.aggregate('kl_mean'):.3g}",
                ),
            )
            return


def prefix_cache(seen: Observations) -> Iterator[Diagnosis]:
    """Prompts that meet the prefix cache are worse than the same prompts cold."""
    evidence = []
    for comparison in seen.comparisons:
        if (
            comparison.check == "warm_cache"
            and comparison.before is not None
            and comparison.after is not None
        ):
            noise = seen.noise_of(comparison.one)
            change = clearly_worse(comparison.before, comparison.after, noise=noise)
            if change is not None:
                evidence += [
                    f"{comparison.one}, cold to warm: {show_change(change)}",
                    *comparison.evidence[1:],
                ]
    if evidence:
        yield Diagnosis(
            "prefix_cache",
            "Prompts that meet the prefix cache are worse than the same prompts cold: look at what the "
            "prefix cache keeps, and whose it is",
            tuple(evidence),
        )


def few_prompts(seen: Observations) -> Iterator[Diagnosis]:
    """A few prompts are far off in the smallest batch (in larger ones it may be their place)."""
    smallest = {CellKey(phase, min(sizes)) for phase in PHASES if (sizes := seen.batch_sizes(phase))}
    for key in sorted(smallest):
        divergence = seen.cells[key]
        labels, prompt = np.unique(divergence.prompt, return_inverse=True)
        means = np.bincount(prompt, weights=divergence.kl) / np.bincount(prompt)
        apart = np.flatnonzero(means > OUTLYING * np.median(means) + seen.noise_of(key))
        if not 0 < apart.size <= max(1, labels.size // 4) or labels.size < 4:
            continue
        members = [seen.prompts[index] for index in apart]
        tasks = sorted({member.task for member in members})
        same = f", all of task {tasks[0]}" if len(tasks) == 1 and len(members) > 1 else ""
        yield Diagnosis(
            "few_prompts",
            "A few prompts are far off and the others are not: look at what only they reach (expert "
            "routing, special tokens, an unusual script, their length)",
            (
                f"{key}: {shorten([member.id for member in members])}{same}: mean KL "
                f"{means[apart].min():.3g} or more, the median prompt {np.median(means):.3g}",
            ),
        )
        return


def run_to_run(seen: Observations) -> Iterator[Diagnosis]:
    """The same question gets another answer."""
    evidence = []
    for comparison in seen.comparisons:
        between = comparison.between.aggregate("kl_mean")
        noise = seen.noise_of(comparison.one)
        if comparison.check == "repeat" and comparison.bits.share < 1 and between > max(10 * noise, 1e-4):
            evidence.append(
                f"{comparison.one}: KL {between:.3g} from run to run, {comparison.bits.share:.0%} of "
                f"the positions identical; the reference's own noise is {noise:.2g}"
            )
    if evidence:
        yield Diagnosis(
            "run_to_run",
            "The same question gets another answer from run to run: look for uninitialised memory, or "
            "for kernels whose order of summation is not fixed",
            tuple(evidence),
        )


RULES: tuple[Rule, ...] = (
    unusable_answers,
    rows_misplaced,
    output_destroyed,
    decode_worse,
    batch_dependent,
    sets_in_late,
    logits_scaled,
    prefix_cache,
    few_prompts,
    run_to_run,
)


def _shifted(seen: Observations) -> bool:
    """Most prompts are misplaced even where no batch could have mixed them up."""
    return any(
        key.batch_size == 1 and 2 * len(set(ids)) >= len(seen.prompts) for key, ids in seen.permuted.items()
    )


def _destroyed(divergence: Divergence) -> bool:
    return (
        divergence.aggregate("kl_mean") > HUGE_KL
        and divergence.aggregate("agreement") < HUGE_AGREEMENT
        and float(np.quantile(divergence.kl, 0.1)) > HUGE_FLOOR
    )


def _decode_change(seen: Observations, size: int) -> PairedChange | None:
    prefill, decode = CellKey("prefill", size), CellKey("decode", size)
    return clearly_worse(seen.cells[prefill], seen.cells[decode], noise=seen.noise_of(decode))


def _decode_onset(extra: Float64, span_position: Int64, text_position: Int64) -> str | None:
    """Where decode begins to be worse, in words: counted in generated tokens or tokens of text."""
    by_span = onset(extra, span_position, most_before=0.1)
    by_text = onset(extra, text_position, most_before=0.1)
    if by_span is not None and by_span.place <= 1:
        return None
    if by_text is not None and (
        by_span is None or by_text.before / by_text.after < by_span.before / by_span.after
    ):
        return f"about {by_text.place} tokens of text"
    return None if by_span is None else f"position {by_span.place} of the generated text"


def _batch_change(seen: Observations, phase: Phase, before: int, after: int) -> PairedChange | None:
    keys = CellKey(phase, before), CellKey(phase, after)
    return clearly_worse(seen.cells[keys[0]], seen.cells[keys[1]], noise=seen.noise_of(keys[1]))


def _batch_sentence(phase: Phase, sizes: list[int], worse: list[int]) -> str:
    fine = [size for size in sizes if size not in worse]
    where = " and ".join(map(str, worse))
    if all(_odd_sized(size) for size in worse) and any(size > min(worse) for size in fine):
        return (
            f"{phase.capitalize()} is worse at batch size {where} only, which is no power of two: look at "
            "the padding of batches"
        )
    if min(worse) > max(fine):
        return (
            f"{phase.capitalize()} is worse from batch size {min(worse)} on: look at a kernel that is "
            "chosen by the batch size, or at the padding of batches"
        )
    return (
        f"{phase.capitalize()} is worse at batch size {where}: look at kernels that depend on the batch size"
    )


def _odd_sized(size: int) -> bool:
    return size & (size - 1) != 0


def _late(seen: Observations, begin: int, evidence: str) -> Diagnosis:
    sentence = f"Texts are worse from about {begin} tokens on: look at kernels for long contexts"
    if seen.chunk_size is not None and 0 <= begin - seen.chunk_size <= max(64, seen.chunk_size // 8):
        sentence += f", and at the boundary of prefill chunks ({seen.chunk_size} tokens)"
    return Diagnosis("sets_in_late", sentence, (evidence,))
