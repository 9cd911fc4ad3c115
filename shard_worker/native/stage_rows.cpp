// A token's row between products: where it comes from, its norms and rotations, and where it goes.
#include <algorithm>

#include "stage_state.h"

namespace shoal {

void Stage::enter(int64_t t) {
    float *row = hidden + t * c.hidden;
    if (c.embedding) {
        shoal_linear_dequantize_row(c.embedding, step->token_ids[t], row);
        if (c.embedding_scale != 1.0f) ops.scale_row(row, c.embedding_scale, c.hidden);
    } else if (c.narrow) {
        ops.widen((const uint16_t *)step->activations_in + t * c.hidden, c.hidden, row);
    } else {
        const float *from = (const float *)step->activations_in + t * c.hidden;
        std::copy(from, from + c.hidden, row);
    }
    float *at = turns;
    for (const shoal_rope &rope : ropes) {
        const int64_t half = rope.rotary_dim / 2;
        float *cosines = at + t * 2 * half;
        angles(step->positions[t], rope.frequencies, rope.scale, half, cosines, cosines + half);
        at += tokens_max * 2 * half;
    }
    if (!layers.empty()) norm(t, layers[0].norms.attention_norm);
}

void Stage::leave(int64_t t) {
    if (!step->activations_out) return;
    const float *row = hidden + t * c.hidden;
    if (c.narrow)
        ops.narrow(row, c.hidden, (uint16_t *)step->activations_out + t * c.hidden);
    else
        std::copy(row, row + c.hidden, (float *)step->activations_out + t * c.hidden);
}

// Under KV heads [head, head + heads): queries and keys are normed and rotated, keys and values go to their slots.
void Stage::turn(size_t index, int64_t t, int64_t head, int64_t heads) {
    const shoal_layer &layer = layers[index].norms;
    float *row = qkv + t * qkv_width();
    const float *at = turns;
    for (int64_t i = 0; i < layer.rope; i++) at += tokens_max * ropes[i].rotary_dim;
    const int64_t half = ropes[layer.rope].rotary_dim / 2, group = shape.group();
    const float *cosines = at + t * 2 * half;
    auto turned = [&](float *x, const float *norm) {
        if (norm) ops.rms_norm(x, norm, c.rms_eps, c.head_dim, x);
        ops.rotate(x, cosines, cosines + half, half);
    };
    for (int64_t h = head * group; h < (head + heads) * group; h++) turned(row + h * c.head_dim, layer.q_norm);
    for (int64_t h = head; h < head + heads; h++) turned(row + (c.heads + h) * c.head_dim, layer.k_norm);
    write_kv(call(index), t, head, heads);
}

// A token's hidden row into normed_rows.
void Stage::norm(int64_t t, const float *weight) {
    const float *row = hidden + t * c.hidden;
    if (paired)
        ops.narrow_rms_norm(row, weight, c.rms_eps, c.hidden, normed_pairs + t * normed_stride());
    else
        ops.rms_norm(row, weight, c.rms_eps, c.hidden, normed + t * c.hidden);
}

void Stage::after_attention(const Layer &layer, int64_t t, const float *row) {
    float *to = hidden + t * c.hidden;
    if (layer.norms.post_attention_norm) {
        ops.rms_norm(row, layer.norms.post_attention_norm, c.rms_eps, c.hidden, normed + t * c.hidden);
        row = normed + t * c.hidden;
    }
    ops.add_residual(to, row, c.hidden, false);
    norm(t, layer.norms.mlp_norm);
}

void Stage::after_mlp(size_t index, int64_t t, const float *row) {
    float *to = hidden + t * c.hidden;
    const Layer &layer = layers[index];
    if (layer.norms.post_mlp_norm) {
        ops.rms_norm(row, layer.norms.post_mlp_norm, c.rms_eps, c.hidden, normed + t * c.hidden);
        row = normed + t * c.hidden;
    }
    ops.add_residual(to, row, c.hidden, c.narrow != 0);
    if (index + 1 < layers.size()) norm(t, layers[index + 1].norms.attention_norm);
}

// Outputs [first, end) of a row of gate and up: into gated_rows.
void Stage::activate(float *gate, const float *up, int64_t row, int64_t first, int64_t end) const {
    const bool silu = c.activation == SHOAL_SILU;
    if (paired) {
        void *to = (uint16_t *)(gated_pairs + row * gated_stride()) + first;
        return (silu ? ops.narrow_silu_times_rough : ops.narrow_gelu_times)(gate, up, end - first, to);
    }
    (!silu ? ops.gelu_times : c.narrow ? ops.silu_times_rough : ops.silu_times)(gate, up, end - first);
}

}  // namespace shoal
