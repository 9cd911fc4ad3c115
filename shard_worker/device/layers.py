"""A stage's weights on a device and what its layers compute there: `TorchStage`'s formulas, in the device's
types.

Weights, activations and KV are of one type; norms and rotations are calculated in float32. What a
checkpoint or `quantize` holds in packed integers is expanded to that type: the numbers are the quantised
ones, the memory is not. Nothing here waits for the device or looks at a number, so that all of it can be
recorded; sums over ranks are put into the same order of work.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shard_worker.attention.interface import LayerKv, StepAttention
from shard_worker.formats import BITS, OUTSIDE_BITS_MIN, prepared
from shard_worker.model import stage_weights
from shard_worker.model.layers import Rotation, rms_norm, rotation
from shard_worker.model.stage import Total
from shard_worker.model.stage_weights import (
    F32,
    Activation,
    LayerWeights,
    Rope,
    StageWeights,
    StoredMatrix,
)
from shard_worker.model.stored_tensors import tensor_of


@dataclass(frozen=True, slots=True)
class Map:
    """y = x W^T + b"""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Layer:
    rope: int  # among the stage's different ropes
    window: int | None
    attention_norm: torch.Tensor
    qkv: Map
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Map
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Map
    down: Map
    post_mlp_norm: torch.Tensor | None


class Mover:
    """Takes numbers to the device, one matrix after another; a tied one goes once."""

    def __init__(self, device: torch.device, dtype: torch.dtype, quantize: str) -> None:
        self._device, self._dtype, self._quantize = device, dtype, quantize
        self._moved: dict[int, torch.Tensor] = {}  # matrices by identity

    def matrix(self, matrix: StoredMatrix, min_bits: int = 4) -> torch.Tensor:
        """Raises LoadFailed on weights that can't be quantised."""
        known = self._moved.get(id(matrix))
        if known is None:
            held = matrix
            if self._quantize in BITS:
                held = prepared(matrix, "float32", self._quantize, min_bits)
            known = tensor_of(held).to(self._device).to(self._dtype)
            self._moved[id(matrix)] = known
        return known

    def map(self, linear: stage_weights.Linear, min_bits: int = 4) -> Map:
        bias = None if linear.bias is None else self.vector(linear.bias).to(self._dtype)
        if len(linear.matrices) == 1:
            return Map(self.matrix(linear.matrices[0], min_bits), bias)
        whole = torch.empty((linear.outputs, linear.inputs), dtype=self._dtype, device=self._device)
        row = 0
        for matrix in linear.matrices:
            whole[row : row + matrix.outputs] = self.matrix(matrix, min_bits)
            row += matrix.outputs
            self._moved.pop(id(matrix), None)
        return Map(whole, bias)

    def vector(self, values: F32) -> torch.Tensor:
        """float32, as norms and frequencies are used."""
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def norm(self, values: F32 | None) -> torch.Tensor | None:
        return None if values is None else self.vector(values)


