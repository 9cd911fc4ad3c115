// Attention of a step over paged KV, as units of work that any thread may take in any order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "stage.h"

namespace shoal {

struct AttentionShape {
    int64_t heads, kv_heads, head_dim, block_size, num_blocks;
    float scale, softcap;
    bool narrow;

    int64_t block_pad() const { return shoal_stage_block_pad(block_size); }
    int64_t group() const { return heads / kv_heads; }
    int64_t qkv_width() const { return (heads + 2 * kv_heads) * head_dim; }
    int64_t tile_tokens() const;  // of a row that one unit takes at most
};

// Tokens [first, first + count) of the step, all of one row; with each KV head a unit.
struct AttentionSpan {
    int32_t row, first, count;
};

// Cuts the step's rows into spans; returns how many. `spans` has room for one a token.
int64_t cut_spans(const AttentionShape &shape, const shoal_step &step, AttentionSpan *spans);

// Bytes that one thread needs.
size_t attention_scratch_bytes(const AttentionShape &shape);

// Writes tokens [first, end) of the step into their slots: keys as they are, values with what overflowed cut to the
// largest number, for 0 * infinity in a masked place would reach the block's next owner.
void write_kv(const AttentionShape &shape, const shoal_step &step, const shoal_layer_kv &kv, const float *qkv,
              int64_t first, int64_t end);

// One KV head of one span: its query heads, for every token of the span, over the row's blocks up to the token.
void attend(const AttentionShape &shape, const shoal_step &step, const shoal_layer_kv &kv, int64_t window,
            const AttentionSpan &span, int64_t kv_head, const float *qkv, float *out, void *scratch);

}  // namespace shoal
