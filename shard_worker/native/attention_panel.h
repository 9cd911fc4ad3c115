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

#include "vec16.h"

namespace shoal {

constexpr int PANEL = 6;
constexpr int TILE_STRIPS = 4;  // strips of 16 positions between two looks at the running maximum
constexpr int TILE = TILE_STRIPS * WIDTH;

typedef float Word;  // 32 bits: a number or a pair

// Up to 16 positions of one block.
struct Strip {
    const Word *keys;    // per dimension (pair) 16 positions, block_pad apart
    const Word *values;  // per position (pair) [head_dim]
    int32_t position;    // of its first lane
    int32_t valid;       // lanes that are positions
};

// Per row: the largest score so far, the sum of weights by lane.
struct Softmax {
    float m[WIDTH];
    float weight[PANEL][WIDTH];

    void clear() {
        std::fill(m, m + WIDTH, -INFINITY);
        std::fill(&weight[0][0], &weight[0][0] + PANEL * WIDTH, 0.0f);
    }
};

struct Panel {
    int rows;            // query rows: (token, head of the group)
    int begin;           // the first of them in the unit
    bool joined;         // `before` holds something
    int32_t first, last;  // what any of the rows sees
    int32_t position[PANEL];
    int32_t low[PANEL];  // first position that the row sees
    float alpha[WIDTH];
    Softmax now, before;  // of this piece of the context, of those before it
    Word *queries;        // [head_dim (pairs)][rows], scaled
    float *sums, *sums_before;  // [PANEL][dim_pad]
};

template <class V, typename T>
struct PanelKernel {
    typedef typename V::F F;
    static constexpr int K = PER_WORD<T>;
    static constexpr float LOG2_E = 1.44269504088896341f;

