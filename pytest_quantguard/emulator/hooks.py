"""Named points of the emulator where a fault can act.

A hook point is a list of functions, empty on a clean server; the code that owns the point does `if
hooks.point:` and nothing else. Faults append to these lists in `register`. A `Hooks` object is built for
one set of faults and not changed afterwards: to switch faults, an engine gets another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pytest_quantguard.emulator.batch import BatchEntry, ForwardBatch, Int32
from pytest_quantguard.emulator.formats.base import QuantizedTensor
from pytest_quantguard.emulator.linear import ActivationQuantizer
from pytest_quantguard.emulator.sequences import SequenceRequest, SequenceResult

Float32 = npt.NDArray[np.float32]

WeightHook = Callable[[Mapping[str, QuantizedTensor]], Mapping[str, QuantizedTensor]]
"""The quantized weights of one group of fused modules (q, k, v; gate, up; others alone) by module name ->
those used instead; the same object back means unchanged."""

ActivationHook = Callable[[str, ActivationQuantizer | None], ActivationQuantizer | None]
"""(module name, how its input is quantized) -> how it is quantized instead."""

LinearHook = Callable[[str, Float32, ForwardBatch], Float32]
"""(module name, values [rows, features], batch) -> values of the same shape; may change them in place. For
`lm_head` the batch's token ids and positions are those of the rows that have logits."""

KeyValueScaleHook = Callable[[int, ForwardBatch, "KeyValueScales"], "KeyValueScales"]
"""(layer, batch, scales) -> the scales that are used; they matter only where the cache is quantized."""

CacheReadHook = Callable[
    [int, ForwardBatch, tuple[BatchEntry, ...], Float32, Float32], tuple[Float32, Float32]
]
"""(layer, batch, entries, keys [entries, kv_heads, tokens, head_dim], values likewise) -> the pair that
is read.

The arrays are views of the cache: return changed copies, never write into them."""

AttentionHook = Callable[[int, ForwardBatch, Float32, Int32], None]
"""(layer, batch, array [sequences, kv_heads, group, queries, keys], query positions [sequences,
queries]): changes the array in place; used for the scores before the softmax and for its unnormalised
weights after it."""

PositionHook = Callable[[ForwardBatch, Int32], Int32]
"""(batch, int32 [rows]) -> the positions that the rotary embedding uses."""

LogitsHook = Callable[[Float32, ForwardBatch], Float32]
"""(logits [wanted rows, vocabulary], batch) -> the same shape, before the log-softmax."""

SelectHook = Callable[[Float32, tuple[int, ...]], Float32]
"""(logits [vocabulary], end-of-sequence tokens) -> a changed copy from which the next token is chosen;
what is reported stays."""

PrefixHook = Callable[[Float32, Float32], None]
"""(keys [layers, kv_heads, tokens, head_dim], values likewise) of a prefix-cache hit, to change in
place."""

StepHook = Callable[[ForwardBatch, float], None]
"""(batch, seconds that the forward pass took), after the pass."""

RequestHook = Callable[[SequenceRequest], SequenceRequest]
"""A request as the scheduler receives it -> the request that runs."""

ResultHook = Callable[[SequenceRequest, SequenceResult], SequenceResult]
"""(the request as it came, its result) -> the result that is answered."""

BatchResultHook = Callable[[list[SequenceResult]], list[SequenceResult]]
"""The results of one submitted batch, in the order of its requests -> the results that are answered."""


@dataclass(frozen=True, slots=True)
class KeyValueScales:
    """A cached value reads as store(value / write scale) * read scale.

    Each is a number or a float32 array [rows, 1, 1]; on a clean server write and read scales are the same.
    """

    k_write: Float32 | float
    k_read: Float32 | float
    v_write: Float32 | float
    v_read: Float32 | float


@dataclass(frozen=True, slots=True)
class WeightRule:
    """A weight hook and the modules that it can change, so that only those are read again when faults
    switch.

    concerns: takes a module name. hook: is called for every group that holds such a module.
    """

    concerns: Callable[[str], bool]
    hook: WeightHook


@dataclass(slots=True)
class Hooks:
    """The functions registered at each hook point, run in the order of registration."""

    weight: list[WeightRule] = field(default_factory=list)
    activation: list[ActivationHook] = field(default_factory=list)
    request: list[RequestHook] = field(default_factory=list)
    positions: list[PositionHook] = field(default_factory=list)
    linear_input: list[LinearHook] = field(default_factory=list)
    linear_output: list[LinearHook] = field(default_factory=list)
    kv_scale: list[KeyValueScaleHook] = field(default_factory=list)
    kv_read: list[CacheReadHook] = field(default_factory=list)
    prefix: list[PrefixHook] = field(default_factory=list)
    attention_scores: list[AttentionHook] = field(default_factory=list)
    attention_weights: list[AttentionHook] = field(default_factory=list)
    logits: list[LogitsHook] = field(default_factory=list)
    select: list[SelectHook] = field(default_factory=list)
    step: list[StepHook] = field(default_factory=list)
    result: list[ResultHook] = field(default_factory=list)
    batch_result: list[BatchResultHook] = field(default_factory=list)

    def apply_weights(self, group: Mapping[str, QuantizedTensor]) -> Mapping[str, QuantizedTensor]:
        """All weight rules that concern the group, one after the other: the `weight_hook` of a
        checkpoint."""
        for rule in self.weight:
            if any(map(rule.concerns, group)):
                group = rule.hook(group)
        return group
