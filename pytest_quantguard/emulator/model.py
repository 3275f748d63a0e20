"""The forward pass of a Llama-family decoder: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

All arithmetic is float32. With the compute type bfloat16, results are rounded to BF16 where a BF16
server's kernels write them to memory: after every linear layer, after q/k norm and the rotary embedding,
after attention, after the residual sum, after each norm, and after silu(gate) * up, whose inside stays
float32. Logits are rounded too; what follows (log-softmax) is float32. Not here: scheduling (engine.py),
choosing tokens (sampling.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pytest_quantguard.emulator.attention import Attention, DecodeRun, decode_runs
from pytest_quantguard.emulator.batch import ForwardBatch, Int32, Int64
from pytest_quantguard.emulator.checkpoint import Checkpoint
from pytest_quantguard.emulator.formats.kv_cache import KV_CACHE_FORMATS
from pytest_quantguard.emulator.formats.rounding import round_bfloat16
from pytest_quantguard.emulator.fused import FusedLinear
from pytest_quantguard.emulator.hooks import Float32, Hooks, KeyValueScales
from pytest_quantguard.emulator.layout import EMBEDDING, LM_HEAD
from pytest_quantguard.emulator.workers import Workers

_MLP_ROWS = 1024


@dataclass(frozen=True, slots=True)
class _Layer:
    """The parts of one decoder layer."""

    input_norm: Float32
    qkv: FusedLinear
    query_norm: Float32 | None
    key_norm: Float32 | None
    output: FusedLinear
    mlp_norm: Float32
    gate_up: FusedLinear
    down: FusedLinear
    k_scale: float
    v_scale: float


class Model:
    """A checkpoint, ready to run. Used by one thread at a time."""

    def __init__(self, checkpoint: Checkpoint, *, threads: int = 1, hooks: Hooks | None = None) -> None:
        """threads: that compute, see `threads.claim_threads`. hooks: those under which the checkpoint was
        loaded."""
        self.config = checkpoint.config
        self.checkpoint = checkpoint
        self.kv_format = KV_CACHE_FORMATS[checkpoint.kv_cache_format]
        self._hooks = hooks or Hooks()
        self._workers = Workers(threads)
        self._round = round_in_place if checkpoint.dtype == "bfloat16" else None
        config = self.config
        self._attention = Attention(
            config.num_heads, config.num_kv_heads, config.head_dim, self._round, self._workers
        )
        self._frequencies = config.rotary_inverse_frequencies()
        self._buffers: dict[str, Float32] = {}
        self._build()

    def _build(self) -> None:
        tensors, config = self.checkpoint.tensors, self.config
        self._embedding = tensors[EMBEDDING]
        self._final_norm = tensors["model.norm"]
        self._lm_head = self._fuse([LM_HEAD])
        self._layers = []
        for index in range(config.num_layers):
            prefix = f"model.layers.{index}"
            attention = f"{prefix}.self_attn"
            k_scale, v_scale = self.checkpoint.kv_scales[index]
            self._layers.append(
                _Layer(
                    input_norm=tensors[f"{prefix}.input_layernorm"],
                    qkv=self._fuse([f"{attention}.{name}_proj" for name in "qkv"]),
                    query_norm=tensors.get(f"{attention}.q_norm"),
                    key_norm=tensors.get(f"{attention}.k_norm"),
                    output=self._fuse([f"{attention}.o_proj"]),
                    mlp_norm=tensors[f"{prefix}.post_attention_layernorm"],
                    gate_up=self._fuse([f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"]),
                    down=self._fuse([f"{prefix}.mlp.down_proj"]),
                    k_scale=k_scale,
                    v_scale=v_scale,
                )
            )

    def _fuse(self, names: Sequence[str]) -> FusedLinear:
        linears = [self.checkpoint.linears[name] for name in names]
        weight = self.checkpoint.fused[tuple(names)] if len(names) > 1 else linears[0].weight
        return FusedLinear(linears, weight, self._hooks, self._workers)

    @property
    def hooks(self) -> Hooks:
        """The hooks in force."""
        return self._hooks

    @property
    def formats(self) -> dict[str, str]:
        """The format of every linear layer by name, and the cache's by "kv_cache": what
        `Fault.applies_to` asks for."""
        formats = {name: linear.format for name, linear in self.checkpoint.linears.items()}
        return {**formats, "kv_cache": self.kv_format.name}

    def switch_hooks(self, hooks: Hooks) -> None:
        """Compute under other hooks from now on; weights that either set of hooks changes are read
        again."""
        concerned = [
            name
            for name in self.checkpoint.linears
            if any(rule.concerns(name) for rule in (*self._hooks.weight, *hooks.weight))
        ]
        if concerned:
            try:
                self.checkpoint.reload(concerned, hooks.apply_weights)
            except Exception:
                self.checkpoint.reload(concerned, self._hooks.apply_weights)
                raise
        self._hooks = hooks
        self._build()

    def forward(self, batch: ForwardBatch) -> Float32:
        """Run the decoder and store keys and values; float32 [logit_rows, hidden_size], after the final
        norm.

        The entries' slots must have room; their lengths are the caller's to update.
        """
        rows = batch.rows
        residual = self._buffer("residual", rows, self.config.hidden_size)
        hidden = self._buffer("hidden", rows, self.config.hidden_size)
        np.take(self._embedding, batch.token_ids, axis=0, out=residual, mode="clip")
        rotary = self._rotary(batch)
        runs = decode_runs(batch) if batch.phase == "decode" else []
        self._norm(residual, None, self._layers[0].input_norm, hidden)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            branch = self._attend(index, layer, batch, hidden, rotary, runs)
            self._norm(residual, branch, layer.mlp_norm, hidden)
            branch = self._mlp(layer, batch, hidden)
            if index < last:
                self._norm(residual, branch, self._layers[index + 1].input_norm, hidden)
        wanted = batch.logit_rows
        final = np.empty((len(wanted), self.config.hidden_size), np.float32)
        self._norm(residual[wanted], branch[wanted], self._final_norm, final)
        return final

    def logits(self, hidden: Float32, batch: ForwardBatch, rows: Int64) -> Float32:
        """float32 [len(rows), vocab_size], a buffer that the next call overwrites.

        hidden: float32 [len(rows), hidden_size], what `forward` gave for these rows of the batch.
        """
        logits = self._buffer("logits", len(hidden), self._lm_head.out_features)
        batch = replace(batch, token_ids=batch.token_ids[rows], positions=batch.positions[rows])
        self._lm_head(hidden, logits, batch, self._hooks)
        if self._round is not None:
            self._workers.each_block(len(hidden), lambda part: round_in_place(logits[part]))
        for hook in self._hooks.logits:
            logits = hook(logits, batch)
        return logits

    def close(self) -> None:
        """End the worker threads."""
        self._workers.close()

    def _buffer(self, name: str, rows: int, columns: int) -> Float32:
        """float32 [rows, columns], uninitialised, reused from pass to pass."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < rows * columns:
            buffer = self._buffers[name] = np.empty(rows * columns, np.float32)
        return buffer[: rows * columns].reshape(rows, columns)

    def _norm(self, residual: Float32, branch: Float32 | None, weight: Float32, out: Float32) -> None:
        """residual += branch, then out = RMSNorm(residual) * weight; the norm sees the sum before it is
        rounded."""
        epsilon, round_ = np.float32(self.config.rms_norm_eps), self._round

        def work(rows: slice) -> None:
            total, normed = residual[rows], out[rows]
            if branch is not None:
                if round_ is not None:
                    round_(branch[rows])
                total += branch[rows]
            square = np.einsum("ij,ij->i", total, total) / np.float32(total.shape[1])
            np.multiply(total, (1.0 / np.sqrt(square + epsilon))[:, None], out=normed)
            normed *= weight
            if round_ is not None:
                round_(total)
                round_(normed)

        self._workers.each_block(len(residual), work)

    def _rotary(self, batch: ForwardBatch) -> tuple[Float32, Float32]:
        """cos and sin, float32 [rows, 1, head_dim / 2]."""
        positions: Int32 = batch.positions
        for hook in self._hooks.positions:
            positions = hook(batch, positions)
        angles = positions.astype(np.float32)[:, None, None] * self._frequencies
        return np.cos(angles), np.sin(angles)

    def _attend(
        self,
        index: int,
        layer: _Layer,
        batch: ForwardBatch,
        hidden: Float32,
        rotary: tuple[Float32, Float32],
        runs: list[DecodeRun],
    ) -> Float32:
        """The attention branch of a layer, before rounding: float32 [rows, hidden_size]."""
        config, rows = self.config, batch.rows
        query_width = config.num_heads * config.head_dim
        qkv = self._buffer("qkv", rows, layer.qkv.out_features)
        layer.qkv(hidden, qkv, batch, self._hooks)
        self._workers.each_block(rows, lambda part: self._prepare(layer, qkv[part], rotary, part))
        key_values = qkv[:, query_width:].reshape(rows, 2, config.num_kv_heads, config.head_dim)
        self._store(index, layer, batch, key_values[:, 0], key_values[:, 1], runs)
        attended = self._buffer("attended", rows, query_width)
        if batch.phase == "decode":
            self._attention.decode(index, batch, runs, qkv[:, :query_width], attended, self._hooks)
        else:
            self._attention.prefill(index, batch, qkv[:, :query_width], attended, self._hooks)
        if self._round is not None:
            self._workers.each_block(rows, lambda part: round_in_place(attended[part]))
        branch = self._buffer("branch", rows, config.hidden_size)
        layer.output(attended, branch, batch, self._hooks)
        return branch

    def _prepare(self, layer: _Layer, qkv: Float32, rotary: tuple[Float32, Float32], rows: slice) -> None:
        """Round q, k and v, norm q and k where the model does, rotate them; in place."""
        config = self.config
        if self._round is not None:
            self._round(qkv)
        heads = config.num_heads + config.num_kv_heads
        rotated = qkv[:, : heads * config.head_dim].reshape(len(qkv), heads, config.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            self._head_norm(rotated[:, : config.num_heads], layer.query_norm)
            self._head_norm(rotated[:, config.num_heads :], layer.key_norm)
        cosine, sine = rotary[0][rows], rotary[1][rows]
        half = config.head_dim // 2
        first, second = rotated[..., :half], rotated[..., half:]
        turned = first * cosine
        turned -= second * sine
        second *= cosine
        second += first * sine
        first[...] = turned
        if self._round is not None:
            self._round(rotated)

    def _head_norm(self, heads: Float32, weight: Float32) -> None:
        """RMSNorm of each head, in place. heads: float32 [rows, heads, head_dim]."""
        square = np.einsum("ijk,ijk->ij", heads, heads) / np.float32(heads.shape[2])
        heads *= (1.0 / np.sqrt(square + np.float32(self.config.rms_norm_eps)))[..., None]
        heads *= weight
        if self._round is not None:
            self._round(heads)

    def _store(
        self,
        index: int,
        layer: _Layer,
        batch: ForwardBatch,
        keys: Float32,
        values: Float32,
        runs: list[DecodeRun],
    ) -> None:
        """Write keys and values [rows, kv_heads, head_dim] into the slots, as the cache's format keeps
        them."""
        scales = KeyValueScales(layer.k_scale, layer.k_scale, layer.v_scale, layer.v_scale)
        for hook in self._hooks.kv_scale:
            scales = hook(index, batch, scales)
        keys = self.kv_format.load(self.kv_format.store(keys, scales.k_write), scales.k_read)
        values = self.kv_format.load(self.kv_format.store(values, scales.v_write), scales.v_read)
        if batch.phase == "decode":
            for run in runs:
                slots, positions = range(run.slots.start, run.slots.stop), batch.positions[run.rows]
                run.pool.keys[index][slots, :, positions] = keys[run.rows]
                run.pool.values[index][slots, :, positions] = values[run.rows]
            return
        for entry in batch.entries:
            rows = slice(entry.row_start, entry.row_stop)
            place = slice(entry.context_length, entry.length)
            entry.slot.pool.keys[index, entry.slot.index, :, place] = keys[rows].transpose(1, 0, 2)
            entry.slot.pool.values[index, entry.slot.index, :, place] = values[rows].transpose(1, 0, 2)

    def _mlp(self, layer: _Layer, batch: ForwardBatch, hidden: Float32) -> Float32:
        """The MLP branch of a layer, before rounding: float32 [rows, hidden_size]."""
        branch = self._buffer("branch", batch.rows, self.config.hidden_size)
        # Parts bound the size of the widest buffers; hooks and quantizers of linear layers see whole batches.
        whole = layer.gate_up.quantizes_input or layer.down.quantizes_input
        whole = whole or bool(self._hooks.linear_input or self._hooks.linear_output)
        step = batch.rows if whole else _MLP_ROWS
        for start in range(0, batch.rows, step):
            part = slice(start, min(start + step, batch.rows))
            rows = part.stop - part.start
            gate_up = self._buffer("gate_up", rows, layer.gate_up.out_features)
            layer.gate_up(hidden[part], gate_up, batch, self._hooks)
            active = self._buffer("active", rows, layer.gate_up.out_features // 2)
            self._activate(gate_up, active)
            layer.down(active, branch[part], batch, self._hooks)
        return branch

    def _activate(self, gate_up: Float32, out: Float32) -> None:
        """out = silu(gate) * up."""
        width, round_ = out.shape[1], self._round

        def work(rows: slice) -> None:
            both, product = gate_up[rows], out[rows]
            if round_ is not None:
                round_(both)
            gate, up = both[:, :width], both[:, width:]
            np.negative(gate, out=product)
            np.exp(product, out=product)
            product += np.float32(1.0)
            np.divide(gate, product, out=product)
            product *= up
            if round_ is not None:
                round_(product)

        self._workers.each_block(len(out), work)


def round_in_place(x: Float32) -> None:
    """Round x to BF16, in place."""
    round_bfloat16(x, out=x)
