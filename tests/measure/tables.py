"""Makes the tables of docs/measuring.md on SmolLM2 with the emulator's engine.

    OMP_NUM_THREADS=1 python -m tests.measure.tables truth cost chaos [--prompts 12] [--score-tokens 24]

Minutes on two cores. It measures; nothing is asserted here.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pytest_quantguard.baseline.recording import Cell, CellKey, PromptRecord
from pytest_quantguard.config import SuiteConfig
from pytest_quantguard.emulator.models import resolve_model
from pytest_quantguard.emulator.tokenizer import load_tokenizer
from pytest_quantguard.logprobs.divergence import Divergence
from pytest_quantguard.logprobs.metrics import metric_change
from pytest_quantguard.measure.asking import narrow_rows
from pytest_quantguard.measure.cells import CellMeasurement, measure_cell
from pytest_quantguard.measure.comparison import compare_cells
from pytest_quantguard.measure.continuation import continue_prompts
from pytest_quantguard.measure.decode import DecodeChoice
from pytest_quantguard.prompts.prompt import Prompt
from pytest_quantguard.prompts.suite import load_suite

from .engine_client import EngineClient, engine_client

WIDTH = 256
VOCAB = 49152
BATCH = 8
SCHEMES: tuple[tuple[str, dict[str, str]], ...] = (
    ("FP8 KV cache", {"kv_cache_dtype": "fp8_e4m3"}),
    ("FP8 W8A8", {"quantization": "fp8"}),
    ("NVFP4 weights (W4A16)", {"quantization": "nvfp4_w4a16"}),
    ("NVFP4 (W4A4)", {"quantization": "nvfp4"}),
)
FAULTS = (
    "global_scale_drift",
    "lm_head_zero",
    "fused_scale_max",
    "scale_round_up",
    "scale_swizzle",
    "nibble_swap",
)


@dataclass(frozen=True)
class Study:
    """SmolLM2 with a suite that its BF16 form has continued."""

    folder: Path
    prompts: tuple[PromptRecord, ...]

    def client(self, **options: str):
        return engine_client(self.folder, **options)

    def cell(
        self, client: EngineClient, phase: str, size: int, mode: str = "forced", *, width: int = WIDTH
    ) -> CellMeasurement:
        choice = DecodeChoice(mode, 8192)
        return measure_cell(client, self.prompts, CellKey(phase, size), top_logprobs=width, decode=choice)


def make_study(count: int, score_tokens: int) -> Study:
    folder = resolve_model("smollm2-135m")
    suite = load_suite(SuiteConfig(size=count, max_prompt_tokens=160), base_folder=Path())
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    prompts = [Prompt(one.id, one.task, token_ids=tuple(tokenizer.encode(one.text))) for one in suite]
    with engine_client(folder) as client:
        return Study(folder, continue_prompts(client, prompts, score_tokens=score_tokens, batch_size=BATCH))


def truth(study: Study) -> None:
    """How close `kl` of the top 256 is to the KL over the whole vocabulary."""
    print("\n| candidate | true KL | `kl` | of true | bucket alone | `kl_uniform` | agreement |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    with study.client() as client:
        baseline = study.cell(client, "prefill", BATCH, width=VOCAB).cell
    for name, options in SCHEMES:
        with study.client(**options) as client:
            _truth_row(name, baseline, study.cell(client, "prefill", BATCH, width=VOCAB).cell)
            for fault in FAULTS if options.get("quantization") == "nvfp4" else ():
                client.switch_faults(fault)
                cell = study.cell(client, "prefill", BATCH, width=VOCAB).cell
                _truth_row(f"NVFP4 (W4A4), {fault}", baseline, cell)


def _truth_row(name: str, baseline: Cell, candidate: Cell) -> None:
    true = np.concatenate(
        [_true_kl(ours, theirs) for ours, theirs in zip(baseline.rows, candidate.rows, strict=True)]
    ).mean()
    seen = compare_cells(_narrow(baseline), _narrow(candidate)).divergence
    kl = seen.kl.mean()
    print(
        f"| {name} | {true:.4f} | {kl:.4f} | {kl / true:.2f} | {seen.kl_bucket.mean():.4f} | "
        f"{seen.kl_uniform.mean():.4f} | {seen.agreement.mean():.3f} |",
        flush=True,
    )


def _true_kl(ours, theirs) -> np.ndarray:
    p, q = _dense(ours), _dense(theirs)
    return (np.exp(p) * (p - q)).sum(axis=1)


def _dense(rows) -> np.ndarray:
    """float64 [T, vocabulary], normalised in float64 (a server's float32 log-softmax is only nearly so)."""
    dense = np.empty((rows.positions, VOCAB))
    np.put_along_axis(dense, rows.token_ids.astype(np.int64), rows.logprobs.astype(np.float64), axis=1)
    return dense - np.log(np.exp(dense).sum(axis=1, keepdims=True))


def _narrow(cell: Cell) -> Cell:
    return replace(cell, rows=tuple(narrow_rows(rows, WIDTH) for rows in cell.rows))


def cost(study: Study) -> None:
    """What decode takes, forced and by resync, against one prefill pass over the same positions.

    In CPU seconds of this process, which other processes do not lengthen.
    """
    print("\n| candidate | way | requests | output tokens | CPU time | of decode steps |")
    print("|---|---|--:|--:|--:|--:|")
    for name, options in (("BF16", {}), SCHEMES[1], SCHEMES[3]):
        with study.client(**options) as client:
            first = 0.0
            for phase, mode in (("prefill", "forced"), ("decode", "forced"), ("decode", "resync")):
                start = time.process_time()
                way = study.cell(client, phase, BATCH, mode)
                seconds = time.process_time() - start
                first = first or seconds
                print(
                    f"| {name} | {way.mode} | {way.cost.requests} | {way.cost.output_tokens} | "
                    f"{seconds / first:.1f} | {way.decoded_share:.0%} |",
                    flush=True,
                )


def chaos(study: Study) -> None:
    """Two right ways of computing the same: how far from BF16 each is, and how far from each other."""
    print("\n| candidate | two ways | KL to BF16, one / other | between the two | paired change, 95 % |")
    print("|---|---|--:|--:|--:|")
    with study.client() as client:
        baseline = {
            key: study.cell(client, *key)
            for key in (("prefill", 1), ("prefill", 3), ("prefill", BATCH), ("decode", BATCH))
        }
    for name, options in (("BF16", {}), *SCHEMES):
        with study.client(**options) as client:
            own = {key: study.cell(client, *key) for key in baseline}
        with study.client(**options, dtype="float32") as client:
            exact = study.cell(client, "prefill", BATCH)
        plain = own["prefill", BATCH]
        pairs: Sequence[tuple[str, CellMeasurement, CellMeasurement]] = (
            ("BF16 / float32 arithmetic", plain, exact),
            (f"batch 1 / {BATCH}", own["prefill", 1], plain),
            ("batch 1 / 3", own["prefill", 1], own["prefill", 3]),
            ("prefill / decode", plain, own["decode", BATCH]),
        )
        for label, one, other in pairs:
            _chaos_row(
                f"| {name} | {label}",
                compare_cells(baseline[one.key].cell, one.cell).divergence,
                compare_cells(baseline[other.key].cell, other.cell).divergence,
                compare_cells(one.cell, other.cell).divergence,
            )


def _chaos_row(head: str, before: Divergence, after: Divergence, between: Divergence) -> None:
    change = metric_change(before, after, "kl_mean")
    assert change.interval is not None
    print(
        f"{head} | {change.before:.4f} / {change.after:.4f} | {between.kl.mean():.4f} | "
        f"{change.change:+.4f} ({change.interval.low:+.4f} to {change.interval.high:+.4f}) |",
        flush=True,
    )


TABLES: dict[str, Callable[[Study], None]] = {"truth": truth, "cost": cost, "chaos": chaos}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tables", nargs="+", choices=TABLES)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--score-tokens", type=int, default=24)
    chosen = parser.parse_args()
    study = make_study(chosen.prompts, chosen.score_tokens)
    for table in chosen.tables:
        TABLES[table](study)
