// Attention of a step over paged KV, as units of work that any thread may take in any order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "stage.h"

namespace shoal {

// A KV head of a block: keys by column, [head_dim][block_pad], then values, [block_size][head_dim]. In bfloat16 two
// that are neighbours in a sum lie in one word of 32 bits: dimensions of a key, positions of a value.
struct AttentionShape {
    int64_t heads, kv_heads, head_dim, block_size;
    float scale, softcap;
    bool narrow;
    bool one16;  // the vectors to use: vec16.h

    int64_t per_word() const { return narrow ? 2 : 1; }
    int64_t block_pad() const { return shoal_stage_block_pad(block_size); }
    int64_t group() const { return heads / kv_heads; }
    int64_t qkv_width() const { return (heads + 2 * kv_heads) * head_dim; }
    int64_t tile_tokens() const;  // of a chunk that one unit takes at most
    int64_t sharers_max() const;  // of a unit

    // Words: of the keys and the values of one KV head of a block, and of all of them.
    int64_t key_size() const { return head_dim / per_word() * block_pad(); }
    int64_t head_size() const { return key_size() + (block_size + per_word() - 1) / per_word() * head_dim; }
    int64_t page_size() const { return kv_heads * head_size(); }
};

// One of several tokens, each alone in its row, whose tables begin with the same blocks.
struct Sharer {
    int32_t row, token;
    int32_t tiles;  // that it has in common with the one before
};

// What one thread takes at once: tokens [first, first + count) of the step, all of one row, under KV heads
// [head, head + heads). Or the tokens of `count` sharers, the first of which row and first name.
struct AttentionUnit {
    int32_t row, first, count, head, heads;
    // Of a token that is alone, under one head: only this piece of its context, in a slot of its own. 0 pieces: all.
    int32_t piece, pieces, slot;
    const Sharer *sharers;
};

// What a step's attention in one layer works on.
struct AttentionCall {
    const AttentionShape &shape;
    const shoal_step &step;
    void *pages;
    int64_t window;
    const float *qkv;
    float *out;
};

// Cuts tokens [first, end) of one of the step's rows into units; returns how many. `units` has room for kv_heads a
// token. `together`: all heads of a token that is alone are one unit.
int64_t cut_units(const AttentionShape &shape, int32_t row, int32_t first, int32_t end, bool together,
                  AttentionUnit *units);

// A decode's units for each piece of its context, where there are several and slots enough; 0: they are not cut so.
// Slots follow each other from `slot` on.
int64_t cut_pieces(const AttentionShape &shape, int32_t row, int32_t token, int32_t position, int32_t slot,
                   int32_t slots, AttentionUnit *units);

// A block's last strip may be short: strips do not cross blocks.
inline int64_t strip_of(const AttentionShape &shape, int64_t position) {
    const int64_t per_block = shape.block_pad() / 16;
    return position / shape.block_size * per_block + position % shape.block_size / 16;
}

// Bytes that one thread needs, and that a slot takes.
size_t attention_scratch_bytes(const AttentionShape &shape);
size_t attention_slot_bytes(const AttentionShape &shape);

// Writes a token's KV heads [head, head + heads) into its slot: keys as they are, values with what overflowed cut to
// the largest number, for 0 * infinity in a masked place would reach the block's next owner.
void write_kv(const AttentionCall &call, int64_t t, int64_t head, int64_t heads);

// The query heads of a unit, for each of its tokens, over the row's blocks up to the token. What `next` begins with
// (NULL: nothing) comes into the cache meanwhile.
void attend(const AttentionCall &call, const AttentionUnit &unit, const AttentionUnit *next, void *scratch);

// The same for a unit that is a piece, into its slot of `slots`; and what follows when all of its pieces are there: they
// are joined in their order, which gives the numbers that a unit of the whole context gives.
void attend_piece(const AttentionCall &call, const AttentionUnit &unit, const AttentionUnit *next, char *slots);
void join_pieces(const AttentionCall &call, const AttentionUnit &unit, char *slots);

}  // namespace shoal
