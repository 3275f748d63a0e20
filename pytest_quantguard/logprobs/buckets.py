"""Parts of a comparison: by place in the scored span, and by task."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pytest_quantguard.logprobs.divergence import Divergence

POSITION_EDGES = (16, 64, 128)
"""Buckets are [0, 16), [16, 64), [64, 128) and beyond, counted from the start of the scored span."""


def by_position(divergence: Divergence) -> dict[str, Divergence]:
    """Parts by place in the span, in order, without empty ones: "0-15", "16-63", "64-127", "128-"."""
    parts: dict[str, Divergence] = {}
    for low, high in zip((0, *POSITION_EDGES), (*POSITION_EDGES, None), strict=True):
        mask = divergence.position >= low
        if high is not None:
            mask &= divergence.position < high
        if mask.any():
            parts[f"{low}-{'' if high is None else high - 1}"] = divergence.select(mask)
    return parts


def by_task(divergence: Divergence, tasks: Sequence[str]) -> dict[str, Divergence]:
    """Parts by task, in order of first appearance; tasks[i] is the task of prompt number i.

    ValueError: a prompt without a task.
    """
    if divergence.positions and int(divergence.prompt.max()) >= len(tasks):
        raise ValueError(f"prompt {int(divergence.prompt.max())} has no task: only {len(tasks)} are given")
    labels = np.asarray(tasks)[divergence.prompt]
    present = [task for task in dict.fromkeys(tasks) if (labels == task).any()]
    return {task: divergence.select(labels == task) for task in present}
