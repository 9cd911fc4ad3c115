// Attention of a step over paged KV, as units of work that any thread may take in any order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "stage.h"

namespace shoal {

struct AttentionShape {
    int64_t heads, kv_heads, head_dim, block_size;
    float scale, softcap;
    bool narrow;

    int64_t block_pad() const { return shoal_stage_block_pad(block_size); }
    int64_t group() const { return heads / kv_heads; }
    int64_t qkv_width() const { return (heads + 2 * kv_heads) * head_dim; }
    int64_t tile_tokens() const;  // of a chunk that one unit takes at most

    // Elements: of the keys and the values of one KV head of a block, and of all of them.
    int64_t key_size() const { return head_dim * block_pad(); }
    int64_t head_size() const { return key_size() + head_dim * block_size; }
    int64_t page_size() const { return kv_heads * head_size(); }
};

// What one thread takes at once: tokens [first, first + count) of the step, all of one row, under KV heads
// [head, head + heads).
struct AttentionUnit {
    int32_t row, first, count, head, heads;
};

// Cuts the step into units for so many threads; returns how many. `units` has room for kv_heads a token.
int64_t cut_units(const AttentionShape &shape, const shoal_step &step, int threads, AttentionUnit *units);

// Bytes that one thread needs.
size_t attention_scratch_bytes(const AttentionShape &shape);

// Writes a token's KV heads [head, head + heads) into its slot: keys as they are, values with what overflowed cut to
// the largest number, for 0 * infinity in a masked place would reach the block's next owner.
void write_kv(const AttentionShape &shape, const shoal_step &step, void *pages, const float *qkv, int64_t t,
              int64_t head, int64_t heads);

// The query heads of a unit, for each of its tokens, over the row's blocks up to the token.
void attend(const AttentionShape &shape, const shoal_step &step, const void *pages, int64_t window,
            const AttentionUnit &unit, const float *qkv, float *out, void *scratch);

// Asks for the first blocks of a unit that comes soon.
void prefetch(const AttentionShape &shape, const shoal_step &step, const void *pages, int64_t window,
              const AttentionUnit &unit);

}  // namespace shoal
