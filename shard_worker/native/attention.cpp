// Walks a sequence's blocks in place, tile by tile, for decodes and chunks alike.
//
// The query heads that share a KV head are rows of one product, and so are the tokens of a chunk: a block is read once
// for up to PANEL of them. Positions are walked in strips of 16, tiles of 4 strips and pieces of 8 tiles, all counted
// from the sequence's start: where one ends does not depend on the chunk. A piece has sums of its own, which join those
// before it in order.
#include "attention.h"

#include <algorithm>
#include <cfloat>
#include <climits>

#include "attention_panel.h"

namespace shoal {

namespace {

constexpr int64_t UNIT_ROWS = 48;  // query rows of a unit: their sums and a tile stay in the first cache
constexpr int64_t PIECE_STRIPS = 8 * TILE_STRIPS;
constexpr float BF16_MAX = 0x1.fep127f;

int64_t panels_of(int64_t rows) { return (rows + PANEL - 1) / PANEL; }

// A block's last strip may be short: strips do not cross blocks.
int64_t strip_of(const AttentionShape &shape, int64_t position) {
    const int64_t per_block = shape.block_pad() / WIDTH;
    return position / shape.block_size * per_block + position % shape.block_size / WIDTH;
}

// Where a row's strips lie.
struct Row {
    const AttentionShape &shape;
    const Word *pages;
    const int32_t *table;
    const int64_t per_block, key_size, head_size;

    Row(const AttentionCall &call, int64_t row)
        : shape(call.shape), pages((const Word *)call.pages),
          table(call.step.block_tables + row * call.step.table_stride), per_block(shape.block_pad() / WIDTH),
          key_size(shape.key_size()), head_size(shape.head_size()) {}

    int64_t strip_of(int64_t position) const { return shoal::strip_of(shape, position); }
    Strip strip(int64_t index, int64_t head) const {
        const int64_t block = index / per_block, within = index % per_block * WIDTH;
        const Word *keys = pages + (table[block] * shape.kv_heads + head) * head_size;
        return {keys + within, keys + key_size + within / shape.per_word() * shape.head_dim,
                (int32_t)(block * shape.block_size + within),
                (int32_t)std::min<int64_t>(WIDTH, shape.block_size - within)};
    }
    // The strips of a tile, up to `end`; the last one stands for those that there are not.
    int tile(int64_t first, int64_t end, int64_t head, Strip *strips) const {
        const int count = (int)std::min<int64_t>(TILE_STRIPS, end - first);
        for (int s = 0; s < TILE_STRIPS; s++) strips[s] = s < count ? strip(first + s, head) : strips[count - 1];
        return count;
    }
};

int32_t lowest_seen(int64_t position, int64_t window) {
    return window ? (int32_t)std::max<int64_t>(0, position - window + 1) : 0;
}

int64_t tile_start(int64_t strip) { return strip / TILE_STRIPS * TILE_STRIPS; }

template <class V, typename T>
class UnitWalk {
    typedef PanelKernel<V, T> Kernel;

public:
    UnitWalk(const AttentionCall &call, const AttentionUnit &unit, void *scratch)
        : call_(call), shape_(call.shape), unit_(unit), row_(call, unit.row),
          a_head_(panels_of(unit.count * shape_.group())) {
        const int64_t panels = unit.heads * a_head_, sums = PANEL * Kernel::dim_pad(shape_.head_dim);
        panels_ = panels_in(scratch);
        scores_ = (float *)(((uintptr_t)(panels_ + panels) + 63) & ~(uintptr_t)63);
        float *at = scores_ + PANEL * TILE;
        for (int64_t i = 0; i < panels; i++, at += 3 * sums) {
            panels_[i].sums = at, panels_[i].sums_before = at + sums, panels_[i].queries = at + 2 * sums;
            fill(panels_[i], i);
        }
    }

    // Tiles outside, heads and panels inside: a tile's keys and values serve all of the unit from the first cache,
    // while the next one's are on their way.
    void walk(const AttentionUnit *next) {
        int64_t first = tile_start(row_.strip_of(first_)), end = row_.strip_of(last_) + 1;
        if (unit_.pieces) {
            first = std::max<int64_t>(first, unit_.piece * PIECE_STRIPS);
            end = std::min<int64_t>(end, (unit_.piece + 1) * PIECE_STRIPS);
        }
        for (int64_t tile = first; tile < end; tile += TILE_STRIPS) {
            if (tile > first && tile % PIECE_STRIPS == 0)
                for (int64_t i = 0; i < unit_.heads * a_head_; i++) Kernel::join(panels_[i], shape_.head_dim);
            for (int64_t h = 0; h < unit_.heads; h++) {
                Strip strips[TILE_STRIPS], ahead[TILE_STRIPS];
                const int count = row_.tile(tile, end, unit_.head + h, strips);
                if (h + 1 < unit_.heads)
                    row_.tile(tile, end, unit_.head + h + 1, ahead);
                else if (tile + TILE_STRIPS < end)
                    row_.tile(tile + TILE_STRIPS, end, unit_.head, ahead);
                else if (next)
                    first_tile(*next, ahead);
                else
                    std::copy(strips, strips + TILE_STRIPS, ahead);
                over_panels(h, strips, ahead, count);
            }
        }
        if (unit_.pieces) return;
        const bool joined = panels_[0].joined;
        for (int64_t i = 0; i < unit_.heads * a_head_; i++) {
            if (joined) Kernel::join(panels_[i], shape_.head_dim);
            finish(panels_[i], i);
        }
    }

