"""From a checkpoint to what a stage computes: which file knows a family's layers, and what all share.

A stage holds its own layers only; the first has the embedding too, the last the final norm and the head,
which may be the embedding again.
"""

import numpy as np

from shard_worker.model import llama
from shard_worker.model.config import inverse_frequencies
from shard_worker.model.stage_weights import HeadWeights, Linear, Rope, StageWeights
from shard_worker.model.tensors import TensorReader, TensorSource

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"


def stage_weights(checkpoint: TensorSource, first_layer: int, end_layer: int) -> StageWeights:
    """Layers [first_layer, end_layer). Raises LoadFailed."""
    config = checkpoint.config
    rope = Rope(np.array(inverse_frequencies(config), np.float32))
    outside = TensorReader(checkpoint, "")
    last = end_layer == config.num_layers
    embedding = head = None
    if first_layer == 0 or (last and config.tied_head):
        embedding = outside.matrix(EMBEDDING, config.vocab_size, config.hidden_size)
    if last:
        norm = outside.norm(FINAL_NORM, config.hidden_size)
        matrix = embedding if config.tied_head else None
        matrix = matrix or outside.matrix(HEAD, config.vocab_size, config.hidden_size)
        head = HeadWeights(norm, Linear((matrix,)))
    return StageWeights(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        rms_eps=config.rms_eps,
        first_layer=first_layer,
        layers=tuple(
            llama.layer_weights(TensorReader(checkpoint, f"model.layers.{i}."), config, rope, None)
            for i in range(first_layer, end_layer)
        ),
        embedding=embedding if first_layer == 0 else None,
        head=head,
    )
