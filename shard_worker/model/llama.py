"""The Llama family over a layer range: Llama, Mistral, SmolLM2; Qwen2 is the same with biases on Q, K and V.

Q, K and V are one product, gate and up another. A stage holds its own layers only; the first stage has the
embedding too, the last the final norm and the head, which may be the embedding again.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shard_worker.attention.interface import LayerKv, StepAttention
from shard_worker.model.config import inverse_frequencies
from shard_worker.model.layers import Linear, Precision, linear, rms_norm, rotation
from shard_worker.weights import Checkpoint

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: torch.Tensor  # float32, as the other norms
    qkv: Linear
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Head:
    norm: torch.Tensor
    linear: Linear


class LlamaStage:
    """Layers [first_layer, end_layer), with the embedding and the head where the range touches the ends."""

    def __init__(
        self, checkpoint: Checkpoint, first_layer: int, end_layer: int, precision: Precision
    ) -> None:
        """Raises LoadFailed."""
        config = checkpoint.config
        self.config, self.precision = config, precision
        self._frequencies = torch.tensor(inverse_frequencies(config), dtype=torch.float32)
        shape = (config.vocab_size, config.hidden_size)
        last = end_layer == config.num_layers
        embedding = None
        if first_layer == 0 or (last and config.tied_head):
            embedding = checkpoint.tensor(EMBEDDING, shape).to(precision.dtype)
        self.embedding = embedding if first_layer == 0 else None
        self.layers = [_layer(checkpoint, i, precision) for i in range(first_layer, end_layer)]
        self.head: Head | None = None
        if last:
            weight = embedding if config.tied_head else checkpoint.tensor(HEAD, shape)
            assert weight is not None
            norm = checkpoint.tensor(FINAL_NORM, (config.hidden_size,)).float()
            self.head = Head(norm, linear(weight, None, precision))

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] ids to [T, hidden_size]."""
        assert self.embedding is not None
        return F.embedding(token_ids, self.embedding).to(self.precision.compute)

    def run_layers(
        self, hidden: torch.Tensor, positions: torch.Tensor, attention: StepAttention, kv: list[LayerKv]
    ) -> torch.Tensor:
        """[T, hidden_size] to the same, through this stage's layers; may overwrite its argument."""
        config = self.config
        num_tokens = hidden.shape[0]
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        rotate = rotation(positions, self._frequencies, hidden.dtype)
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            qkv = layer.qkv(rms_norm(hidden, layer.attention_norm, config.rms_eps))
            qkv = qkv.view(num_tokens, heads + 2 * kv_heads, head_dim)
            rotated = rotate(qkv[:, : heads + kv_heads])
            mixed = attention.attend(
                rotated[:, :heads], rotated[:, heads:], qkv[:, heads + kv_heads :], layer_kv
            )
            hidden = hidden + layer.out(mixed)
            gate_up = layer.gate_up(rms_norm(hidden, layer.mlp_norm, config.rms_eps))
            gate, up = gate_up.chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate).mul_(up))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[k, hidden_size] to [k, vocab_size]."""
        assert self.head is not None
        return self.head.linear(rms_norm(hidden, self.head.norm, self.config.rms_eps))


def _layer(checkpoint: Checkpoint, index: int, precision: Precision) -> Layer:
    config = checkpoint.config
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    prefix = f"model.layers.{index}."

    def stacked(names: list[tuple[str, int]], inputs: int, biased: bool) -> Linear:
        """One linear map out of several with the same input."""
        weights = [checkpoint.tensor(f"{prefix}{n}.weight", (size, inputs)) for n, size in names]
        bias = None
        if biased:
            bias = torch.cat([checkpoint.tensor(f"{prefix}{n}.bias", (size,)) for n, size in names])
        return linear(weights[0] if len(weights) == 1 else torch.cat(weights), bias, precision)

    def norm(name: str) -> torch.Tensor:
        return checkpoint.tensor(f"{prefix}{name}.weight", (hidden,)).float()

    return Layer(
        attention_norm=norm("input_layernorm"),
        qkv=stacked(
            [("self_attn.q_proj", q_size), ("self_attn.k_proj", kv_size), ("self_attn.v_proj", kv_size)],
            hidden,
            config.qkv_bias,
        ),
        out=stacked([("self_attn.o_proj", hidden)], q_size, config.out_bias),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=stacked([("mlp.gate_proj", inner), ("mlp.up_proj", inner)], hidden, config.mlp_bias),
        down=stacked([("mlp.down_proj", hidden)], inner, config.mlp_bias),
    )