    static int64_t dim_pad(int64_t head_dim) { return (head_dim + WIDTH - 1) / WIDTH * WIDTH; }

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
    SHOAL_INLINE void scores_of(const Word *queries, int64_t steps, int64_t pad, const Strip *strips,
                                       const Strip *next, float *scores) {
        F acc[R][C];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) acc[r][c] = V::set1(0.0f);
        const Word *keys[C], *ahead[C];
        for (int c = 0; c < C; c++) keys[c] = strips[c].keys, ahead[c] = next[c].keys;
        for (int64_t d = 0; d < steps; d++) {
            F key[C];
            for (int c = 0; c < C; c++) {
                key[c] = V::load(keys[c] + d * pad);
                __builtin_prefetch(ahead[c] + d * pad);
            }
            for (int r = 0; r < R; r++) {
                const F query = V::set1(queries[d * R + r]);
                for (int c = 0; c < C; c++) acc[r][c] = V::template multiply_add<T>(key[c], query, acc[r][c]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) V::store(scores + r * TILE + c * WIDTH, acc[r][c]);
    }

    // C vectors of dimensions from `at` on; HALF: the one is eight dimensions.
    template <int R, int C, bool HALF = false>
    SHOAL_INLINE void add_values(Panel &panel, const Strip *strips, const Strip *next, int count,
                                        const float *weights, int64_t head_dim, int64_t at) {
        const int64_t width = dim_pad(head_dim);
        F acc[R][C];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++)
                acc[r][c] = V::load(panel.sums + r * width + at + c * WIDTH) * V::set1(panel.alpha[r]);
        for (int s = 0; s < count; s++) {
            const Word *values = strips[s].values + at, *ahead = next[s].values + at;
            const int lanes = std::min(strips[s].valid, panel.last - strips[s].position + 1);
            const Word *w = weights + s * (WIDTH / K);
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
            for (int c = 0; c < C; c++) V::store(panel.sums + r * width + at + c * WIDTH, acc[r][c]);
    }

    // Scores to weights, in place and in T; the panel's largest scores and sums of weights move on.
    template <int R>
    SHOAL_INLINE void soften(Panel &panel, const Strip *strips, int count, float softcap, float *scores) {
        Softmax &now = panel.now;
        alignas(64) float m[WIDTH];
        std::copy(now.m, now.m + WIDTH, m);
        for (int r = 0; r < R; r++) {
            F best = V::set1(now.m[r]);
            for (int s = 0; s < count; s++) {
                float *at = scores + r * TILE + s * WIDTH;
                const Strip &strip = strips[s];
                F x = V::load(at);
                if (softcap != 0.0f) {
                    x = V::tanh(x / V::set1(softcap)) * V::set1(K == 2 ? softcap * LOG2_E : softcap);
                    V::store(at, x);
                }
                const int from = std::max(0, panel.low[r] - strip.position);
                const int to = std::min(strip.valid, panel.position[r] - strip.position + 1);
                if (from > 0 || to < WIDTH) {
                    x = V::only(x, std::min(from, WIDTH), std::max(to, 0));
                    V::store(at, x);
                }
                best = V::max(x, best);
            }
            now.m[r] = V::max(best);
        }
        // Where nothing was seen so far weights are 0, not e^(inf - inf).
        alignas(64) float base[WIDTH];
        for (int r = 0; r < WIDTH; r++) base[r] = now.m[r] == -INFINITY ? 0.0f : now.m[r];
        V::store(panel.alpha, power(V::load(m) - V::load(base)));
        const F one = ones();
        for (int r = 0; r < R; r++) {
            float *row = scores + r * TILE;
            const F largest = V::set1(base[r]);
            F weight = V::load(now.weight[r]) * V::set1(panel.alpha[r]);
            for (int s = 0; s < count; s++) V::store((T *)row + s * WIDTH, power(V::load(row + s * WIDTH) - largest));
            if (count % K) V::store((T *)row + count * WIDTH, V::set1(0.0f));
            for (int i = 0; i < count; i += K)
                weight = V::template multiply_add<T>(V::load(row + i / K * WIDTH), one, weight);
            V::store(now.weight[r], weight);
        }
    }

    SHOAL_INLINE F ones() {
        const uint32_t bits = K == 2 ? 0x3f803f80u : 0x3f800000u;
        Word word;
        std::memcpy(&word, &bits, sizeof word);
        return V::set1(word);
    }

    template <int R>
    static void over_tile(Panel &panel, const Strip *strips, const Strip *next, int count, int64_t head_dim,
                          int64_t pad, float softcap, float *scores) {
        constexpr int WIDEST = V::SUMS / R >= 4 ? 4 : V::SUMS / R >= 2 ? 2 : 1;
        // Strips are in step with each other: one more costs less than one alone. What is past the last is not used.
        for (int s = 0; s < count;) {
            auto some = [&](auto taken) {
                constexpr int C = decltype(taken)::value;
                scores_of<R, C>(panel.queries, head_dim / K, pad, strips + s, next + s, scores + s * WIDTH);
                s += C;
            };
            if (WIDEST == 4 && count - s > 2)
                some(std::integral_constant<int, WIDEST>());
            else if (WIDEST > 1 && count - s > 1)
                some(std::integral_constant<int, std::min(WIDEST, 2)>());
            else
                some(std::integral_constant<int, 1>());
        }
        soften<R>(panel, strips, count, softcap, scores);
        int64_t at = 0;
        for (; at + WIDEST * WIDTH <= head_dim; at += WIDEST * WIDTH)
            add_values<R, WIDEST>(panel, strips, next, count, scores, head_dim, at);
        for (; at + WIDTH <= head_dim; at += WIDTH)
            add_values<R, 1>(panel, strips, next, count, scores, head_dim, at);
        if (at < head_dim) add_values<R, 1, true>(panel, strips, next, count, scores, head_dim, at);
    }

    static void over_tile(Panel &panel, const Strip *strips, const Strip *next, int count, int64_t head_dim,
                          int64_t pad, float softcap, float *scores) {
        static constexpr decltype(&over_tile<1>) by_rows[PANEL] = {over_tile<1>, over_tile<2>, over_tile<3>,
                                                                   over_tile<4>, over_tile<5>, over_tile<6>};
        by_rows[panel.rows - 1](panel, strips, next, count, head_dim, pad, softcap, scores);
    }

    // A piece of the context is done: it joins those before it.
    static void join(Panel &panel, int64_t head_dim) {
        const int64_t width = dim_pad(head_dim);
        if (!panel.joined) {
            std::swap(panel.sums, panel.sums_before);
            panel.before = panel.now;
            panel.joined = true;
        } else {
            add(panel.before, panel.sums_before, panel.now, panel.sums, panel.rows, width);
        }
        clear(panel, head_dim);
    }

    // to += from, both seen from the larger of their largest scores.
    static void add(Softmax &to, float *sums_to, const Softmax &from, const float *sums, int rows, int64_t width) {
        alignas(64) float base[WIDTH], ours[WIDTH], theirs[WIDTH];
        const F m = V::max(V::load(to.m), V::load(from.m));
        V::store(base, m);
        for (float &x : base) x = x == -INFINITY ? 0.0f : x;
        V::store(ours, power(V::load(to.m) - V::load(base)));
        V::store(theirs, power(V::load(from.m) - V::load(base)));
        V::store(to.m, m);
        for (int r = 0; r < rows; r++) {
            const F a = V::set1(ours[r]), b = V::set1(theirs[r]);
            V::store(to.weight[r], V::fma(V::load(from.weight[r]), b, V::load(to.weight[r]) * a));
            for (int64_t d = r * width; d < (r + 1) * width; d += WIDTH)
                V::store(sums_to + d, V::fma(V::load(sums + d), b, V::load(sums_to + d) * a));
        }
    }

    static void clear(Panel &panel, int64_t head_dim) {
        panel.now.clear();
        std::fill(panel.sums, panel.sums + PANEL * dim_pad(head_dim), 0.0f);
    }

    // One row's result, when all pieces are joined or there is but one.
    static void finish(const Panel &panel, int r, int64_t head_dim, float *out) {
        const Softmax &all = panel.joined ? panel.before : panel.now;
        const float *sums = (panel.joined ? panel.sums_before : panel.sums) + r * dim_pad(head_dim);
        const F whole = V::set1(V::sum(V::load(all.weight[r])));
        int64_t d = 0;
        for (; d + WIDTH <= head_dim; d += WIDTH) V::store(out + d, V::load(sums + d) / whole);
        if (d < head_dim) V::store_half(out + d, V::load_half(sums + d) / whole);
    }

    // A row's query, [head_dim], to the words of row r of R.
    static void take_query(const float *q, float scale, int64_t head_dim, Word *queries, int r, int R) {
        const F factor = V::set1(scale);
        alignas(64) T narrow[WIDTH];
        Word words[WIDTH / K];
        for (int64_t d = 0; d < head_dim; d += WIDTH) {
            const bool half = d + WIDTH > head_dim;
            V::store(narrow, (half ? V::load_half(q + d) : V::load(q + d)) * factor);
            std::memcpy(words, narrow, sizeof words);
            for (int i = 0; i < (half ? WIDTH / 2 : WIDTH) / K; i++) queries[(d / K + i) * R + r] = words[i];
        }
    }
};

}  // namespace shoal
