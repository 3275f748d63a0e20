"""What a self-test runs: fewer prompts and cells than the gate, so that a whole catalogue fits into minutes.

The checks and their bounds stay the config's own. What was left out is said in sentences, never silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pytest_quantguard.baseline.recording import Cell, CellKey, PromptRecord, Recording, plan_batches
from pytest_quantguard.config import EmulatorServer, GateConfig
from pytest_quantguard.errors import ConfigError
from pytest_quantguard.gate.plan import Check, plan_checks
from pytest_quantguard.measure.asking import take_rows
from pytest_quantguard.results import Kind

JUDGED_KINDS: tuple[Kind, ...] = ("server", "validity", "accuracy", "self_consistency", "drift")
"""Timing is left out: a fault that only costs time needs a quiet machine, not a matrix."""

SMALLEST_CHUNK = 16
CHUNK_ARGUMENT = "chunked_prefill_size"


@dataclass(frozen=True, slots=True)
class SelftestPlan:
    """config: the gate's, reduced. baseline: the recording, with the chosen prompts only.

    chunk_size: tokens of a prefill chunk if the self-test chose it; None where the config has its own.
    notes: what is not as in the gate.
    """

    config: GateConfig
    baseline: Recording
    chunk_size: int | None
    notes: tuple[str, ...]

    @property
    def reduced(self) -> bool:
        """Whether answers differ from those that the gate would get of the same candidate."""
        stored = self.baseline.manifest.suite
        whole = stored.prompt_count * stored.score_tokens
        return self.chunk_size is not None or self.baseline.positions < whole

    @property
    def cells(self) -> tuple[CellKey, ...]:
        """The cells that are measured, in the gate's order."""
        return tuple(CellKey(phase, size) for phase, size in self.config.cells())

    def stages(self) -> list[list[Check]]:
        """The checks in the order in which they can be judged: those of a stage need one more measurement
        than those of the stage before.
        """
        stages: dict[tuple[int, bool], list[Check]] = {}
        for check in plan_checks(self.config):
            if check.kind in JUDGED_KINDS:
                last = max((self.cells.index(key) for key in _cells_of(check, self.config)), default=0)
                stages.setdefault((last, check.comparison == "warm_cache"), []).append(check)
        return [stages[place] for place in sorted(stages)]


