// A panel: up to PANEL query rows over one tile of keys and values, with an online softmax.
//
// Every sum has one order, whatever stands beside a row: scores over the dimensions, weights and values over the
// positions. What a row may not see weighs exactly 0 and adds exactly 0, so that a panel may walk further than one of
// its rows. Types T of keys and values: float, or bfloat16 in pairs, with queries and weights rounded to it and scores
// in powers of two.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "attention_rows.h"
#include "vec16.h"

namespace shoal {

constexpr int TILE_STRIPS = 4;  // strips of 16 positions between two looks at the running maximum
constexpr int TILE = TILE_STRIPS * WIDTH;

// Up to 16 positions of one block.
struct Strip {
    const Word *keys;    // per dimension (pair) 16 positions, block_pad apart
    const Word *values;  // per position (pair) [head_dim]
    int32_t position;    // of its first lane
    int32_t valid;       // lanes that are positions
};

struct Panel {
    const QueryRows *of;
    int begin, rows;
    int count;      // strips that any of the rows sees
    int32_t last;   // position that any of them sees
    bool all_seen;  // the whole tile, by each of them
    float *scores;  // [PANEL][TILE]: scores, then weights in T
    float *best;    // [WIDTH]: each row's largest of these scores
};

template <class V, typename T>
struct PanelKernel {
    typedef typename V::F F;
    static constexpr int K = PER_WORD<T>;
    static constexpr float LOG2_E = 1.44269504088896341f;

    template <int R>
    static constexpr int WIDEST = V::SUMS / R >= 4 ? 4 : V::SUMS / R >= 2 ? 2 : 1;

    // What queries are multiplied by, and what then is left to do to a score.
    static float query_scale(float scale, float softcap) { return K == 2 && softcap == 0.0f ? scale * LOG2_E : scale; }
    SHOAL_INLINE F power(F x) {
        if constexpr (K == 2)
            return V::exp2(x);
        else
            return V::exp(x);
    }

