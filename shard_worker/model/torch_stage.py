"""Any family's layers in plain torch: runs wherever torch does, and says what every other stage must give.

`dtype` of the precision is what weights and activations between stages are stored in. Where it is calculated
in a wider type, hidden states are rounded to it after every layer, so that no number depends on where the
model is cut into stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from shard_worker.attention.interface import Attention
from shard_worker.executor import I64, StepInputs
from shard_worker.model import stage_weights
from shard_worker.model.layers import Linear, Precision, Rotation, linear, rms_norm, rotation
from shard_worker.model.stage import NO_BYTES, StageMemory, Total
from shard_worker.model.stage_weights import F32, Activation, LayerWeights, Rope, StageWeights
from shard_worker.model.stored_tensors import tensor_of


@dataclass(frozen=True, slots=True)
class _Layer:
    weights: LayerWeights
    rope_index: int  # among the stage's different ropes
    attention_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Linear
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    post_mlp_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Head:
    norm: torch.Tensor
    linear: Linear
    softcap: float


class TorchStage:
    def __init__(
        self, weights: StageWeights, precision: Precision, attention: Attention, total: Total | None = None
    ) -> None:
        """`total`: where the weights are one rank's, over all of them."""
        self.weights, self.precision, self._attention = weights, precision, attention
        self._total = total
        self._ropes: list[Rope] = []
        self._frequencies: list[torch.Tensor] = []
        self._embedding: torch.Tensor | None = None
        if weights.embedding is not None:
            self._embedding = tensor_of(weights.embedding).to(precision.dtype)
        self._layers = [self._layer(layer) for layer in weights.layers]
        self._head: _Head | None = None
        if weights.head is not None:
            norm = torch.from_numpy(weights.head.norm)
            self._head = _Head(norm, self._head_linear(weights.head), weights.head.softcap)
        self._memory: StageMemory | None = None
        self._hidden = torch.empty(0)

    def _head_linear(self, head: stage_weights.HeadWeights) -> Linear:
        if self._embedding is not None and head.linear.matrices == (self.weights.embedding,):
            return linear(self._embedding, None, self.precision)  # tied: converted once
        return self._linear(head.linear)

    def _linear(self, stored: stage_weights.Linear) -> Linear:
        parts = [tensor_of(matrix).to(self.precision.dtype) for matrix in stored.matrices]
        bias = None if stored.bias is None else torch.from_numpy(stored.bias)
        return linear(parts[0] if len(parts) == 1 else torch.cat(parts), bias, self.precision)

    def _layer(self, layer: LayerWeights) -> _Layer:
        return _Layer(
            weights=layer,
            rope_index=self._rope_index(layer.rope),
            attention_norm=torch.from_numpy(layer.attention_norm),
            qkv=self._linear(layer.qkv),
            q_norm=_norm(layer.q_norm),
            k_norm=_norm(layer.k_norm),
            out=self._linear(layer.out),
            post_attention_norm=_norm(layer.post_attention_norm),
            mlp_norm=torch.from_numpy(layer.mlp_norm),
            gate_up=self._linear(layer.gate_up),
            down=self._linear(layer.down),
            post_mlp_norm=_norm(layer.post_mlp_norm),
        )

    def _rope_index(self, rope: Rope) -> int:
        for i, known in enumerate(self._ropes):
            if known is rope:
                return i
        self._ropes.append(rope)
        self._frequencies.append(torch.from_numpy(rope.frequencies))
        return len(self._ropes) - 1

    # ---- a step ------------------------------------------------------------------------------------------

    def attach(self, memory: StageMemory) -> None:
        assert len(memory.kv) == len(self._layers)
        self._memory = memory
        row_bytes = self.weights.hidden_size * self.precision.dtype.itemsize
        self._received = torch.empty(memory.step_tokens_max * row_bytes, dtype=torch.uint8)
        self._sent = torch.empty(memory.step_tokens_max * row_bytes, dtype=torch.uint8)

    def release(self) -> None:
        self._memory = None

    def run(self, inputs: StepInputs, activations: memoryview, wanted: I64 | None = None) -> memoryview:
        assert self._memory is not None, "run before attach"
        with torch.inference_mode():
            hidden = self._layers_over(self._hidden_in(inputs, activations), inputs, self._memory)
            if self._head is not None:
                self._hidden = hidden
                return NO_BYTES
            return self._hidden_out(hidden)

    def logits(self, tokens: I64) -> torch.Tensor:
        head = self._head
        assert head is not None
        with torch.inference_mode():
            hidden = self._hidden.index_select(0, torch.from_numpy(tokens))
            logits = head.linear(rms_norm(hidden, head.norm, self.weights.rms_eps))
            if head.softcap:
                logits = torch.tanh(logits / head.softcap) * head.softcap
            return logits

    def _hidden_in(self, inputs: StepInputs, activations: memoryview) -> torch.Tensor:
        compute, dtype = self.precision.compute, self.precision.dtype
        num_tokens = len(inputs.token_ids)
        if self._embedding is not None:
            assert int(inputs.token_ids.max()) < self.weights.vocab_size
            ids = torch.from_numpy(inputs.token_ids.astype(np.int64))
            hidden = F.embedding(ids, self._embedding).to(compute)
            if self.weights.embedding_scale != 1.0:
                hidden = hidden * self.weights.embedding_scale
            return hidden
        num_bytes = num_tokens * self.weights.hidden_size * dtype.itemsize
        assert activations.nbytes == num_bytes
        self._received.numpy()[:num_bytes] = np.frombuffer(activations, np.uint8)
        return self._received[:num_bytes].view(dtype).view(num_tokens, -1).to(compute)

    def _hidden_out(self, hidden: torch.Tensor) -> memoryview:
        dtype = self.precision.dtype
        sent = self._sent[: hidden.numel() * dtype.itemsize]
        sent.view(dtype).view(hidden.shape).copy_(hidden)
        return sent.numpy().data

    def _layers_over(self, hidden: torch.Tensor, inputs: StepInputs, memory: StageMemory) -> torch.Tensor:
        weights, eps = self.weights, self.weights.rms_eps
        num_tokens, heads, kv_heads = hidden.shape[0], weights.num_heads, weights.num_kv_heads
        step = self._attention.step(inputs, memory.block_size_tokens)
        rotations = self._rotations(torch.from_numpy(inputs.positions))
        for layer, kv in zip(self._layers, memory.kv, strict=True):
            qkv = layer.qkv(rms_norm(hidden, layer.attention_norm, eps))
            qkv = qkv.view(num_tokens, heads + 2 * kv_heads, weights.head_dim)
            q, k = self._rotated(layer, qkv, rotations[layer.rope_index])
            mixed = step.attend(
                q,
                k,
                qkv[:, heads + kv_heads :],
                kv,
                scale=weights.score_scale,
                softcap=weights.attention_softcap,
                window=layer.weights.window,
            )
            mixed = self._of_all(layer.out(mixed))
            if layer.post_attention_norm is not None:
                mixed = rms_norm(mixed, layer.post_attention_norm, eps)
            hidden = hidden + mixed
            gate, up = layer.gate_up(rms_norm(hidden, layer.mlp_norm, eps)).chunk(2, dim=-1)
            inner = self._of_all(layer.down(_activated(gate, weights.activation).mul_(up)))
            if layer.post_mlp_norm is not None:
                inner = rms_norm(inner, layer.post_mlp_norm, eps)
            hidden = self._rounded(hidden + inner)
        return hidden

    def _of_all(self, added: torch.Tensor) -> torch.Tensor:
        """What the layer adds, of what this rank does."""
        if self._total is None:
            return added
        return self._total(added.float().contiguous()).to(added.dtype)

    def _rotations(self, positions: torch.Tensor) -> Sequence[Rotation]:
        return [
            rotation(positions, frequencies, self.precision.compute, rope.scale)
            for rope, frequencies in zip(self._ropes, self._frequencies, strict=True)
        ]

    def _rotated(
        self, layer: _Layer, qkv: torch.Tensor, rotate: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads, both = self.weights.num_heads, self.weights.num_heads + self.weights.num_kv_heads
        eps = self.weights.rms_eps
        if layer.q_norm is None or layer.k_norm is None:
            rotated = rotate(qkv[:, :both])
            return rotated[:, :heads], rotated[:, heads:]
        q = rms_norm(qkv[:, :heads], layer.q_norm, eps)
        return rotate(q), rotate(rms_norm(qkv[:, heads:both], layer.k_norm, eps))

    def _rounded(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.precision.dtype == self.precision.compute:
            return hidden
        return hidden.to(self.precision.dtype).to(self.precision.compute)


def _norm(weight: F32 | None) -> torch.Tensor | None:
    return None if weight is None else torch.from_numpy(weight)


def _activated(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    match activation:
        case Activation.SILU:
            return F.silu(gate)
        case Activation.GELU_TANH:
            return F.gelu(gate, approximate="tanh")