def plan_selftest(
    config: GateConfig, baseline: Recording, *, prompts: int | None, score_tokens: int | None
) -> SelftestPlan:
    """Reduce a gate. prompts: how many of the suite's are asked; score_tokens: how many positions of each
    scored span, from its start. None keeps all.

    Raises ConfigError for a candidate in which faults cannot be switched on.
    """
    candidate = _emulated(config)
    total, whole = len(baseline.prompts), baseline.positions
    notes = []
    if prompts is not None and prompts < total:
        lengths = [prompt.token_ids.size for prompt in baseline.prompts]
        baseline = select_prompts(baseline, spread_over_lengths(lengths, prompts))
        notes.append(f"{prompts} of the suite's {total} prompts are asked, spread over their lengths")
    if score_tokens is not None and score_tokens < config.suite.score_tokens:
        baseline = shorten_spans(baseline, score_tokens)
        notes.append(
            f"the first {score_tokens} of the {config.suite.score_tokens} positions of each are scored"
        )
    count = len(baseline.prompts)
    scored = max(prompt.span_ids.size for prompt in baseline.prompts)
    sizes = _useful_sizes(config.suite.batch_sizes, count)
    if len(sizes) < len(config.suite.batch_sizes):
        left_out = ", ".join(str(size) for size in config.suite.batch_sizes if size not in sizes)
        notes.append(
            f"batch size {left_out} is left out: with {count} prompts it would be {max(sizes)} again"
        )
    accuracy = config.accuracy
    if baseline.positions < whole and accuracy.decision == "point":
        accuracy = accuracy.model_copy(update={"decision": "proven_bad"})
        notes.append(
            "a bound against BF16 counts as exceeded only where the whole interval is beyond it: "
            f"{baseline.positions} positions scatter more than the {whole} that it was set for"
        )
    if config.speed is not None:
        notes.append("nothing is timed: faults of speed are not tried")
    if config.generation is not None:
        notes.append("no text is generated: faults of generation are not tried")
    if config.self_consistency.repeat is not None:
        notes.append("self_consistency.repeat is left out")
    chunk_size = None
    if not _sets_chunk(candidate):
        longest = max(prompt.token_ids.size for prompt in baseline.prompts)
        # As large as it may be, for speed, while a good part of the longest text lies in its second chunk.
        chunk_size = max(SMALLEST_CHUNK, 1 << ((3 * longest // 4).bit_length() - 1))
        arguments = {**candidate.server_args, CHUNK_ARGUMENT: chunk_size}
        candidate = candidate.model_copy(update={"server_args": arguments})
        notes.append(
            f"the server prefills {chunk_size} tokens at a time, so that faults of chunked prefill can show; "
            "a server with chunks larger than every batch of the suite could not show them to this gate"
        )
    reduced = config.model_copy(
        update={
            "candidate": candidate,
            "accuracy": accuracy,
            "speed": None,
            "generation": None,
            "suite": config.suite.model_copy(update={"batch_sizes": sizes, "score_tokens": scored}),
            "self_consistency": config.self_consistency.model_copy(update={"repeat": None}),
        }
    )
    return SelftestPlan(reduced, baseline, chunk_size, tuple(notes))


def select_prompts(recording: Recording, indices: Sequence[int]) -> Recording:
    """The recording with these prompts only, in this order; batches are those of the fixed plan."""

    def of(cell: Cell) -> Cell:
        batches = plan_batches(len(indices), cell.key.batch_size)
        return Cell(cell.key, batches, tuple(cell.rows[index] for index in indices))

    return replace(
        recording,
        prompts=tuple(recording.prompts[index] for index in indices),
        cells={key: of(cell) for key, cell in recording.cells.items()},
    )


def shorten_spans(recording: Recording, score_tokens: int) -> Recording:
    """The recording with the first positions of every scored span only; the texts end there."""
    first = np.arange(score_tokens)

    def prompt_of(prompt: PromptRecord) -> PromptRecord:
        end = prompt.span_start + score_tokens
        tokens = prompt.token_ids[:end]
        return replace(prompt, token_ids=tokens, prompt_tokens=min(prompt.prompt_tokens, tokens.size))

    def of(cell: Cell) -> Cell:
        return replace(cell, rows=tuple(take_rows(rows, first[: rows.positions]) for rows in cell.rows))

    return replace(
        recording,
        prompts=tuple(prompt_of(prompt) for prompt in recording.prompts),
        cells={key: of(cell) for key, cell in recording.cells.items()},
    )


def shuffle_prompts(recording: Recording, seed: int) -> Recording:
    """The recording as if its prompts had been asked in another order, so that batches are composed anew.

    seed: 0 keeps the order.
    """
    if seed == 0:
        return recording
    order = np.random.default_rng(seed).permutation(len(recording.prompts))
    return select_prompts(recording, order.tolist())


def spread_over_lengths(lengths: Sequence[int], count: int) -> list[int]:
    """Indices of `count` prompts, ascending, spread evenly over the ranks of their lengths."""
    by_length = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    ranks = ((np.arange(count) + 0.5) * len(lengths) / count).astype(int)
    return sorted(by_length[rank] for rank in ranks)


def _emulated(config: GateConfig) -> EmulatorServer:
    candidate = config.candidate
    if not isinstance(candidate, EmulatorServer):
        raise ConfigError(
            f"{config.name}: candidate.backend is {candidate.backend!r}, and faults can be switched on in "
            "the emulator only. Write a second config that extends this one with candidate: {backend: "
            "emulator, model_path: ..., quantization: ...} and test that one."
        )
    if candidate.faults:
        raise ConfigError(
            f"{config.name}: candidate.faults is {candidate.faults}, so the candidate is not clean. A "
            "self-test switches faults on itself: remove `faults`, or name them with --faults."
        )
    return candidate


def _sets_chunk(candidate: EmulatorServer) -> bool:
    return any(key.lstrip("-").replace("-", "_") == CHUNK_ARGUMENT for key in candidate.server_args)


def _useful_sizes(sizes: Sequence[int], prompts: int) -> list[int]:
    """Without batch sizes that would be the same batches again, for lack of prompts."""
    fitting = [size for size in sizes if size <= prompts]
    if max(fitting, default=0) < prompts:
        fitting += sorted(size for size in sizes if size > prompts)[:1]
    return [size for size in sizes if size in fitting]


def _cells_of(check: Check, config: GateConfig) -> Iterator[CellKey]:
    """The cells that a check looks at; the one of the server as a whole begins with the first."""
    if check.cell is None:
        return
    yield check.cell
    if check.comparison == "decode_against_prefill":
        yield CellKey("prefill", check.cell.batch_size)
    if check.comparison == "batch":
        yield CellKey(check.cell.phase, min(config.suite.batch_sizes))
