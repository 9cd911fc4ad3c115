// Attention over paged KV with an online softmax, the same operations for a decode and for a token of a chunk.
//
// The query heads that share a KV head are rows of one product, and so are the tokens of a chunk: a block is read once
// for up to PANEL of them. Keys lie transposed in their block, so that a row of scores is a sum over head_dim of a
// number times a vector of positions; values lie as they are. Positions are walked in strips of 8 and tiles of 8
// strips, both counted from the sequence's start: where a tile ends does not depend on the chunk. What a token may not
// see weighs exactly 0 and adds exactly 0, so that a panel may walk further than one of its rows.
#include "attention.h"

#include <algorithm>
#include <cfloat>
#include <climits>
#include <type_traits>

#include "vec8.h"

namespace shoal {

namespace {

constexpr int PANEL = 6;                        // query rows of one product: 12 accumulators
constexpr int TILE_STRIPS = 8;                  // strips between two looks at the running maximum
constexpr int TILE = TILE_STRIPS * LANES;
constexpr int64_t WIDENED_PANELS = 3;           // from so many on, a tile in bfloat16 is widened once for all
constexpr int64_t LINE = 64;                    // of the cache, bytes
constexpr int64_t UNIT_ROWS = 48;               // query rows of a unit: their sums stay in the first cache

struct Panel {
    int rows;              // query rows: (token, head of the group)
    int32_t position[PANEL];
    int32_t low[PANEL];    // first position that the row sees
    int32_t first, last;   // what any of the rows sees
    float m[PANEL];        // running maximum
    float alpha[PANEL];
    v8 weight[PANEL];      // running sum of weights, by lane
};

// A unit's memory in a thread's scratch.
struct Memory {
    Panel *panels;
    float *queries;  // per panel [head_dim][rows], scaled
    float *sums;     // per panel [rows][head_dim]
    float *scores;   // [PANEL][TILE]
    float *wide;     // keys [TILE_STRIPS][head_dim][LANES] and values [TILE][head_dim] of a tile
};

struct Strip {
    const void *keys;    // [head_dim] of 8 positions, block_pad apart
    const void *values;  // [valid][head_dim]
    int32_t position;    // of its first lane
    int32_t valid;       // lanes that are positions
};

// What comes into the cache while a panel is computed: the blocks of the next tile, a line at a time, so that
// reading them and computing overlap.
struct Ahead {
    const char *blocks[TILE_STRIPS];
    int count = 0, next = 0;
    int64_t block_bytes = 0;

