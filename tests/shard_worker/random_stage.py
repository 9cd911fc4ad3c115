"""Random weights of a small model with every option that a stage knows, without any library's model code."""

from dataclasses import replace

import numpy as np

from shard_worker.model.stage_weights import (
    F32,
    HeadWeights,
    LayerWeights,
    Linear,
    Rope,
    StageWeights,
    StoredMatrix,
    WeightFormat,
)

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, LAYERS = 64, 6, 2, 16, 96, 160, 3
ROPES = (Rope(np.array([100.0 ** (-i / 8) for i in range(8)], np.float32)), Rope(np.ones(4, np.float32), 1.1))


def model(seed: int = 0, plain: bool = False) -> StageWeights:
    """All layers. `plain`: Llama's; else with q, k and post norms, a window, soft caps, partial rotation."""
    draw = np.random.default_rng(seed)

    def matrix(outputs: int, inputs: int) -> StoredMatrix:
        numbers = draw.normal(0, inputs**-0.5, (outputs, inputs)).astype(np.float32)
        return StoredMatrix(WeightFormat.F32, numbers.view(np.uint8), inputs)

    def norm(size: int) -> F32:
        return draw.uniform(0.5, 1.5, size).astype(np.float32)

    def layer(index: int) -> LayerWeights:
        q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        bias = draw.normal(0, 0.1, q + 2 * kv).astype(np.float32)
        made = LayerWeights(
            attention_norm=norm(HIDDEN),
            qkv=Linear((matrix(q, HIDDEN), matrix(kv, HIDDEN), matrix(kv, HIDDEN)), bias),
            out=Linear((matrix(HIDDEN, q),)),
            mlp_norm=norm(HIDDEN),
            gate_up=Linear((matrix(INNER, HIDDEN), matrix(INNER, HIDDEN))),
            down=Linear((matrix(HIDDEN, INNER),)),
            rope=ROPES[0],
        )
        if plain:
            return made
        return replace(
            made,
            q_norm=norm(HEAD_DIM),
            k_norm=norm(HEAD_DIM),
            post_attention_norm=norm(HIDDEN),
            post_mlp_norm=norm(HIDDEN),
            rope=ROPES[index % 2],
            window=11 if index == 1 else None,
        )

    embedding = matrix(VOCAB, HIDDEN)
    return StageWeights(
        hidden_size=HIDDEN,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=INNER,
        vocab_size=VOCAB,
        rms_eps=1e-5,
        first_layer=0,
        layers=tuple(layer(i) for i in range(LAYERS)),
        embedding=embedding,
        embedding_scale=1.0 if plain else 8.0,
        head=HeadWeights(norm(HIDDEN), Linear((embedding,)), softcap=0.0 if plain else 30.0),
        attention_softcap=0.0 if plain else 20.0,
    )


def split(whole: StageWeights, ends: tuple[int, ...]) -> list[StageWeights]:
    """The same model as stages that end at those layers."""
    firsts = (0, *ends[:-1])
    return [
        replace(
            whole,
            first_layer=first,
            layers=whole.layers[first:end],
            embedding=whole.embedding if first == 0 else None,
            head=whole.head if end == len(whole.layers) else None,
        )
        for first, end in zip(firsts, ends, strict=True)
    ]
