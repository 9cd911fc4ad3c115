"""From a checkpoint to what a stage computes: which file knows a family's layers, and what all share.

A stage holds its own layers only; the first has the embedding too, the last the final norm and the head,
which may be the embedding again.
"""

from collections.abc import Callable

from shard_worker.executor import LoadFailed
from shard_worker.model import gemma2, gemma3, llama, phi3, qwen3
from shard_worker.model.config import ModelConfig
from shard_worker.model.rope import rope_of
from shard_worker.model.stage_weights import HeadWeights, LayerWeights, Linear, Rope, StageWeights
from shard_worker.model.tensors import TensorReader, TensorSource

LayerReader = Callable[[TensorReader, ModelConfig, Rope, int | None], LayerWeights]
FAMILIES: dict[str, LayerReader] = {
    "llama": llama.layer_weights,
    "mistral": llama.layer_weights,
    "qwen2": llama.layer_weights,
    "qwen3": qwen3.layer_weights,
    "gemma2": gemma2.layer_weights,
    "gemma3_text": gemma3.layer_weights,
    "phi3": phi3.layer_weights,
}
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
UNUSED = ("rotary_emb.inv_freq",)  # what old files keep beside the weights, ends of names


def stage_weights(checkpoint: TensorSource, first_layer: int, end_layer: int) -> StageWeights:
    """Layers [first_layer, end_layer). Raises LoadFailed."""
    config = checkpoint.config
    if config.family not in FAMILIES:
        raise LoadFailed(f"{checkpoint.path}: no file here describes the layers of this model")
    outside = TensorReader(checkpoint, "")
    _refuse_unknown(checkpoint)
    last = end_layer == config.num_layers
    embedding = head = None
    if first_layer == 0 or (last and config.tied_head):
        embedding = outside.matrix(EMBEDDING, config.vocab_size, config.hidden_size)
    if last:
        norm = outside.norm(FINAL_NORM, config.hidden_size)
        matrix = embedding if config.tied_head else None
        matrix = matrix or outside.matrix(HEAD, config.vocab_size, config.hidden_size)
        head = HeadWeights(norm, Linear((matrix,)), config.final_softcap)
    return StageWeights(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        rms_eps=config.rms_eps,
        first_layer=first_layer,
        layers=_layers(checkpoint, first_layer, end_layer),
        embedding=embedding if first_layer == 0 else None,
        embedding_scale=config.embedding_scale,
        head=head,
        activation=config.activation,
        attention_scale=config.attention_scale,
        attention_softcap=config.attention_softcap,
    )


def _layers(checkpoint: TensorSource, first_layer: int, end_layer: int) -> tuple[LayerWeights, ...]:
    config = checkpoint.config
    read = FAMILIES[config.family]
    assert config.rope is not None
    rope = rope_of(config.rope, config.context_len_max)
    windowed_rope = rope
    if config.windowed_rope is not None:
        windowed_rope = rope_of(config.windowed_rope, config.context_len_max)
    layers = []
    for i in range(first_layer, end_layer):
        window = config.window_of(i)
        reader = TensorReader(checkpoint, f"model.layers.{i}.")
        layers.append(read(reader, config, rope if window is None else windowed_rope, window))
        _refuse_unread(reader, config)
    return tuple(layers)


def _refuse_unknown(checkpoint: TensorSource) -> None:
    """A tensor outside of the layers that no family has: a head's bias, another model beside this one."""
    known = [f"{name}.weight" for name in (EMBEDDING, FINAL_NORM, HEAD)]
    for name in checkpoint.names_under(""):
        if not name.startswith("model.layers.") and name not in known and not name.endswith(UNUSED):
            raise LoadFailed(f"{checkpoint.path}: {name} has no meaning in {checkpoint.config.family}")


def _refuse_unread(reader: TensorReader, config: ModelConfig) -> None:
    """A tensor that the family doesn't know would change the numbers: a bias, a norm, a scale."""
    names = reader.checkpoint.names_under(reader.prefix)
    left = [n for n in names if n not in reader.read and not n.endswith(UNUSED)]
    if left:
        raise LoadFailed(f"{reader.checkpoint.path}: {left[0]} has no meaning in a layer of {config.family}")
