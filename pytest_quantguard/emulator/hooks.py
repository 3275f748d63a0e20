"""Named points of the emulator where a fault can act.

A hook point is a list of functions, empty on a clean server; the code that owns the point does `if hooks.point:`
and nothing else. Faults append to these lists in `register`. A `Hooks` object is built for one set of faults and
not changed afterwards: to switch faults, an engine gets another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pytest_quantguard.emulator.batch import ForwardBatch, Int32

if TYPE_CHECKING:
    from pytest_quantguard.emulator.sequences import SequenceRequest, SequenceResult

Float32 = npt.NDArray[np.float32]

WeightHook = Callable[[str, Any], Any]
"""(module name, quantized tensor) -> quantized tensor, while a checkpoint is read."""

LinearHook = Callable[[str, Float32, ForwardBatch], Float32]
"""(module name, values [rows, features], batch) -> values of the same shape; may change them in place."""

KeyValueScaleHook = Callable[[int, ForwardBatch, Float32, Float32], tuple[Float32, Float32]]
"""(layer, batch, k_scale [rows], v_scale [rows]) -> the pair of scales, per row."""

KeyValueHook = Callable[[int, ForwardBatch, Float32, Float32], tuple[Float32, Float32]]
"""(layer, batch, keys [rows, kv_heads, head_dim], values of the same shape) -> the pair that is stored."""

CacheReadHook = Callable[[int, ForwardBatch, "Slots", Float32, Float32], tuple[Float32, Float32]]
"""(layer, batch, slots read, keys [sequences, kv_heads, tokens, head_dim], values likewise) -> the pair that is read.

The arrays are views of the cache: return changed copies, never write into them."""

AttentionHook = Callable[[int, ForwardBatch, Float32, Int32, Int32], Float32]
"""(layer, batch, array [sequences, kv_heads, queries, keys], query positions [sequences, queries], lengths) -> the
same shape; used for scores before the softmax and for the weights after it."""

PositionHook = Callable[[ForwardBatch], Int32]
"""(batch) -> int32 [rows], the positions that the rotary embedding uses."""

LogitsHook = Callable[[Float32, ForwardBatch], Float32]
"""(logits [wanted rows, vocabulary], batch) -> the same shape, before the log-softmax."""

SelectHook = Callable[[Float32], Float32]
"""(logits [sequences, vocabulary]) -> a changed copy from which the next token is chosen; what is reported stays."""

PrefixHook = Callable[[Float32, Float32], None]
"""(keys [layers, kv_heads, tokens, head_dim], values likewise) of a prefix-cache hit, to change in place."""

StepHook = Callable[[ForwardBatch, float], None]
"""(batch, seconds that the forward pass took), after the pass."""

RequestHook = Callable[["SequenceRequest"], "SequenceRequest"]
"""A request as the scheduler receives it -> the request that runs."""

ResultHook = Callable[["SequenceRequest", "SequenceResult"], "SequenceResult"]
"""(the request as it came, its result) -> the result that is answered."""

BatchResultHook = Callable[[list["SequenceResult"]], list["SequenceResult"]]
"""The results of one submitted batch, in the order of its requests -> the results that are answered."""


@dataclass(slots=True)
class Hooks:
    """The functions registered at each hook point, run in the order of registration."""

    weight: list[WeightHook] = field(default_factory=list)
    request: list[RequestHook] = field(default_factory=list)
    positions: list[PositionHook] = field(default_factory=list)
    linear_input: list[LinearHook] = field(default_factory=list)
    linear_output: list[LinearHook] = field(default_factory=list)
    kv_write_scale: list[KeyValueScaleHook] = field(default_factory=list)
    kv_write: list[KeyValueHook] = field(default_factory=list)
    kv_read: list[CacheReadHook] = field(default_factory=list)
    prefix: list[PrefixHook] = field(default_factory=list)
    attention_scores: list[AttentionHook] = field(default_factory=list)
    attention_weights: list[AttentionHook] = field(default_factory=list)
    logits: list[LogitsHook] = field(default_factory=list)
    select: list[SelectHook] = field(default_factory=list)
    step: list[StepHook] = field(default_factory=list)
    result: list[ResultHook] = field(default_factory=list)
    batch_result: list[BatchResultHook] = field(default_factory=list)

    def apply_weight(self, name: str, tensor: Any) -> Any:
        """All weight hooks, one after the other: the `weight_hook` of `load_checkpoint`."""
        for hook in self.weight:
            tensor = hook(name, tensor)
        return tensor
