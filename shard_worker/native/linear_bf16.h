// Products of bfloat16 weights with x rounded to bfloat16, two inputs a multiply-add.
//
// The rule of linear.h holds: an output is one chain over the pairs of inputs in order, whatever the tile. The
// instruction takes subnormal numbers for zero and sums the two products of a pair with roundings of its own.
//
// Weights are never expanded: a group of panels is read from front to back for each tile of rows, and the next
// group is fetched meanwhile, so that tiles find theirs in the second-level cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear_kernels.h"

namespace shoal {

constexpr int64_t kPairsAtOnce = 2;  // a block of Bf16Panel
constexpr int kPairHeightMax = 8;
constexpr int kUnaidedRows = 2;  // so few leave the memory no time between two reads: the processor guesses them
constexpr int64_t kPairRowsBytes = 384 << 10;  // of x, beside the panels in the second-level cache

// Rows of x as words of two inputs, the earlier one low; what pads a row is zero.
struct PairRows {
    const uint32_t *words;
    int64_t stride;
    SHOAL_INLINE PairRows from(int64_t row) const { return {words + row * stride, stride}; }
};

// An odd number of cache lines, so that the rows of a tile meet in no set.
constexpr int64_t pair_stride(int64_t inputs) {
    constexpr int64_t kLine = 32;
    return ((inputs + kLine - 1) / kLine | 1) * kLine / 2;
}

inline int64_t pair_rows_cached(int64_t inputs) {
    const int64_t rows = kPairRowsBytes / (pair_stride(inputs) * static_cast<int64_t>(sizeof(uint32_t)));
    return std::max<int64_t>(1, rows / kPairHeightMax) * kPairHeightMax;
}

// Bytes of scratch for m rows.
inline size_t pair_scratch_bytes(int64_t inputs, int64_t m) {
    const int64_t rows = std::clamp<int64_t>(m, 1, pair_rows_cached(inputs));
    return static_cast<size_t>(rows * pair_stride(inputs)) * sizeof(uint32_t);
}

#if defined(SHOAL_HAS_AVX512) && defined(__AVX512BF16__)
#define SHOAL_HAS_AVX512_BF16 1

// `mask`: of 32 inputs.
SHOAL_INLINE __m512i rounded(const float *x, uint32_t mask) {
    const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), x);
    const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), x + 16);
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

inline void round_row(const float *x, int64_t inputs, uint32_t *words) {
    constexpr int64_t kAtOnce = 32;
    int64_t k = 0;
    for (; k + kAtOnce <= inputs; k += kAtOnce) _mm512_storeu_si512(words + k / 2, rounded(x + k, ~0u));
    if (k < inputs) _mm512_storeu_si512(words + k / 2, rounded(x + k, (1u << (inputs - k)) - 1));
}

// Enough chains to hide the latency of an addition (5 cycles, two a cycle), as many as the registers hold.
constexpr int pair_panels(int height) {
    return height > 6 ? 3 : 4;
}

// kRows rows of x times kPanels panels that lie `stride` bytes apart. Not inlined: it needs all registers.
template <int kRows, int kPanels>
__attribute__((noinline)) void multiply_pairs(const uint8_t *panel, int64_t stride, int64_t pairs,
                                              const PairRows x, const Target &to, Ahead ahead) {
    Sums<Avx512Lanes, kRows, kPanels> sums;
    sums.open(to);
    const auto add = [&](int64_t k) __attribute__((always_inline)) {
        const auto weights = [&](int p) __attribute__((always_inline)) {
            return reinterpret_cast<__m512bh>(_mm512_load_si512(panel + p * stride + k * kPanel * 4));
        };
        const auto row = [&](int i) __attribute__((always_inline)) {
            return reinterpret_cast<__m512bh>(
                _mm512_set1_epi32(static_cast<int>(x.words[i * x.stride + k])));
        };
        if constexpr (kRows >= kPanels) {
            __m512bh held[kPanels];
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p) held[p] = weights(p);
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i) {
                const __m512bh pair = row(i);
#pragma GCC unroll 4
                for (int p = 0; p < kPanels; ++p)
                    sums.at[i][p][0] = _mm512_dpbf16_ps(sums.at[i][p][0], pair, held[p]);
            }
        } else {
            __m512bh held[kRows];
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i) held[i] = row(i);
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p) {
                const __m512bh pair = weights(p);
#pragma GCC unroll 8
                for (int i = 0; i < kRows; ++i)
                    sums.at[i][p][0] = _mm512_dpbf16_ps(sums.at[i][p][0], held[i], pair);
            }
        }
    };
    for (int64_t k = 0; k < pairs; k += kPairsAtOnce) {
        if constexpr (kRows > kUnaidedRows) ahead.fetch<1>(0);
        add(k);
        add(k + 1);
    }
    sums.close(to);
}