    // `next`: strips that come after these; they come into the cache step by step.
    template <int R, int C>
    SHOAL_INLINE void scores_of(const Panel &panel, int64_t words, int64_t pad, const Strip *strips, const Strip *next,
                                float *scores) {
        F acc[R][C];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) acc[r][c] = V::set1(0.0f);
        const Word *keys[C], *ahead[C];
        for (int c = 0; c < C; c++) keys[c] = strips[c].keys, ahead[c] = next[c].keys;
        const Word *queries = panel.of->queries + panel.begin * WIDTH;
        const int64_t stride = panel.of->count * WIDTH;
        for (int64_t at = 0; at < words; at += WIDTH, queries += stride) {
            const int64_t some = std::min<int64_t>(WIDTH, words - at);
            for (int64_t d = 0; d < some; d++) {
                F key[C];
                for (int c = 0; c < C; c++) {
                    key[c] = V::load(keys[c] + (at + d) * pad);
                    __builtin_prefetch(ahead[c] + (at + d) * pad);
                }
                for (int r = 0; r < R; r++) {
                    const F query = V::set1(queries[r * WIDTH + d]);
                    for (int c = 0; c < C; c++) acc[r][c] = V::template multiply_add<T>(key[c], query, acc[r][c]);
                }
            }
        }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) V::store(scores + r * TILE + c * WIDTH, acc[r][c]);
        if constexpr (C == TILE_STRIPS) {  // where all are seen they count as they are
            F best[R];
            for (int r = 0; r < R; r++) {
                best[r] = V::set1(-INFINITY);
                for (int c = 0; c < C; c++) best[r] = V::max(acc[r][c], best[r]);
            }
            V::store(panel.best, V::template largest_of<R>(best));
        }
    }

    // C vectors of dimensions from `at` on; HALF: the one is eight dimensions.
    template <int R, int C, bool ALL, bool HALF = false>
    SHOAL_INLINE void add_values(const Panel &panel, const Strip *strips, const Strip *next, const float *alpha,
                                 int64_t head_dim, int64_t at) {
        const int64_t width = panel.of->width;
        float *sums = panel.of->now.values + panel.begin * width + at;
        F acc[R][C];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) acc[r][c] = V::load(sums + r * width + c * WIDTH) * V::set1(alpha[r]);
        for (int s = 0; s < (ALL ? TILE_STRIPS : panel.count); s++) {
            const Word *values = strips[s].values + at, *ahead = next[s].values + at;
            const int lanes = ALL ? WIDTH : std::min(strips[s].valid, panel.last - strips[s].position + 1);
            const Word *w = panel.scores + s * (WIDTH / K);
            // Not unrolled: what is asked for ahead comes little by little, not in a burst that waits for itself.
#pragma GCC unroll 1
            for (int j = 0; j < (lanes + K - 1) / K; j++, values += head_dim, ahead += head_dim) {
                F value[C];
                for (int c = 0; c < C; c++) {
                    value[c] = HALF ? V::load_half(values) : V::load(values + c * WIDTH);
                    __builtin_prefetch(ahead + c * WIDTH);
                }
                for (int r = 0; r < R; r++) {
                    const F weight = V::set1(w[r * TILE + j]);
                    for (int c = 0; c < C; c++) acc[r][c] = V::template multiply_add<T>(value[c], weight, acc[r][c]);
                }
            }
        }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) V::store(sums + r * width + c * WIDTH, acc[r][c]);
    }

    // Scores as they count: capped, and only what the row sees; and the largest of each row.
    template <int R>
    SHOAL_INLINE void prepare(const Panel &panel, const Strip *strips, float softcap) {
        F best[R];
        for (int r = 0; r < R; r++) {
            const int32_t low = panel.of->low[panel.begin + r], position = panel.of->position[panel.begin + r];
            best[r] = V::set1(-INFINITY);
            for (int s = 0; s < panel.count; s++) {
                float *at = panel.scores + r * TILE + s * WIDTH;
                const Strip &strip = strips[s];
                F x = V::load(at);
                if (softcap != 0.0f)
                    x = V::tanh(x / V::set1(softcap)) * V::set1(K == 2 ? softcap * LOG2_E : softcap);
                const int from = std::max(0, low - strip.position);
                const int to = std::min(strip.valid, position - strip.position + 1);
                if (from > 0 || to < WIDTH) x = V::only(x, std::min(from, WIDTH), std::max(to, 0));
                V::store(at, x);
                best[r] = V::max(x, best[r]);
            }
        }
        V::store(panel.best, V::template largest_of<R>(best));
    }

    // Scores to weights, in place and in T; the panel's largest scores and sums of weights move on. `alpha`: what sums
    // so far are to be multiplied by.
    template <int R, bool ALL>
    SHOAL_INLINE void soften(const Panel &panel, const Strip *strips, float softcap, float *alpha) {
        const int count = ALL ? TILE_STRIPS : panel.count;
        float *m = panel.of->now.m + panel.begin, *weights = panel.of->now.weight + panel.begin * WIDTH;
        if (!ALL || softcap != 0.0f || WIDEST<R> < TILE_STRIPS) prepare<R>(panel, strips, softcap);
        const F last = V::template load_some<R>(m), largest = V::max(V::load(panel.best), last);
        V::template store_some<R>(m, largest);
        // Where nothing was seen so far weights are 0, not e^(inf - inf).
        alignas(64) float base[WIDTH];
        V::store(base, V::or_zero(largest));
        V::store(alpha, power(last - V::load(base)));
        const F one = ones();
        for (int r = 0; r < R; r++) {
            float *row = panel.scores + r * TILE;
            const F from = V::set1(base[r]);
            F weight = V::load(weights + r * WIDTH) * V::set1(alpha[r]);
            for (int s = 0; s < count; s += K) {
                F x = power(V::load(row + s * WIDTH) - from);
                if constexpr (K == 2) {
                    const bool both = ALL || s + 1 < count;
                    x = V::pack(x, both ? power(V::load(row + (s + 1) * WIDTH) - from) : V::set1(0.0f));
                }
                V::store(row + s / K * WIDTH, x);
                weight = V::template multiply_add<T>(x, one, weight);
            }
            V::store(weights + r * WIDTH, weight);
        }
    }

    SHOAL_INLINE F ones() {
        const uint32_t bits = K == 2 ? 0x3f803f80u : 0x3f800000u;
        Word word;
        std::memcpy(&word, &bits, sizeof word);
        return V::set1(word);
    }

    template <int R>
    static void score(const Panel &panel, const Strip *strips, const Strip *next, int64_t head_dim, int64_t pad) {
        const int count = panel.count;
        // Strips are in step with each other: one more costs less than one alone. What is past the last is not used.
        for (int s = 0; s < count;) {
            auto some = [&](auto taken) {
                constexpr int C = decltype(taken)::value;
                scores_of<R, C>(panel, head_dim / K, pad, strips + s, next + s, panel.scores + s * WIDTH);
                s += C;
            };
            if (WIDEST<R> == 4 && count - s > 2)
                some(std::integral_constant<int, WIDEST<R>>());
            else if (WIDEST<R> > 1 && count - s > 1)
                some(std::integral_constant<int, std::min(WIDEST<R>, 2)>());
            else
                some(std::integral_constant<int, 1>());
        }
    }

    template <int R, bool ALL>
    SHOAL_INLINE void weigh(const Panel &panel, const Strip *strips, const Strip *next, int64_t head_dim,
                            float softcap) {
        alignas(64) float alpha[WIDTH];
        soften<R, ALL>(panel, strips, softcap, alpha);
        int64_t at = 0;
        for (; at + WIDEST<R> * WIDTH <= head_dim; at += WIDEST<R> * WIDTH)
            add_values<R, WIDEST<R>, ALL>(panel, strips, next, alpha, head_dim, at);
        for (; at + WIDTH <= head_dim; at += WIDTH)
            add_values<R, 1, ALL>(panel, strips, next, alpha, head_dim, at);
        if (at < head_dim) add_values<R, 1, ALL, true>(panel, strips, next, alpha, head_dim, at);
    }

    template <int R>
    static void weigh_rows(const Panel &panel, const Strip *strips, const Strip *next, int64_t head_dim,
                           float softcap) {
        if (panel.all_seen)
            weigh<R, true>(panel, strips, next, head_dim, softcap);
        else
            weigh<R, false>(panel, strips, next, head_dim, softcap);
    }

    // The panel's scores; then, of those, weights and the values that they weigh.
    static void scores(const Panel &panel, const Strip *strips, const Strip *next, int64_t head_dim, int64_t pad) {
        static constexpr decltype(&score<1>) by_rows[PANEL] = {score<1>, score<2>, score<3>,
                                                               score<4>, score<5>, score<6>};
        by_rows[panel.rows - 1](panel, strips, next, head_dim, pad);
    }
    static void values(const Panel &panel, const Strip *strips, const Strip *next, int64_t head_dim, float softcap) {
        static constexpr decltype(&weigh_rows<1>) by_rows[PANEL] = {weigh_rows<1>, weigh_rows<2>, weigh_rows<3>,
                                                                    weigh_rows<4>, weigh_rows<5>, weigh_rows<6>};
        by_rows[panel.rows - 1](panel, strips, next, head_dim, softcap);
    }

    // A piece of the context is done: it joins those before it.
    static void join(QueryRows &rows) {
        if (!rows.joined)
            std::swap(rows.now, rows.before), rows.joined = true;
        else
            add(rows.before, rows.now, rows.count, rows.width);
        rows.now.clear(rows.count, rows.width);
    }

    // to += from, both seen from the larger of their largest scores.
    static void add(const Sums &to, const Sums &from, int64_t rows, int64_t width) {
        for (int64_t r = 0; r < rows; r++) {
            const F m = V::max(V::set1(to.m[r]), V::set1(from.m[r])), base = V::or_zero(m);
            const F a = power(V::set1(to.m[r]) - base), b = power(V::set1(from.m[r]) - base);
            V::template store_some<1>(to.m + r, m);
            auto joined = [&](float *x, const float *y) { V::store(x, V::fma(V::load(y), b, V::load(x) * a)); };
            joined(to.weight + r * WIDTH, from.weight + r * WIDTH);
            for (int64_t d = r * width; d < (r + 1) * width; d += WIDTH) joined(to.values + d, from.values + d);
        }
    }

    // One row's result, when all pieces are joined or there is but one.
    static void finish(const QueryRows &rows, int64_t r, int64_t head_dim, float *out) {
        const Sums &all = rows.joined ? rows.before : rows.now;
        const float *values = all.values + r * rows.width;
        const F whole = V::set1(V::sum(V::load(all.weight + r * WIDTH)));
        int64_t d = 0;
        for (; d + WIDTH <= head_dim; d += WIDTH) V::store(out + d, V::load(values + d) / whole);
        if (d < head_dim) V::store_half(out + d, V::load_half(values + d) / whole);
    }

    // A row's query, [head_dim].
    static void take_query(const float *q, float scale, int64_t head_dim, const QueryRows &rows, int64_t r) {
        const F factor = V::set1(scale);
        auto dims = [&](int64_t d) {
            if (d >= head_dim) return V::set1(0.0f);
            return (d + WIDTH > head_dim ? V::load_half(q + d) : V::load(q + d)) * factor;
        };
        Word *to = rows.queries + r * WIDTH;
        for (int64_t d = 0; d < head_dim; d += K * WIDTH, to += rows.count * WIDTH) {
            if constexpr (K == 2)
                V::store(to, V::pack(dims(d), dims(d + WIDTH)));
            else
                V::store(to, dims(d));
        }
    }
};

}  // namespace shoal
