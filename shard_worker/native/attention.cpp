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

#include "vec8.h"

namespace shoal {

namespace {

constexpr int PANEL = 6;                        // query rows of one product: 12 accumulators
constexpr int TILE_STRIPS = 8;                  // strips between two looks at the running maximum
constexpr int TILE = TILE_STRIPS * LANES;
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
struct Unit {
    Panel *panels;
    float *queries;  // per panel [head_dim][rows], scaled
    float *sums;     // [rows of the unit][head_dim]
    float *scores;   // [PANEL][TILE]
};

struct Strip {
    const void *keys;    // [head_dim] of 8 positions, block_pad apart
    const void *values;  // [valid][head_dim]
    int32_t position;    // of its first lane
    int32_t valid;       // lanes that are positions
};

template <typename T, int R, int C>
SHOAL_INLINE void scores_of(const float *queries, int64_t head_dim, int64_t pad, const Strip *strips, float *scores) {
    v8 acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = set1(0.0f);
    for (int64_t d = 0; d < head_dim; d++) {
        v8 key[C];
        for (int c = 0; c < C; c++) key[c] = load((const T *)strips[c].keys + d * pad);
        for (int r = 0; r < R; r++) {
            v8 q = set1(queries[d * R + r]);
            for (int c = 0; c < C; c++) acc[r][c] = fma(q, key[c], acc[r][c]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(scores + r * TILE + c * LANES, acc[r][c]);
}

template <typename T, int R, int C>
SHOAL_INLINE void add_values(const Panel &panel, const Strip *strips, int count, const float *weights, float *sums,
                             int64_t head_dim, int64_t at) {
    v8 acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++)
            acc[r][c] = load(sums + r * head_dim + at + c * LANES) * set1(panel.alpha[r]);
    for (int s = 0; s < count; s++) {
        const T *values = (const T *)strips[s].values + at;
        int lanes = std::min(strips[s].valid, panel.last - strips[s].position + 1);
        for (int j = 0; j < lanes; j++, values += head_dim) {
            v8 value[C];
            for (int c = 0; c < C; c++) value[c] = load(values + c * LANES);
            for (int r = 0; r < R; r++) {
                v8 w = set1(weights[r * TILE + s * LANES + j]);
                for (int c = 0; c < C; c++) acc[r][c] = fma(w, value[c], acc[r][c]);
            }
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

template <typename T, int R>
void panel_over_tile(Panel &panel, const float *queries, float *sums, float *scores, const Strip *strips, int count,
                     int64_t head_dim, int64_t pad, float softcap) {
    constexpr int WIDE = R <= 3 ? 4 : 2;
    int s = 0;
    for (; s + WIDE <= count; s += WIDE)
        scores_of<T, R, WIDE>(queries, head_dim, pad, strips + s, scores + s * LANES);
    for (; s < count; s++) scores_of<T, R, 1>(queries, head_dim, pad, strips + s, scores + s * LANES);
    soften(panel, strips, count, softcap, scores);
    int64_t at = 0;
    for (; at + WIDE * LANES <= head_dim; at += WIDE * LANES)
        add_values<T, R, WIDE>(panel, strips, count, scores, sums, head_dim, at);
    for (; at < head_dim; at += LANES) add_values<T, R, 1>(panel, strips, count, scores, sums, head_dim, at);
}

// Walks tiles outside and panels inside: a tile's keys and values serve all of the unit from the first cache.
template <typename T>
void unit_over_row(const AttentionShape &shape, const shoal_layer_kv &kv, const int32_t *table, int64_t kv_head,
                   Unit &unit, int panels, int32_t first, int32_t last) {
    const int64_t head_dim = shape.head_dim, size = shape.block_size, pad = shape.block_pad(), per_block = pad / LANES;
    const T *keys = (const T *)kv.keys + kv_head * shape.num_blocks * head_dim * pad;
    const T *values = (const T *)kv.values + kv_head * shape.num_blocks * head_dim * size;
    auto strip_of = [&](int64_t position) { return position / size * per_block + position % size / LANES; };
    const int64_t end_strip = strip_of(last) + 1;
    for (int64_t tile = strip_of(first) / TILE_STRIPS * TILE_STRIPS; tile < end_strip; tile += TILE_STRIPS) {
        Strip strips[TILE_STRIPS];
        int count = (int)std::min<int64_t>(TILE_STRIPS, end_strip - tile);
        for (int s = 0; s < count; s++) {
            int64_t block = (tile + s) / per_block, within = (tile + s) % per_block * LANES;
            int64_t page = table[block];
            strips[s].keys = keys + page * head_dim * pad + within;
            strips[s].values = values + (page * size + within) * head_dim;
            strips[s].position = (int32_t)(block * size + within);
            strips[s].valid = (int32_t)std::min<int64_t>(LANES, size - within);
        }
        for (int i = 0; i < panels; i++) {
            Panel &panel = unit.panels[i];
            int seen = count;
            while (seen && strips[seen - 1].position > panel.last) seen--;
            if (!seen || strips[seen - 1].position + LANES <= panel.first) continue;
            const float *queries = unit.queries + (int64_t)i * PANEL * head_dim;
            float *sums = unit.sums + (int64_t)i * PANEL * head_dim;
            auto over = [&](auto rows) {
                panel_over_tile<T, decltype(rows)::value>(panel, queries, sums, unit.scores, strips, seen, head_dim, pad,
                                                          shape.softcap);
            };
            switch (panel.rows) {
                case 1: over(std::integral_constant<int, 1>()); break;
                case 2: over(std::integral_constant<int, 2>()); break;
                case 3: over(std::integral_constant<int, 3>()); break;
                case 4: over(std::integral_constant<int, 4>()); break;
                case 5: over(std::integral_constant<int, 5>()); break;
                default: over(std::integral_constant<int, 6>()); break;
            }
        }
    }
}

template <typename T>
void write_kv_as(const AttentionShape &shape, const shoal_step &step, const shoal_layer_kv &kv, const float *qkv,
                 int64_t first, int64_t end) {
    const int64_t head_dim = shape.head_dim, size = shape.block_size, pad = shape.block_pad();
    const v8 largest = set1(FLT_MAX), least = set1(-FLT_MAX);
    for (int64_t t = first; t < end; t++) {
        const int64_t page = step.kv_slots[t] / size, within = step.kv_slots[t] % size;
        const float *k = qkv + t * shape.qkv_width() + shape.heads * head_dim;
        const float *v = k + shape.kv_heads * head_dim;
        for (int64_t h = 0; h < shape.kv_heads; h++, k += head_dim, v += head_dim) {
            T *keys = (T *)kv.keys + (h * shape.num_blocks + page) * head_dim * pad + within;
            T *values = (T *)kv.values + ((h * shape.num_blocks + page) * size + within) * head_dim;
            for (int64_t d = 0; d < head_dim; d++) store1(keys + d * pad, k[d]);
            for (int64_t d = 0; d < head_dim; d += LANES) {
                v8 x = load(v + d);
                x = choose(x == x, x, set1(0.0f));
                store(values + d, max(min(x, largest), least));
            }
        }
    }
}

}  // namespace

int64_t AttentionShape::tile_tokens() const { return std::max<int64_t>(1, UNIT_ROWS / group()); }

int64_t cut_spans(const AttentionShape &shape, const shoal_step &step, AttentionSpan *spans) {
    const int32_t tokens = (int32_t)shape.tile_tokens();
    int64_t count = 0;
    for (int64_t row = 0; row < step.num_rows; row++)
        for (int32_t at = step.row_offsets[row]; at < step.row_offsets[row + 1]; at += tokens)
            spans[count++] = {(int32_t)row, at, std::min(tokens, step.row_offsets[row + 1] - at)};
    return count;
}

size_t attention_scratch_bytes(const AttentionShape &shape) {
    const int64_t rows = shape.tile_tokens() * shape.group(), panels = (rows + PANEL - 1) / PANEL;
    return panels * sizeof(Panel) + sizeof(float) * (2 * panels * PANEL * shape.head_dim + PANEL * TILE) + 64;
}

void write_kv(const AttentionShape &shape, const shoal_step &step, const shoal_layer_kv &kv, const float *qkv,
              int64_t first, int64_t end) {
    if (shape.narrow)
        write_kv_as<bf16>(shape, step, kv, qkv, first, end);
    else
        write_kv_as<float>(shape, step, kv, qkv, first, end);
}

void attend(const AttentionShape &shape, const shoal_step &step, const shoal_layer_kv &kv, int64_t window,
            const AttentionSpan &span, int64_t kv_head, const float *qkv, float *out, void *scratch) {
    const int64_t head_dim = shape.head_dim, group = shape.group();
    const int64_t rows = span.count * group, panels = (rows + PANEL - 1) / PANEL;
    Unit unit;
    unit.panels = (Panel *)(((uintptr_t)scratch + 63) & ~(uintptr_t)63);
    unit.queries = (float *)(unit.panels + panels);
    unit.sums = unit.queries + panels * PANEL * head_dim;
    unit.scores = unit.sums + panels * PANEL * head_dim;
    std::fill(unit.sums, unit.sums + rows * head_dim, 0.0f);
    int32_t first = INT_MAX, last = 0;
    for (int64_t i = 0; i < panels; i++) {
        Panel &panel = unit.panels[i];
        panel.rows = (int)std::min<int64_t>(PANEL, rows - i * PANEL);
        panel.first = INT_MAX, panel.last = 0;
        float *queries = unit.queries + i * PANEL * head_dim;
        for (int r = 0; r < panel.rows; r++) {
            const int64_t t = span.first + (i * PANEL + r) / group, head = kv_head * group + (i * PANEL + r) % group;
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
    const int32_t *table = step.block_tables + span.row * step.table_stride;
    if (shape.narrow)
        unit_over_row<bf16>(shape, kv, table, kv_head, unit, (int)panels, first, last);
    else
        unit_over_row<float>(shape, kv, table, kv_head, unit, (int)panels, first, last);
    for (int64_t i = 0; i < rows; i++) {
        const int64_t t = span.first + i / group, head = kv_head * group + i % group;
        const float *sums = unit.sums + i * head_dim;
        float *to = out + (t * shape.heads + head) * head_dim;
        const v8 whole = set1(sum(unit.panels[i / PANEL].weight[i % PANEL]));
        for (int64_t d = 0; d < head_dim; d += LANES) store(to + d, load(sums + d) / whole);
    }
}

}  // namespace shoal
