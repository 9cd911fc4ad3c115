// What attention's units have of a shape, and the kernels for the processor: attention_walk.h is a unit's way over its
// blocks, attention_panel.h the products, attention_units.h who is a unit together.
//
// The query heads that share a KV head are rows of one product, and so are the tokens of a chunk and the sequences that
// begin with the same blocks.
#include "attention.h"

#include <algorithm>
#include <cfloat>
#include <climits>

#include "attention_walk.h"

namespace shoal {

namespace {

constexpr int64_t UNIT_ROWS = 48;  // query rows of a unit: their sums and a tile stay in the first cache
constexpr float BF16_MAX = 0x1.fep127f;

template <class V>
void write_head(const AttentionShape &shape, const float *k, const float *v, int64_t within, Word *page) {
    const int64_t head_dim = shape.head_dim, pad = shape.block_pad();
    const float limit = shape.narrow ? BF16_MAX : FLT_MAX;
    const typename V::F largest = V::set1(limit), least = V::set1(-limit);
    auto bounded = [&](typename V::F x) { return V::max(V::min(V::number(x), largest), least); };
    Word *keys = page + within, *values = page + shape.key_size();
    if (!shape.narrow) {
        values += within * head_dim;
        for (int64_t d = 0; d < head_dim; d++) keys[d * pad] = k[d];
        int64_t d = 0;
        for (; d + WIDTH <= head_dim; d += WIDTH) V::store(values + d, bounded(V::load(v + d)));
        if (d < head_dim) V::store_half(values + d, bounded(V::load_half(v + d)));
        return;
    }
    bf16 *pairs = (bf16 *)(values + within / 2 * head_dim) + within % 2, rounded[WIDTH];
    Word words[WIDTH / 2];
    for (int64_t d = 0; d < head_dim; d += WIDTH) {
        const bool half = d + WIDTH > head_dim;
        V::store(rounded, half ? V::load_half(k + d) : V::load(k + d));
        std::memcpy(words, rounded, sizeof words);
        for (int64_t i = 0; i < (half ? 4 : 8); i++) keys[(d / 2 + i) * pad] = words[i];
        const typename V::F x = bounded(half ? V::load_half(v + d) : V::load(v + d));
        if (!half) {
            V::store_every_second(pairs + 2 * d, x);
            continue;
        }
        V::store(rounded, x);
        for (int64_t i = 0; i < 8; i++) pairs[2 * (d + i)] = rounded[i];
    }
}

}  // namespace

int64_t AttentionShape::tile_tokens() const { return std::max<int64_t>(1, UNIT_ROWS / group()); }

int64_t AttentionShape::sharers_max() const { return tile_tokens(); }

int64_t cut_units(const AttentionShape &shape, int32_t row, int32_t first, int32_t end, bool together,
                  AttentionUnit *units) {
    const int32_t tokens = (int32_t)shape.tile_tokens(), kv_heads = (int32_t)shape.kv_heads;
    int64_t count = 0;
    for (int32_t at = first; at < end; at += tokens) {
        const int32_t taken = std::min(tokens, end - at), heads = taken == 1 && together ? kv_heads : 1;
        for (int32_t head = 0; head < kv_heads; head += heads)
            units[count++] = {row, at, taken, head, heads, 0, 0, 0, nullptr};
    }
    return count;
}

int64_t cut_pieces(const AttentionShape &shape, int32_t row, int32_t token, int32_t position, int32_t slot,
                   int32_t slots, AttentionUnit *units) {
    const int64_t strips = strip_of(shape, position) + 1;  // no more: a piece that has none has no first one to fetch
    const int32_t pieces = (int32_t)((strips + PIECE_STRIPS - 1) / PIECE_STRIPS), kv_heads = (int32_t)shape.kv_heads;
    if (pieces < 2 || pieces * kv_heads > slots) return 0;
    int64_t count = 0;
    for (int32_t head = 0; head < kv_heads; head++, slot += pieces)
        for (int32_t piece = 0; piece < pieces; piece++) units[count++] = {row, token, 1, head, 1, piece, pieces, slot, nullptr};
    return count;
}

size_t attention_scratch_bytes(const AttentionShape &shape) {
    const int64_t rows = std::max(shape.tile_tokens() * shape.group(), shape.heads);
    return UnitWalk<Two16, float>::scratch_bytes(rows, shape.head_dim);
}

size_t attention_slot_bytes(const AttentionShape &shape) {
    return (UnitWalk<Two16, float>::scratch_bytes(shape.group(), shape.head_dim) + 63) / 64 * 64;
}

void write_kv(const AttentionCall &call, int64_t t, int64_t head, int64_t heads) {
    const AttentionShape &shape = call.shape;
    const int64_t page = call.step.kv_slots[t] / shape.block_size, within = call.step.kv_slots[t] % shape.block_size;
    with_best16(shape.one16, [&](auto set) {
        for (int64_t h = head; h < head + heads; h++) {
            const float *k = call.qkv + t * shape.qkv_width() + (shape.heads + h) * shape.head_dim;
            write_head<decltype(set)>(shape, k, k + shape.kv_heads * shape.head_dim, within,
                                      (Word *)call.pages + (page * shape.kv_heads + h) * shape.head_size());
        }
    });
}

namespace {

// f with the walk for these vectors and this type.
template <typename F>
void with_walk(const AttentionShape &shape, F f) {
    with_best16(shape.one16, [&](auto set) {
        if (shape.narrow)
            f((UnitWalk<decltype(set), bf16> *)nullptr);
        else
            f((UnitWalk<decltype(set), float> *)nullptr);
    });
}

}  // namespace

void attend(const AttentionCall &call, const AttentionUnit &unit, const AttentionUnit *next, void *scratch) {
    with_walk(call.shape, [&](auto *walk) { std::remove_reference_t<decltype(*walk)>(call, unit, scratch).walk(next); });
}

void attend_piece(const AttentionCall &call, const AttentionUnit &unit, const AttentionUnit *next, char *slots) {
    attend(call, unit, next, slots + (unit.slot + unit.piece) * attention_slot_bytes(call.shape));
}

void join_pieces(const AttentionCall &call, const AttentionUnit &unit, char *slots) {
    with_walk(call.shape, [&](auto *walk) { std::remove_reference_t<decltype(*walk)>::join(call, unit, slots); });
}

}  // namespace shoal