    // Of a unit whose pieces are all in their slots.
    static void join(const AttentionCall &call, const AttentionUnit &unit, char *slots) {
        const int64_t head_dim = call.shape.head_dim, a_head = panels_of(call.shape.group());
        const int64_t slot_bytes = attention_slot_bytes(call.shape);
        for (int64_t i = 0; i < a_head; i++) {
            Panel &all = panels_in(slots + unit.slot * slot_bytes)[i];
            for (int32_t piece = 1; piece < unit.pieces; piece++) {
                const Panel &one = panels_in(slots + (unit.slot + piece) * slot_bytes)[i];
                Kernel::add(all.now, all.sums, one.now, one.sums, all.rows, Kernel::dim_pad(head_dim));
            }
            for (int r = 0; r < all.rows; r++) {
                const int64_t head = unit.head * call.shape.group() + all.begin + r;
                Kernel::finish(all, r, head_dim, call.out + (unit.first * call.shape.heads + head) * head_dim);
            }
        }
    }

private:
    static Panel *panels_in(void *scratch) { return (Panel *)(((uintptr_t)scratch + 63) & ~(uintptr_t)63); }

    void finish(const Panel &panel, int64_t index) const {
        for (int r = 0; r < panel.rows; r++)
            Kernel::finish(panel, r, shape_.head_dim, call_.out + query(index, panel.begin + r) * shape_.head_dim);
    }

    int64_t token(int64_t row) const { return unit_.first + row / shape_.group(); }

    // Of (token, head), the place among a step's query heads.
    int64_t query(int64_t panel, int64_t row) const {
        return token(row) * shape_.heads + (unit_.head + panel / a_head_) * shape_.group() + row % shape_.group();
    }

    // Query rows as panels, head by head and as even as can be.
    void fill(Panel &panel, int64_t index) {
        const int64_t rows = unit_.count * shape_.group(), i = index % a_head_;
        panel.begin = (int)(rows * i / a_head_);
        panel.rows = (int)(rows * (i + 1) / a_head_) - panel.begin;
        panel.joined = false;
        panel.first = INT_MAX, panel.last = 0;
        const float scale = Kernel::query_scale(shape_.scale, shape_.softcap);
        for (int r = 0; r < panel.rows; r++) {
            const int64_t t = token(panel.begin + r), head = query(index, panel.begin + r) - t * shape_.heads;
            Kernel::take_query(call_.qkv + t * shape_.qkv_width() + head * shape_.head_dim, scale, shape_.head_dim,
                               panel.queries, r, panel.rows);
            const int32_t position = call_.step.positions[t];
            panel.position[r] = position;
            panel.low[r] = lowest_seen(position, call_.window);
            panel.first = std::min(panel.first, panel.low[r]);
            panel.last = std::max(panel.last, position);
        }
        first_ = std::min(first_, panel.first), last_ = std::max(last_, panel.last);
        Kernel::clear(panel, shape_.head_dim);
    }

    void first_tile(const AttentionUnit &next, Strip *strips) const {
        const Row row(call_, next.row);
        const int64_t position = call_.step.positions[next.first];
        const int64_t tile = tile_start(row.strip_of(lowest_seen(position, call_.window)));
        row.tile(std::max<int64_t>(tile, next.pieces ? next.piece * PIECE_STRIPS : 0), row.strip_of(position) + 1,
                 next.head, strips);
    }

    void over_panels(int64_t head, const Strip *strips, const Strip *ahead, int count) {
        for (int64_t i = head * a_head_; i < (head + 1) * a_head_; i++) {
            Panel &panel = panels_[i];
            int seen = count;
            while (seen && strips[seen - 1].position > panel.last) seen--;
            if (!seen || strips[seen - 1].position + WIDTH <= panel.first) continue;
            Kernel::over_tile(panel, strips, ahead, seen, shape_.head_dim, shape_.block_pad(), shape_.softcap, scores_);
            ahead = strips;  // asked for once
        }
    }

    const AttentionCall &call_;
    const AttentionShape &shape_;
    const AttentionUnit &unit_;
    const Row row_;
    const int64_t a_head_;  // panels of one KV head
    Panel *panels_;
    float *scores_;  // [PANEL][TILE]
    int32_t first_ = INT_MAX, last_ = 0;
};

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

int64_t cut_units(const AttentionShape &shape, int32_t row, int32_t first, int32_t end, bool together,
                  AttentionUnit *units) {
    const int32_t tokens = (int32_t)shape.tile_tokens(), kv_heads = (int32_t)shape.kv_heads;
    int64_t count = 0;
    for (int32_t at = first; at < end; at += tokens) {
        const int32_t taken = std::min(tokens, end - at), heads = taken == 1 && together ? kv_heads : 1;
        for (int32_t head = 0; head < kv_heads; head += heads)
            units[count++] = {row, at, taken, head, heads, 0, 0, 0};
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
        for (int32_t piece = 0; piece < pieces; piece++) units[count++] = {row, token, 1, head, 1, piece, pieces, slot};
    return count;
}

size_t attention_scratch_bytes(const AttentionShape &shape) {
    const int64_t chunk = panels_of(shape.tile_tokens() * shape.group());
    const int64_t decode = shape.kv_heads * panels_of(shape.group()), panels = std::max(chunk, decode);
    const int64_t width = (shape.head_dim + WIDTH - 1) / WIDTH * WIDTH;
    return panels * (sizeof(Panel) + 3 * PANEL * width * sizeof(float)) + PANEL * TILE * sizeof(float) + 128;
}

size_t attention_slot_bytes(const AttentionShape &shape) {
    const int64_t width = (shape.head_dim + WIDTH - 1) / WIDTH * WIDTH;
    const size_t bytes = panels_of(shape.group()) * (sizeof(Panel) + 3 * PANEL * width * sizeof(float)) +
                         PANEL * TILE * sizeof(float) + 128;
    return (bytes + 63) / 64 * 64;
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
