"""Size and speed of stored recordings, against numpy's own compressed file (nothing is asserted on time).

pytest -m benchmark_suite tests/benchmarks/test_bench_baseline.py -s
"""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pytest_quantguard.baseline.codec import decode_cells, encode_cells
from pytest_quantguard.baseline.recording import Cell, CellKey
from pytest_quantguard.baseline.store import read_recording

sys.path.append(str(Path(__file__).parent.parent))

from baseline.samples import assert_same_cells, make_cells, make_prompts

pytestmark = pytest.mark.benchmark_suite

BASELINES = Path(__file__).parent.parent.parent / "baselines"
PHASES_AND_SIZES = [CellKey(phase, size) for phase in ("prefill", "decode") for size in (1, 3, 8, 32)]


def numpy_bytes(cells: dict[CellKey, Cell]) -> int:
    """What np.savez_compressed makes of the same ids and log-probabilities."""
    stream = io.BytesIO()
    arrays = {}
    for key, cell in cells.items():
        arrays[f"{key}-ids"] = np.concatenate([rows.token_ids for rows in cell.rows])
        arrays[f"{key}-logprobs"] = np.concatenate([rows.logprobs for rows in cell.rows])
    np.savez_compressed(stream, **arrays)
    return len(stream.getvalue())


@pytest.mark.parametrize("cells_stored", [1, 8])
@pytest.mark.parametrize("bfloat16", [True, False], ids=["bf16-logits", "float32-logits"])
def test_bytes_per_position(bfloat16: bool, cells_stored: int) -> None:
    prompts = make_prompts(np.random.default_rng(0), 32, 32, 49_152)
    keys = PHASES_AND_SIZES[:cells_stored]
    cells = make_cells(prompts, keys, vocab_size=49_152, width=256, bfloat16=bfloat16, noise=0.03)
    start = time.perf_counter()
    payload = encode_cells(cells, prompts)
    encoded = time.perf_counter()
    decoded = decode_cells(payload, prompts)
    finished = time.perf_counter()
    assert_same_cells(cells, decoded)
    positions = 32 * 32 * cells_stored
    print(
        f"\n{'BF16' if bfloat16 else 'float32'} logits, {cells_stored} cells: "
        f"{len(payload) / positions:.0f} bytes a position "
        f"({numpy_bytes(cells) / positions:.0f} as npz), exact, "
        f"{(encoded - start) / positions * 1e6:.0f} us a position to write, "
        f"{(finished - encoded) / positions * 1e6:.0f} to read"
    )


def test_committed_baselines() -> None:
    for path in sorted(BASELINES.glob("*/manifest.json")):
        start = time.perf_counter()
        recording = read_recording(path.parent)
        seconds = time.perf_counter() - start
        size = sum(file.stat().st_size for file in path.parent.iterdir() if file.is_file())
        positions = recording.positions * len(recording.cells)
        print(
            f"\n{path.parent.name}: {size / 1e6:.2f} MB, {size / positions:.0f} bytes a position, "
            f"read in {seconds:.2f} s"
        )
