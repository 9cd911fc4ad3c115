// The register tile: some rows of x times some panels of weights, for all formats and instruction sets.
//
// An output is one chain of multiply-adds over the inputs in order, whatever the tile's shape: its bits do
// not depend on it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "panels.h"

namespace shoal {

constexpr int64_t kBytesAhead = 4096;  // fetched before they are used, where few rows leave memory no time

// A place in y, and what is to be put there.
struct Target {
    float *y;
    int64_t ldy;
    const float *bias;  // nullptr: none, or not yet
    bool resume;        // y holds the sums so far
};

template <class Body, int... J>
SHOAL_INLINE void unrolled(Body &&body, std::integer_sequence<int, J...>) {
    (body(std::integral_constant<int, J>{}), ...);
}

template <class V, int kRows, int kPanels>
struct Sums {
    static constexpr int kHalves = kPanel / V::kWidth;
    typename V::F at[kRows][kPanels][kHalves];

    template <class Each>
    SHOAL_INLINE void each(Each &&visit) {
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
            for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 2
                for (int h = 0; h < kHalves; ++h) visit(at[i][p][h], i, p * kPanel + h * V::kWidth);
    }
    SHOAL_INLINE void open(const Target &to) {
        if (to.resume) {
            each([&](typename V::F &sum, int i, int j) { sum = V::load(to.y + i * to.ldy + j); });
        } else {
            each([&](typename V::F &sum, int, int) { sum = V::zero(); });
        }
    }
    SHOAL_INLINE void close(const Target &to) {
        if (to.bias) {
            each([&](typename V::F &sum, int, int j) { sum = V::add(sum, V::load(to.bias + j)); });
        }
        each([&](typename V::F &sum, int i, int j) { V::store(to.y + i * to.ldy + j, sum); });
    }

    // `count` inputs of one reader a panel, from x's first of them on.
    template <int kStep, class Rows, class Reader>
    SHOAL_INLINE void add(const Reader (&readers)[kPanels], const Rows &x, int count = kStep) {
        unrolled(
            [&](auto input) __attribute__((always_inline)) {
                constexpr int J = decltype(input)::value;
                if (J >= count) return;
                if constexpr (kRows >= kPanels) {
                    add_weights_first<J>(readers, x);
                } else {
                    add_rows_first<J>(readers, x);
                }
            },
            std::make_integer_sequence<int, kStep>{});
    }

private:
    // The shorter of the two lists is held in registers, the longer one streams.
    template <int J, class Rows, class Reader>
    SHOAL_INLINE void add_weights_first(const Reader (&readers)[kPanels], const Rows &x) {
        typename V::F weight[kPanels][kHalves];
#pragma GCC unroll 8
        for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 2
            for (int h = 0; h < kHalves; ++h) weight[p][h] = V::held(readers[p].template value<J>(h));
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
            const auto row = V::broadcast(x.at(i, J));
#pragma GCC unroll 8
            for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 2
                for (int h = 0; h < kHalves; ++h) at[i][p][h] = V::fma(row, weight[p][h], at[i][p][h]);
        }
    }
    template <int J, class Rows, class Reader>
    SHOAL_INLINE void add_rows_first(const Reader (&readers)[kPanels], const Rows &x) {
        typename V::F row[kRows];
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) row[i] = V::broadcast(x.at(i, J));
#pragma GCC unroll 8
        for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 2
            for (int h = 0; h < kHalves; ++h) {
                const auto weight = readers[p].template value<J>(h);
#pragma GCC unroll 8
                for (int i = 0; i < kRows; ++i) at[i][p][h] = V::fma(row[i], weight, at[i][p][h]);
            }
    }
};

// Rows of x as the caller has them.
struct StridedRows {
    const float *x;
    int64_t stride;
    SHOAL_INLINE float at(int row, int input) const { return x[row * stride + input]; }
    SHOAL_INLINE StridedRows from(int64_t input) const { return {x + input, stride}; }
};

// Rows of one register tile, interleaved: one address for all of them, and no two that meet in a cache's set.
template <int kRows>
struct PackedRows {
    const float *x;
    SHOAL_INLINE float at(int row, int input) const { return x[input * kRows + row]; }
    SHOAL_INLINE PackedRows from(int64_t input) const { return {x + input * kRows}; }
};

