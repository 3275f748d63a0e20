"""Linear layers that share an input, computed as one matrix product.

Knows nothing of what the layers mean; `model.py` groups q/k/v and gate/up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pytest_quantguard.emulator.batch import ForwardBatch
from pytest_quantguard.emulator.hooks import Float32, Hooks
from pytest_quantguard.emulator.linear import ActivationQuantizer, Linear
from pytest_quantguard.emulator.workers import Workers


@dataclass(frozen=True, slots=True)
class _Part:
    """One layer's columns of the fused output. sound: how it quantizes its input without hooks."""

    name: str
    columns: slice
    sound: ActivationQuantizer | None
    activation: ActivationQuantizer | None


class FusedLinear:
    """y = concatenation of quantize_i(x) @ W_i.T + b_i, float32, not rounded.

    One matrix product for all parts where they quantize their input alike; one per part where they do not.
    Rows whose input no hook changes come out bit for bit as without hooks: another grouping of the products
    would round differently, and a fault would seem to reach tokens that it does not touch.
    """

    def __init__(self, linears: Sequence[Linear], weight: Float32, hooks: Hooks, workers: Workers) -> None:
        """weight: float32 [sum of out_features, in_features], of which the layers' weights are row
        slices."""
        self.weight = weight
        self._workers = workers
        self._parts: list[_Part] = []
        start = 0
        for linear in linears:
            stop = start + linear.weight.shape[0]
            activation = linear.activation
            for hook in hooks.activation:
                activation = hook(linear.name, activation)
            self._parts.append(_Part(linear.name, slice(start, stop), linear.activation, activation))
            start = stop
        self.bias = _joined_bias(linears)
        self._uniform = all(part.sound == self._parts[0].sound for part in self._parts)
        self._hooked = bool(hooks.activation)

    @property
    def quantizes_input(self) -> bool:
        """Whether any part quantizes its input: with one scale per batch, rows then depend on each
        other."""
        return any(part.activation is not None for part in self._parts)

    @property
    def out_features(self) -> int:
        """Columns of the output over all parts."""
        return int(self.weight.shape[0])

    def __call__(self, x: Float32, out: Float32, batch: ForwardBatch, hooks: Hooks) -> None:
        """x: float32 [rows, in_features] (not changed) -> out: float32 [rows, out_features]."""
        groups = [(slice(None), self._parts[0].sound)] if self._uniform else self._separate()
        inputs = [x if sound is None else sound(x) for _, sound in groups]
        for (columns, _), values in zip(groups, inputs, strict=True):
            self._workers.multiply(values, self.weight[columns], out[:, columns])
        if hooks.linear_input or self._hooked:
            for index, part in enumerate(self._parts):
                self._redo(part, x, inputs[0 if self._uniform else index], out, batch, hooks)
        if self.bias is not None:
            out += self.bias
        if hooks.linear_output:
            for part in self._parts:
                for hook in hooks.linear_output:
                    out[:, part.columns] = hook(part.name, out[:, part.columns], batch)

    def _separate(self) -> list[tuple[slice, ActivationQuantizer | None]]:
        return [(part.columns, part.sound) for part in self._parts]

    def _redo(
        self, part: _Part, x: Float32, sound: Float32, out: Float32, batch: ForwardBatch, hooks: Hooks
    ) -> None:
        """Compute the rows of one part anew whose input differs from the sound one."""
        inputs = x.copy()
        for hook in hooks.linear_input:
            inputs = hook(part.name, inputs, batch)
        if part.activation is not None:
            inputs = part.activation(inputs)
        changed = np.flatnonzero((inputs != sound).any(axis=1))
        if len(changed):
            out[changed, part.columns] = inputs[changed] @ self.weight[part.columns].T


def _joined_bias(linears: Sequence[Linear]) -> Float32 | None:
    if all(linear.bias is None for linear in linears):
        return None
    return np.concatenate(
        [
            np.zeros(len(linear.weight), np.float32) if linear.bias is None else linear.bias
            for linear in linears
        ]
    )