// Rows [row, row + rows) of y in tiles of kHeight and, if that leaves some over, one less.
template <int kHeight, class Body>
SHOAL_INLINE void each_even_tile(int64_t rows, Body &&body) {
    const int64_t tiles = (rows + kHeight - 1) / kHeight, high = rows - tiles * (kHeight - 1);
    for (int64_t i = 0; i < high; ++i) body(i * kHeight, std::integral_constant<int, kHeight>{});
    if constexpr (kHeight > 1) {
        const int64_t begin = high * kHeight;
        for (int64_t i = 0; i < tiles - high; ++i)
            body(begin + i * (kHeight - 1), std::integral_constant<int, kHeight - 1>{});
    }
}

// One group of panels for all of `rows`; `next` is fetched meanwhile.
template <int kHeight, int kPanels>
void multiply_group(const Job &job, int64_t row, int64_t rows, const PairRows &x, int64_t panel,
                    const uint8_t *next, int64_t next_bytes) {
    const int64_t pairs = (job.w.inputs + 3) / 4 * kPairsAtOnce, steps = pairs / kPairsAtOnce;
    const int64_t bytes = next_bytes / (rows * steps) + 1;  // a row and step
    each_even_tile<kHeight>(rows, [&](int64_t at, auto height) {
        constexpr int kRows = decltype(height)::value;
        const Ahead ahead{next + next_bytes * at / rows, bytes * kRows};
        fetch_target<kPanels, kHeight>(job, row + at + kRows, row + rows, panel);
        into<kRows, kPanels>(job, row + at, panel, false, true, [&](const Target &to) {
            multiply_pairs<kRows, kPanels>(job.w.panel(panel), job.w.panel_bytes, pairs, x.from(at), to,
                                           ahead);
        });
    });
}

// Groups of like width: a narrow one would wait for its sums.
template <int kHeight>
void sweep_pairs(const Job &job, int64_t row, int64_t rows, const PairRows &x) {
    constexpr int kMany = pair_panels(kHeight);
    int64_t panel = job.first;
    for (int64_t groups = (job.last - job.first + kMany - 1) / kMany; groups > 0; --groups) {
        const int64_t count = (job.last - panel + groups - 1) / groups;
        const int64_t ahead = std::min<int64_t>(kMany, job.w.panels() - panel - count);  // of the next share too
        with_rows<kMany>(count, [&](auto panels) {
            multiply_group<kHeight, decltype(panels)::value>(job, row, rows, x, panel,
                                                             job.w.panel(panel + count),
                                                             ahead * job.w.panel_bytes);
        });
        panel += count;
    }
}

// Rows [row, row + rows) of x, rounded into `words` unless they are already.
inline PairRows pair_rows(const Job &job, int64_t row, int64_t rows, uint32_t *words) {
    if (job.words) return {job.words + row * job.ldx, job.ldx};
    const PairRows x{words, pair_stride(job.w.inputs)};
    for (int64_t i = 0; i < rows; ++i) round_row(job.x + (row + i) * job.ldx, job.w.inputs, words + i * x.stride);
    return x;
}

inline void run_bf16(const Job &job) {
    const int64_t at_once = pair_rows_cached(job.w.inputs);
    for (int64_t row = 0; row < job.m; row += at_once) {
        const int64_t rows = std::min(at_once, job.m - row);
        const PairRows x = pair_rows(job, row, rows, reinterpret_cast<uint32_t *>(job.scratch));
        const int64_t tiles = (rows + kPairHeightMax - 1) / kPairHeightMax;
        with_rows<kPairHeightMax>((rows + tiles - 1) / tiles, [&](auto height) {
            sweep_pairs<decltype(height)::value>(job, row, rows, x);
        });
    }
}

#endif

}  // namespace shoal