    const char *take() { return next < count ? blocks[next++] : nullptr; }
    void take_rest() {
        while (const char *block = take())
            for (int64_t at = 0; at < block_bytes; at += LINE) __builtin_prefetch(block + at);
    }
};

// With each of a product's steps the lines of a block that hold as much of it.
template <typename T>
SHOAL_INLINE void prefetch_step(const char *block, int64_t index) {
    constexpr int64_t LINES = sizeof(T) / sizeof(bf16);
    for (int64_t i = 0; i < LINES; i++) __builtin_prefetch(block + (index * LINES + i) * LINE);
}

// acc += left x right, with the fewer of the two kept in registers beside the sums.
template <int R, int C, typename Left, typename Right>
SHOAL_INLINE void outer(v8 (&acc)[R][C], Left left, Right right) {
    if (R < C) {
        v8 kept[R];
        for (int r = 0; r < R; r++) kept[r] = left(r);
        for (int c = 0; c < C; c++) {
            const v8 one = right(c);
            for (int r = 0; r < R; r++) acc[r][c] = fma(kept[r], one, acc[r][c]);
        }
    } else {
        v8 kept[C];
        for (int c = 0; c < C; c++) kept[c] = right(c);
        for (int r = 0; r < R; r++) {
            const v8 one = left(r);
            for (int c = 0; c < C; c++) acc[r][c] = fma(one, kept[c], acc[r][c]);
        }
    }
}

template <typename T, int R, int C, bool AHEAD>
SHOAL_INLINE void scores_of(const float *queries, int64_t head_dim, int64_t pad, const Strip *strips, float *scores,
                            const char *ahead) {
    v8 acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = set1(0.0f);
    const T *keys[C];
    for (int c = 0; c < C; c++) keys[c] = (const T *)strips[c].keys;
    for (int64_t d = 0; d < head_dim; d++) {
        if (AHEAD) prefetch_step<T>(ahead, d);
        outer<R, C>(
            acc, [&](int r) { return set1(queries[d * R + r]); }, [&](int c) { return load(keys[c] + d * pad); });
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(scores + r * TILE + c * LANES, acc[r][c]);
}

template <typename T, int R, int C, bool AHEAD>
SHOAL_INLINE void add_values(const Panel &panel, const Strip *strips, int count, const float *weights, float *sums,
                             int64_t head_dim, int64_t at, const char *ahead) {
    v8 acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++)
            acc[r][c] = load(sums + r * head_dim + at + c * LANES) * set1(panel.alpha[r]);
    for (int s = 0; s < count; s++) {
        const T *values = (const T *)strips[s].values + at;
        int lanes = std::min(strips[s].valid, panel.last - strips[s].position + 1);
        const float *w = weights + s * LANES;
        for (int j = 0; j < lanes; j++, values += head_dim) {
            if (AHEAD) prefetch_step<T>(ahead, s * LANES + j);
            outer<R, C>(
                acc, [&](int r) { return set1(w[r * TILE + j]); }, [&](int c) { return load(values + c * LANES); });
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(sums + r * head_dim + at + c * LANES, acc[r][c]);
}

// Scores to weights, in place; the panel's running maxima and sums move on.
void soften(Panel &panel, const Strip *strips, int count, float softcap, float *scores) {
    const i8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int r = 0; r < panel.rows; r++) {
        float *row = scores + r * TILE;
        v8 best = set1(-INFINITY);
        for (int s = 0; s < count; s++) {
            v8 x = load(row + s * LANES);
            if (softcap != 0.0f) x = tanh(x / set1(softcap)) * set1(softcap);
            const Strip &strip = strips[s];
            bool whole = strip.valid == LANES && strip.position + LANES - 1 <= panel.position[r] &&
                         strip.position >= panel.low[r];
            if (!whole) {
                i8 at = lanes + strip.position;
                i8 seen = (at <= panel.position[r]) & (at >= panel.low[r]) & (lanes < strip.valid);
                x = choose(seen, x, set1(-INFINITY));
            }
            best = max(x, best);
            store(row + s * LANES, x);
        }
        float m = std::max(panel.m[r], max(best));
        if (m == -INFINITY) {  // nothing seen so far: weights of 0, not of e^(inf - inf)
            for (int s = 0; s < count; s++) store(row + s * LANES, set1(0.0f));
            panel.alpha[r] = 1.0f;
            continue;
        }
        float alpha = m == panel.m[r] ? 1.0f : exp(set1(panel.m[r] - m))[0];
        v8 weight = panel.weight[r] * set1(alpha);
        for (int s = 0; s < count; s++) {
            v8 w = exp(load(row + s * LANES) - set1(m));
            weight += w;
            store(row + s * LANES, w);
        }
        panel.m[r] = m;
        panel.alpha[r] = alpha;
        panel.weight[r] = weight;
    }
}

// Calls work(ahead, std::true_type) while there is something ahead, else work(nullptr, std::false_type).
template <typename F>
SHOAL_INLINE void with_ahead(Ahead &ahead, F work) {
    if (const char *block = ahead.take())
        work(block, std::true_type());
    else
        work(nullptr, std::false_type());
}

template <typename T, int R>
void panel_over_tile(Panel &panel, const float *queries, float *sums, float *scores, const Strip *strips, int count,
                     int64_t head_dim, int64_t pad, float softcap, Ahead &ahead) {
    constexpr int WIDE = R <= 3 ? 4 : 2;
    for (int s = 0; s < count;) {
        // Strips are in step with each other: one more costs less than one alone. What is past the last is not used.
        const int left = count - s;
        auto some = [&](auto strips_taken) {
            constexpr int C = decltype(strips_taken)::value;
            with_ahead(ahead, [&](const char *block, auto is) {
                scores_of<T, R, C, decltype(is)::value>(queries, head_dim, pad, strips + s, scores + s * LANES, block);
            });
            s += C;
        };
        if (WIDE == 4 && left > 2)
            some(std::integral_constant<int, WIDE>());
        else if (left > 1)
            some(std::integral_constant<int, 2>());
        else
            some(std::integral_constant<int, 1>());
    }
    soften(panel, strips, count, softcap, scores);
    int64_t at = 0;
    for (; at + WIDE * LANES <= head_dim; at += WIDE * LANES)
        with_ahead(ahead, [&](const char *block, auto is) {
            add_values<T, R, WIDE, decltype(is)::value>(panel, strips, count, scores, sums, head_dim, at, block);
        });
    for (; at < head_dim; at += LANES)
        add_values<T, R, 1, false>(panel, strips, count, scores, sums, head_dim, at, nullptr);
}

template <typename T>
void panel_over_tile(const AttentionShape &shape, Panel &panel, Memory &memory, int64_t index, const Strip *strips,
                     int count, int64_t pad, Ahead &ahead) {
    const float *queries = memory.queries + index * PANEL * shape.head_dim;
    float *sums = memory.sums + index * PANEL * shape.head_dim;
    auto over = [&](auto rows) {
        panel_over_tile<T, decltype(rows)::value>(panel, queries, sums, memory.scores, strips, count, shape.head_dim,
                                                  pad, shape.softcap, ahead);
    };
    switch (panel.rows) {
        case 1: return over(std::integral_constant<int, 1>());
        case 2: return over(std::integral_constant<int, 2>());
        case 3: return over(std::integral_constant<int, 3>());
        case 4: return over(std::integral_constant<int, 4>());
        case 5: return over(std::integral_constant<int, 5>());
        default: return over(std::integral_constant<int, PANEL>());
    }
}

// Where a row's strips lie.
template <typename T>
struct Row {
    const AttentionShape &shape;
    const T *pages;
    const int32_t *table;
    const int64_t per_block;

    Row(const AttentionShape &shape, const void *pages, const int32_t *table)
        : shape(shape), pages((const T *)pages), table(table), per_block(shape.block_pad() / LANES) {}

    int64_t strip_of(int64_t position) const {
        return position / shape.block_size * per_block + position % shape.block_size / LANES;
    }
    const T *head_of(int64_t strip, int64_t head) const {
        return pages + table[strip / per_block] * shape.page_size() + head * shape.head_size();
    }
    Strip strip(int64_t index, int64_t head) const {
        const int64_t block = index / per_block, within = index % per_block * LANES;
        const T *keys = head_of(index, head);
        return {keys + within, keys + shape.key_size() + within * shape.head_dim, (int32_t)(block * shape.block_size + within),
                (int32_t)std::min<int64_t>(LANES, shape.block_size - within)};
    }
    // The blocks of a tile, up to the strip `end`.
    Ahead ahead(int64_t tile, int64_t end, int64_t head) const {
        Ahead ahead;
        ahead.block_bytes = shape.head_size() * (int64_t)sizeof(T);
        for (int64_t s = tile; s < std::min(tile + TILE_STRIPS, end); s++)
            if (s % per_block == 0 || s == tile) ahead.blocks[ahead.count++] = (const char *)head_of(s, head);
        return ahead;
    }
};

// The same strips in float32, for panels enough to pay for it.
SHOAL_INLINE void widen_strips(const AttentionShape &shape, Strip *strips, int count, float *wide) {
    const int64_t head_dim = shape.head_dim, pad = shape.block_pad();
    for (int s = 0; s < count; s++) {
        const bf16 *keys = (const bf16 *)strips[s].keys, *values = (const bf16 *)strips[s].values;
        strips[s].keys = wide;
        for (int64_t d = 0; d < head_dim; d++, wide += LANES) store(wide, load(keys + d * pad));
        strips[s].values = wide;
        for (int64_t i = 0; i < strips[s].valid * head_dim; i += LANES, wide += LANES) store(wide, load(values + i));
    }
    for (int s = count; s < TILE_STRIPS; s++) strips[s] = strips[count - 1];  // read at times, never used
}

// Walks tiles outside, heads and panels inside: a tile's keys and values serve all of the unit from the first cache,
// while the next tile's are on their way.
template <typename T>
void unit_over_row(const AttentionShape &shape, const Row<T> &row, const AttentionUnit &unit, Memory &memory,
                   int64_t panels_a_head, int32_t first, int32_t last) {
    const int64_t end = row.strip_of(last) + 1;
    for (int64_t tile = row.strip_of(first) / TILE_STRIPS * TILE_STRIPS; tile < end; tile += TILE_STRIPS) {
        const int count = (int)std::min<int64_t>(TILE_STRIPS, end - tile);
        for (int64_t h = 0; h < unit.heads; h++) {
            Strip strips[TILE_STRIPS];
            for (int s = 0; s < TILE_STRIPS; s++) strips[s] = row.strip(tile + std::min(s, count - 1), unit.head + h);
            Ahead ahead = row.ahead(tile + TILE_STRIPS, end, unit.head + h);
            const bool widened = sizeof(T) < sizeof(float) && panels_a_head >= WIDENED_PANELS;
            if (widened) widen_strips(shape, strips, count, memory.wide);
            for (int64_t i = h * panels_a_head; i < (h + 1) * panels_a_head; i++) {
                Panel &panel = memory.panels[i];
                int seen = count;
                while (seen && strips[seen - 1].position > panel.last) seen--;
                if (!seen || strips[seen - 1].position + LANES <= panel.first) continue;
                if (widened)
                    panel_over_tile<float>(shape, panel, memory, i, strips, seen, LANES, ahead);
                else
                    panel_over_tile<T>(shape, panel, memory, i, strips, seen, shape.block_pad(), ahead);
            }
            ahead.take_rest();
        }
    }
}

template <typename T>
void write_kv_as(const AttentionShape &shape, const shoal_step &step, void *pages, const float *qkv, int64_t t,
                 int64_t head, int64_t heads) {
    const int64_t head_dim = shape.head_dim, size = shape.block_size, pad = shape.block_pad();
    const int64_t page = step.kv_slots[t] / size, within = step.kv_slots[t] % size;
    const v8 largest = set1(FLT_MAX), least = set1(-FLT_MAX);
    for (int64_t h = head; h < head + heads; h++) {
        const float *k = qkv + t * shape.qkv_width() + (shape.heads + h) * head_dim;
        const float *v = k + shape.kv_heads * head_dim;
        T *keys = (T *)pages + page * shape.page_size() + h * shape.head_size();
        T *values = keys + shape.key_size() + within * head_dim;
        for (int64_t d = 0; d < head_dim; d++) store1(keys + d * pad + within, k[d]);
        for (int64_t d = 0; d < head_dim; d += LANES) {
            v8 x = load(v + d);
            x = choose(x == x, x, set1(0.0f));
            store(values + d, max(min(x, largest), least));
        }
    }
}

// Query rows as panels, head by head: row (token, head of the group). What any of them sees goes to first and last.
void fill_panels(const AttentionShape &shape, const shoal_step &step, const AttentionUnit &unit, int64_t window,
                 const float *qkv, Memory &memory, int32_t &first, int32_t &last) {
    const int64_t head_dim = shape.head_dim, group = shape.group(), rows = unit.count * group;
    const int64_t panels = (rows + PANEL - 1) / PANEL;
    for (int64_t i = 0; i < unit.heads * panels; i++) {
        Panel &panel = memory.panels[i];
        const int64_t begin = i % panels * PANEL, heads_begin = (unit.head + i / panels) * group;
        panel.rows = (int)std::min<int64_t>(PANEL, rows - begin);
        panel.first = INT_MAX, panel.last = 0;
        float *queries = memory.queries + i * PANEL * head_dim;
        for (int r = 0; r < panel.rows; r++) {
            const int64_t t = unit.first + (begin + r) / group, head = heads_begin + (begin + r) % group;
            const float *q = qkv + t * shape.qkv_width() + head * head_dim;
            for (int64_t d = 0; d < head_dim; d++) queries[d * panel.rows + r] = q[d] * shape.scale;
            const int32_t position = step.positions[t];
            panel.position[r] = position;
            panel.low[r] = window ? (int32_t)std::max<int64_t>(0, position - window + 1) : 0;
            panel.first = std::min(panel.first, panel.low[r]);
            panel.last = std::max(panel.last, position);
            panel.m[r] = -INFINITY;
            panel.weight[r] = set1(0.0f);
        }
        first = std::min(first, panel.first), last = std::max(last, panel.last);
    }
    std::fill(memory.sums, memory.sums + unit.heads * panels * PANEL * head_dim, 0.0f);
}

template <typename T>
void attend_as(const AttentionShape &shape, const shoal_step &step, const void *pages, int64_t window,
               const AttentionUnit &unit, const float *qkv, float *out, Memory &memory) {
    const int64_t head_dim = shape.head_dim, group = shape.group(), rows = unit.count * group;
    const int64_t panels = (rows + PANEL - 1) / PANEL;
    int32_t first = INT_MAX, last = 0;
    fill_panels(shape, step, unit, window, qkv, memory, first, last);
    const Row<T> row(shape, pages, step.block_tables + unit.row * step.table_stride);
    unit_over_row<T>(shape, row, unit, memory, panels, first, last);
    for (int64_t i = 0; i < unit.heads * panels; i++) {
        const Panel &panel = memory.panels[i];
        const int64_t begin = i % panels * PANEL, heads_begin = (unit.head + i / panels) * group;
        for (int r = 0; r < panel.rows; r++) {
            const int64_t t = unit.first + (begin + r) / group, head = heads_begin + (begin + r) % group;
            const float *sums = memory.sums + (i * PANEL + r) * head_dim;
            float *to = out + (t * shape.heads + head) * head_dim;
            const v8 whole = set1(sum(panel.weight[r]));
            for (int64_t d = 0; d < head_dim; d += LANES) store(to + d, load(sums + d) / whole);
        }
    }
}

template <typename T>
void prefetch_as(const AttentionShape &shape, const shoal_step &step, const void *pages, int64_t window,
                 const AttentionUnit &unit) {
    const int64_t position = step.positions[unit.first], low = window ? std::max<int64_t>(0, position - window + 1) : 0;
    const Row<T> row(shape, pages, step.block_tables + unit.row * step.table_stride);
    const int64_t tile = row.strip_of(low) / TILE_STRIPS * TILE_STRIPS;
    const int64_t end = std::min(tile + TILE_STRIPS, row.strip_of(position) + 1);
    for (int64_t h = 0; h < unit.heads; h++) row.ahead(tile, end, unit.head + h).take_rest();
}

}  // namespace

int64_t AttentionShape::tile_tokens() const { return std::max<int64_t>(1, UNIT_ROWS / group()); }

int64_t cut_units(const AttentionShape &shape, const shoal_step &step, int threads, AttentionUnit *units) {
    const int32_t tokens = (int32_t)shape.tile_tokens(), kv_heads = (int32_t)shape.kv_heads;
    // A decode's heads lie side by side in each block: one unit reads them on, if there are units enough.
    const int32_t together = step.num_rows >= 4 * threads ? kv_heads : 1;
    int64_t count = 0;
    for (int64_t row = 0; row < step.num_rows; row++) {
        const int32_t end = step.row_offsets[row + 1];
        for (int32_t at = step.row_offsets[row]; at < end; at += tokens) {
            const int32_t taken = std::min(tokens, end - at), heads = taken == 1 ? together : 1;
            for (int32_t head = 0; head < kv_heads; head += heads) units[count++] = {(int32_t)row, at, taken, head, heads};
        }
    }
    return count;
}

size_t attention_scratch_bytes(const AttentionShape &shape) {
    const int64_t chunk = (shape.tile_tokens() * shape.group() + PANEL - 1) / PANEL;
    const int64_t decode = shape.kv_heads * ((shape.group() + PANEL - 1) / PANEL);
    const int64_t panels = std::max(chunk, decode);
    return panels * sizeof(Panel) + sizeof(float) * (2 * (panels * PANEL + TILE) * shape.head_dim + PANEL * TILE) + 64;
}

void write_kv(const AttentionShape &shape, const shoal_step &step, void *pages, const float *qkv, int64_t t,
              int64_t head, int64_t heads) {
    (shape.narrow ? write_kv_as<bf16> : write_kv_as<float>)(shape, step, pages, qkv, t, head, heads);
}

void attend(const AttentionShape &shape, const shoal_step &step, const void *pages, int64_t window,
            const AttentionUnit &unit, const float *qkv, float *out, void *scratch) {
    const int64_t panels = unit.heads * ((unit.count * shape.group() + PANEL - 1) / PANEL);
    Memory memory;
    memory.panels = (Panel *)(((uintptr_t)scratch + 63) & ~(uintptr_t)63);
    memory.queries = (float *)(memory.panels + panels);
    memory.sums = memory.queries + panels * PANEL * shape.head_dim;
    memory.scores = memory.sums + panels * PANEL * shape.head_dim;
    memory.wide = memory.scores + PANEL * TILE;
    (shape.narrow ? attend_as<bf16> : attend_as<float>)(shape, step, pages, window, unit, qkv, out, memory);
}

void prefetch(const AttentionShape &shape, const shoal_step &step, const void *pages, int64_t window,
              const AttentionUnit &unit) {
    (shape.narrow ? prefetch_as<bf16> : prefetch_as<float>)(shape, step, pages, window, unit);
}

}  // namespace shoal