// What is read next, fetched bit by bit while the present is used, so that memory and multipliers work at the
// same time: the processor's own guesses keep too few lines under way.
struct Ahead {
    const uint8_t *at;
    int64_t bytes;  // for each block that is worked on

    // The same number of lines each time, be it the same line again: a branch that is now and then taken
    // costs more.
    template <int kPanels>
    SHOAL_INLINE void fetch(int64_t stride) {
        constexpr int kLine = 64, kSecondLevel = 2;
        int64_t line = 0;
        do {
            for (int p = 0; p < kPanels; ++p) __builtin_prefetch(at + line + p * stride, 0, kSecondLevel);
        } while ((line += kLine) < bytes);
        at += bytes;
    }
};

// kRows rows of x times kPanels panels that lie `stride` bytes apart. Not inlined: it needs all registers.
// `to` by reference: copied whole after it was written piece by piece, it would wait for all stores under way.
template <class V, class P, int kRows, int kPanels, class Rows>
__attribute__((noinline)) void multiply(const uint8_t *panel, int64_t stride, int64_t inputs, const Rows x,
                                        const Target &to, Ahead ahead) {
    Sums<V, kRows, kPanels> sums;
    sums.open(to);
    if constexpr (P::kQuantised) {
        RunReader<V, P> readers[kPanels];
        for (int64_t b = 0; b < inputs / kBlock; ++b) {
            const uint8_t *header = panel + header_at<P>(b), *block = panel + block_at<P>(b);
            ahead.fetch<kPanels>(stride);
            for (int run = 0; run < kBlock / P::kScaleInputs; ++run) {
                for (int p = 0; p < kPanels; ++p)
                    readers[p].open(header + p * stride, block + p * stride, run);
#pragma GCC unroll 1
                for (int s = 0; s < P::kScaleInputs / 8; ++s) {
                    const int step = run * (P::kScaleInputs / 8) + s;
                    for (int p = 0; p < kPanels; ++p) readers[p].step(block + p * stride, step);
                    sums.template add<8>(readers, x.from(b * kBlock + step * 8));
                }
            }
        }
    } else {
        constexpr int kStep = P::kBlockInputs;
        typename P::template Reader<V> readers[kPanels];
        const int64_t whole = inputs / kStep;
        for (int64_t b = 0; b < whole; ++b) {
            ahead.fetch<kPanels>(stride);
            for (int p = 0; p < kPanels; ++p) readers[p].block = panel + p * stride + b * P::kBlockBytes;
            sums.template add<kStep>(readers, x.from(b * kStep));
        }
        if (const int rest = static_cast<int>(inputs % kStep)) {
            for (int p = 0; p < kPanels; ++p) readers[p].block = panel + p * stride + whole * P::kBlockBytes;
            sums.template add<kStep>(readers, x.from(whole * kStep), rest);
        }
    }
    sums.close(to);
}

// Weights of `blocks` blocks from `first` on as floats, [input][16].
template <class V, class P>
__attribute__((noinline)) void expand(const uint8_t *panel, int64_t first, int64_t blocks, float *out) {
    constexpr int kHalves = kPanel / V::kWidth;
    const auto put = [&](auto &reader, auto input) __attribute__((always_inline)) {
        constexpr int J = decltype(input)::value;
        for (int h = 0; h < kHalves; ++h)
            V::store(out + J * kPanel + h * V::kWidth, reader.template value<J>(h));
    };
    for (int64_t b = first; b < first + blocks; ++b) {
        const uint8_t *block = panel + block_at<P>(b);
        if constexpr (P::kQuantised) {
            constexpr int kSteps = P::kScaleInputs / 8;
            for (int run = 0; run < kBlock / P::kScaleInputs; ++run) {
                RunReader<V, P> reader;
                reader.open(panel + header_at<P>(b), block, run);
                for (int s = 0; s < kSteps; ++s) {
                    reader.step(block, run * kSteps + s);
                    unrolled([&](auto j) __attribute__((always_inline)) { put(reader, j); },
                             std::make_integer_sequence<int, 8>{});
                    out += 8 * kPanel;
                }
            }
        } else {
            const typename P::template Reader<V> reader{block};
            unrolled([&](auto j) __attribute__((always_inline)) { put(reader, j); },
                     std::make_integer_sequence<int, P::kBlockInputs>{});
            out += P::kBlockInputs * kPanel;
        }
    }
}

}  // namespace shoal
