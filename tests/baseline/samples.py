"""Recordings made of random logits, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pytest_quantguard.baseline.manifest import (
    Manifest,
    ModelRecord,
    ServerRecord,
    SuiteRecord,
    digest_prompts,
)
from pytest_quantguard.baseline.recording import Cell, CellKey, PromptRecord, Recording, plan_batches
from pytest_quantguard.logprobs.arrays import TopLogprobs

KEYS = (CellKey("prefill", 1), CellKey("prefill", 8), CellKey("decode", 1), CellKey("decode", 8))


def round_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Nearest BF16 by way of Python's own arithmetic on bit patterns."""
    bits = values.view(np.uint32).astype(np.uint64)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)


def top_of(
    logits: npt.NDArray[np.float32], width: int, chosen: npt.NDArray[np.int32], ordering: int = 0
) -> TopLogprobs:
    """What a server answers: log_softmax in float32 as torch does it, the best; ties in random order."""
    shifted = (logits - logits.max(axis=1, keepdims=True)).astype(np.float32)
    log_sum = np.log(np.exp(shifted.astype(np.float64)).sum(axis=1, keepdims=True)).astype(np.float32)
    logprobs = (shifted - log_sum).astype(np.float32)
    tie_breaker = np.random.default_rng(ordering).random(logits.shape)
    ids = np.lexsort((tie_breaker, -logprobs), axis=1)[:, :width]
    return TopLogprobs(
        token_ids=ids.astype(np.int32),
        logprobs=np.take_along_axis(logprobs, ids, axis=1),
        chosen_ids=chosen,
        vocab_size=logits.shape[1],
        chosen_logprobs=logprobs[np.arange(len(chosen)), chosen],
    )


def make_prompts(
    rng: np.random.Generator, count: int, span: int, vocab_size: int
) -> tuple[PromptRecord, ...]:
    prompts = []
    for index in range(count):
        length = int(rng.integers(2, 40))
        ids = rng.integers(0, vocab_size, length + span).astype(np.int32)
        prompts.append(PromptRecord(f"p{index}", "prose", ids, prompt_tokens=length, span_start=length))
    return tuple(prompts)


def make_cells(
    prompts: Sequence[PromptRecord],
    keys: Sequence[CellKey] = KEYS,
    *,
    vocab_size: int = 4000,
    width: int = 32,
    bfloat16: bool = True,
    noise: float = 0.05,
    seed: int = 0,
) -> dict[CellKey, Cell]:
    """Cells whose logits differ by `noise`, as those of one server at different batch sizes do."""
    rng = np.random.default_rng(seed)
    prior = rng.normal(0, 1.5, vocab_size)
    bases = [12 + prior + rng.normal(0, 2, (len(prompt.span_ids), vocab_size)) for prompt in prompts]
    cells = {}
    for key in keys:
        rows = []
        for prompt, base in zip(prompts, bases, strict=True):
            logits = (base + rng.normal(0, noise, base.shape)).astype(np.float32)
            rows.append(top_of(round_bfloat16(logits) if bfloat16 else logits, width, prompt.span_ids))
        cells[key] = Cell(key, plan_batches(len(prompts), key.batch_size), tuple(rows))
    return cells


def make_recording(*, seed: int = 0, count: int = 5, span: int = 6, width: int = 32) -> Recording:
    rng = np.random.default_rng(seed)
    prompts = make_prompts(rng, count, span, 4000)
    cells = make_cells(prompts, width=width, seed=seed)
    manifest = Manifest(
        kind="baseline",
        name="sample",
        created="2025-01-02T03:04:05+00:00",
        package_version="0.1.0",
        model=ModelRecord(model_path="org/model", dtype="bfloat16", vocab_size=4000),
        suite=SuiteRecord(
            prompts="builtin",
            suite_digest="a" * 64,
            prompts_digest=digest_prompts(
                [prompt.token_ids.tolist() for prompt in prompts],
                [prompt.prompt_tokens for prompt in prompts],
            ),
            prompt_count=count,
            score_tokens=span,
            top_logprobs=width,
            width=width,
            batch_sizes=[1, 8],
            phases=["prefill", "decode"],
        ),
        server=ServerRecord(backend="sglang", kind="sglang", version="0.5.23", device="H100"),
        repeats=2,
        environment={"python": "3.11"},
    )
    floor = {key: {"kl_mean": 1e-5 * (index + 1)} for index, key in enumerate(cells)}
    return Recording(manifest, prompts, cells, floor)


def assert_same_cells(left: dict[CellKey, Cell], right: dict[CellKey, Cell]) -> None:
    """Bit for bit: NaN and the sign of zero count."""
    assert list(left) == list(right)
    for key, cell in left.items():
        other = right[key]
        assert (cell.key, cell.batches, len(cell.rows)) == (other.key, other.batches, len(other.rows))
        for one, two in zip(cell.rows, other.rows, strict=True):
            assert one.vocab_size == two.vocab_size
            for name in ("token_ids", "logprobs", "chosen_ids", "chosen_logprobs"):
                before, after = getattr(one, name), getattr(two, name)
                assert before.shape == after.shape
                assert before.dtype == after.dtype
                assert before.tobytes() == after.tobytes(), f"{key}: {name}"
