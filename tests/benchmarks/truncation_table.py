"""How close the truncated divergences come to the true KL over the whole vocabulary.

    python tests/benchmarks/truncation_table.py BASELINE.npy nvfp4=NVFP4.npy dead_head=DEAD.npy [--top 256]

Each file holds logits (or log-probabilities) of the whole vocabulary, [positions, vocabulary], for the same
positions. The reference token of each is the baseline's most likely one, as in greedy decoding. Prints a
Markdown table, one line per candidate.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pytest_quantguard.logprobs.arrays import TopLogprobs
from pytest_quantguard.logprobs.divergence import compare

Float64 = npt.NDArray[np.float64]
HEADER = (
    "| candidate | true KL | `kl` | of true | bucket | of true | `kl_uniform` | of true | captured mass |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
)


@dataclass(frozen=True, slots=True)
class Truncation:
    """Means over positions, in nats; captured: the candidate's mass inside its top-K."""

    true_kl: float
    kl: float
    kl_bucket: float
    kl_uniform: float
    captured: float

    def line(self, name: str) -> str:
        """One line of the table."""
        cells = [name, f"{self.true_kl:.4f}"]
        for value in (self.kl, self.kl_bucket, self.kl_uniform):
            share = f"{value / self.true_kl:.3f}" if self.true_kl > 0 else "-"
            cells += [f"{value:.4f}", share]
        return "| " + " | ".join([*cells, f"{self.captured:.3f}"]) + " |"


def measure(
    baseline_logits: npt.NDArray[np.floating], logits: npt.NDArray[np.floating], top: int
) -> Truncation:
    """Compare [positions, vocabulary] logits truncated to the `top` best with the whole vocabulary."""
    p, q = log_softmax(baseline_logits), log_softmax(logits)
    reference = p.argmax(axis=1).astype(np.int32)
    found = compare(truncate(p, top, reference), truncate(q, top, reference))
    return Truncation(
        true_kl=float((np.exp(p) * (p - q)).sum(axis=1).mean()),
        kl=float(found.kl.mean()),
        kl_bucket=float(found.kl_bucket.mean()),
        kl_uniform=float(found.kl_uniform.mean()),
        captured=float(found.captured_mass_candidate.mean()),
    )


def log_softmax(logits: npt.NDArray[np.floating]) -> Float64:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    normalized: Float64 = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return normalized


def truncate(logprobs: Float64, top: int, reference: npt.NDArray[np.int32]) -> TopLogprobs:
    """The best `top` of each row and the reference token's own, in float32 as a server returns them."""
    positions, vocab = logprobs.shape
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, : min(top, vocab)]
    return TopLogprobs(
        token_ids=order.astype(np.int32),
        logprobs=np.take_along_axis(logprobs, order, axis=1).astype(np.float32),
        chosen_ids=reference,
        vocab_size=vocab,
        chosen_logprobs=logprobs[np.arange(positions), reference].astype(np.float32),
    )


def main() -> None:
    """Read the files named on the command line and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("baseline", type=Path)
    parser.add_argument("candidates", nargs="+", metavar="NAME=FILE.npy")
    parser.add_argument("--top", type=int, default=256)
    options = parser.parse_args()
    baseline = np.load(options.baseline, allow_pickle=False)
    print(HEADER)
    for candidate in options.candidates:
        name, separator, path = candidate.partition("=")
        if not separator:
            parser.error(f"expected NAME=FILE.npy, found {candidate!r}")
        print(measure(baseline, np.load(path, allow_pickle=False), options.top).line(name))


if __name__ == "__main__":
    main()