class DeviceLayers:
    """[T] tokens at a time; hidden is [T, hidden_size] of `dtype`."""

    def __init__(
        self,
        weights: StageWeights,
        dtype: torch.dtype,
        device: torch.device,
        quantize: str,
        total: Total | None = None,
    ) -> None:
        """`total`: where the weights are one rank's, over all of them. Raises LoadFailed."""
        self._total = total
        self.weights, self.dtype, self.device = weights, dtype, device
        move = Mover(device, dtype, quantize)
        self._ropes: list[Rope] = []
        self._layers = [self._layer(layer, move) for layer in weights.layers]
        self._frequencies = [move.vector(rope.frequencies) for rope in self._ropes]
        self._embedding: torch.Tensor | None = None
        if weights.embedding is not None:
            self._embedding = move.matrix(weights.embedding, OUTSIDE_BITS_MIN)
        self._head: Map | None = None
        if weights.head is not None:
            self._head_norm = move.vector(weights.head.norm)
            self._head = move.map(weights.head.linear, OUTSIDE_BITS_MIN)

    def _layer(self, layer: LayerWeights, move: Mover) -> Layer:
        if not any(rope is layer.rope for rope in self._ropes):
            self._ropes.append(layer.rope)
        return Layer(
            rope=next(i for i, rope in enumerate(self._ropes) if rope is layer.rope),
            window=layer.window,
            attention_norm=move.vector(layer.attention_norm),
            qkv=move.map(layer.qkv),
            q_norm=move.norm(layer.q_norm),
            k_norm=move.norm(layer.k_norm),
            out=move.map(layer.out),
            post_attention_norm=move.norm(layer.post_attention_norm),
            mlp_norm=move.vector(layer.mlp_norm),
            gate_up=move.map(layer.gate_up),
            down=move.map(layer.down),
            post_mlp_norm=move.norm(layer.post_mlp_norm),
        )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] int32; on the first stage."""
        assert self._embedding is not None
        hidden = F.embedding(token_ids, self._embedding)
        return hidden if self.weights.embedding_scale == 1.0 else hidden * self.weights.embedding_scale

    def through(
        self, hidden: torch.Tensor, positions: torch.Tensor, step: StepAttention, kv: Sequence[LayerKv]
    ) -> torch.Tensor:
        """All layers. Writes the step's keys and values."""
        weights, eps = self.weights, self.weights.rms_eps
        num_tokens, both = hidden.shape[0], weights.num_heads + weights.num_kv_heads
        rotations = [
            rotation(positions, frequencies, torch.float32, rope.scale)
            for rope, frequencies in zip(self._ropes, self._frequencies, strict=True)
        ]
        for layer, pages in zip(self._layers, kv, strict=True):
            qkv = layer.qkv(rms_norm(hidden, layer.attention_norm, eps))
            qkv = qkv.view(num_tokens, both + weights.num_kv_heads, weights.head_dim)
            q, k = self._rotated(layer, qkv, rotations[layer.rope])
            mixed = step.attend(
                q,
                k,
                qkv[:, both:],
                pages,
                scale=weights.score_scale,
                softcap=weights.attention_softcap,
                window=layer.window,
            )
            mixed = self._of_all(layer.out(mixed))
            if layer.post_attention_norm is not None:
                mixed = rms_norm(mixed, layer.post_attention_norm, eps)
            hidden = hidden + mixed
            gate, up = layer.gate_up(rms_norm(hidden, layer.mlp_norm, eps)).chunk(2, dim=-1)
            inner = self._of_all(layer.down(self._activated(gate) * up))
            if layer.post_mlp_norm is not None:
                inner = rms_norm(inner, layer.post_mlp_norm, eps)
            hidden = hidden + inner
        return hidden

    def _of_all(self, added: torch.Tensor) -> torch.Tensor:
        """What the layer adds, of what this rank does."""
        if self._total is None:
            return added
        return self._total(added.float().contiguous()).to(self.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[k, vocab_size] float32, on the last stage."""
        head = self.weights.head
        assert head is not None and self._head is not None
        logits = self._head(rms_norm(hidden, self._head_norm, self.weights.rms_eps)).float()
        return torch.tanh(logits / head.softcap) * head.softcap if head.softcap else logits

    def _rotated(
        self, layer: Layer, qkv: torch.Tensor, rotate: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads, both = self.weights.num_heads, self.weights.num_heads + self.weights.num_kv_heads
        eps = self.weights.rms_eps
        if layer.q_norm is None or layer.k_norm is None:
            rotated = rotate(qkv[:, :both].float()).to(self.dtype)
            return rotated[:, :heads], rotated[:, heads:]
        q = rms_norm(qkv[:, :heads].float(), layer.q_norm, eps)
        k = rms_norm(qkv[:, heads:both].float(), layer.k_norm, eps)
        return rotate(q).to(self.dtype), rotate(k).to(self.dtype)

    def _activated(self, gate: torch.Tensor) -> torch.Tensor:
        match self.weights.activation:
            case Activation.SILU:
                return F.silu(gate)
            case Activation.GELU_TANH:
                return F.gelu(gate, approximate="tanh")
