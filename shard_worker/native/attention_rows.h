// The query rows of a unit: what they ask, and what they have summed up so far.
//
// Rows lie side by side, so that any that follow each other are a panel. What two rows hold never mixes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vec16.h"

namespace shoal {

constexpr int PANEL = 6;  // rows that one pass over keys and values serves

typedef float Word;  // 32 bits: a number or a pair

// Of each row the largest score so far, the sum of weights by lane, the sum of weighted values.
struct Sums {
    float *m, *weight, *values;  // [rows], [rows][WIDTH], [rows][width]

    void clear(int64_t rows, int64_t width) {
        std::fill(m, m + rows, -INFINITY);
        std::fill(weight, weight + rows * WIDTH, 0.0f);
        std::fill(values, values + rows * width, 0.0f);
    }
};

struct QueryRows {
    int64_t count, width;      // width: of a row's values, whole vectors
    bool joined;               // `before` holds something
    int32_t *position, *low;   // [count]: the row's own, the first that it sees
    Word *queries;             // [words / WIDTH, rounded up][count][WIDTH], scaled
    Sums now, before;          // of this piece of the context, of those before it

    static int64_t width_of(int64_t head_dim) { return (head_dim + WIDTH - 1) / WIDTH * WIDTH; }

    static size_t bytes(int64_t count, int64_t head_dim) {
        const int64_t words = count * (2 + 2 + 3 * width_of(head_dim) + 2 * WIDTH);
        return sizeof(QueryRows) + 64 + (words * sizeof(Word) + 63) / 64 * 64;
    }

    // In `memory`, which is that large: without content.
    static QueryRows *place(void *memory, int64_t count, int64_t head_dim) {
        QueryRows *rows = in(memory);
        rows->count = count, rows->width = width_of(head_dim), rows->joined = false;
        float *at = (float *)(((uintptr_t)(rows + 1) + 63) & ~(uintptr_t)63);
        auto take = [&](int64_t words) { return at += words, at - words; };
        rows->queries = take(count * rows->width);
        for (Sums *sums : {&rows->now, &rows->before})
            sums->values = take(count * rows->width), sums->weight = take(count * WIDTH);
        for (Sums *sums : {&rows->now, &rows->before}) sums->m = take(count);
        rows->position = (int32_t *)take(count), rows->low = (int32_t *)take(count);
        return rows;
    }

    // Those that were placed there.
    static QueryRows *in(void *memory) { return (QueryRows *)(((uintptr_t)memory + 63) & ~(uintptr_t)63); }
};

}  // namespace shoal
