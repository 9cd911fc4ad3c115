// The register tile of products with 8-bit activations, where the processor adds four products to a lane at
// once (VNNI).
//
// Codes are unpacked as they are read, for all rows of a tile; what makes unsigned codes signed is folded into
// where an integer sum starts.
#pragma once

#include <cstdint>

#include "linear_int8.h"

namespace shoal {

constexpr int kVnniRows = 4, kVnniPanels = 2;  // of a tile: float sums, integer sums and codes fill 32 registers

// Adds blocks [first, end) of a tile of kRows rows of x and kPanels panels, `stride` bytes apart.
template <class V, class P, int kRows, int kPanels>
__attribute__((noinline)) void multiply_vnni(const uint8_t *panel, int64_t stride, int64_t first, int64_t end,
                                             const Activations8 x, const Target &to, Ahead ahead) {
    static_assert(V::kWidth == kPanel);
    constexpr int kRuns = kBlock / P::kScaleInputs, kSteps = 4 / kRuns;
    Sums<V, kRows, kPanels> sums;
    sums.open(to);
    for (int64_t b = first; b < end; ++b) {
        const uint8_t *header = panel + header_at<P>(b), *block = panel + block_at<P>(b);
        ahead.fetch<kPanels>(stride);
        const int64_t at = b * kRows;
#pragma GCC unroll 2
        for (int run = 0; run < kRuns; ++run) {
            typename V::I dots[kRows][kPanels];
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
                for (int p = 0; p < kPanels; ++p)
                    dots[i][p] =
                        kStartsSums<V, P> ? V::broadcast_word(x.starts[2 * (at + i) + run]) : V::no_words();
            }
#pragma GCC unroll 4
            for (int s = run * kSteps; s < (run + 1) * kSteps; ++s) {
                typename V::I codes[2][kPanels];
#pragma GCC unroll 4
                for (int p = 0; p < kPanels; ++p)
                    P::template words<V>(block + p * stride, s, 0, codes[0][p], codes[1][p]);
#pragma GCC unroll 2
                for (int w = 0; w < 2; ++w) {
#pragma GCC unroll 8
                    for (int i = 0; i < kRows; ++i) {
                        const auto four = V::four(x.codes + (at + i) * kBlock + 8 * s + 4 * w);
#pragma GCC unroll 4
                        for (int p = 0; p < kPanels; ++p) dots[i][p] = V::dot(dots[i][p], codes[w][p], four);
                    }
                }
            }
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p) {
                typename V::F scale, offset;
                P::template scales<V>(header + p * stride, block + p * stride, run, 0, scale, offset);
#pragma GCC unroll 8
                for (int i = 0; i < kRows; ++i) {
                    auto &sum = sums.at[i][p][0];
                    if constexpr (!kStartsSums<V, P>)
                        sum = V::fma(offset, V::broadcast(x.sums[2 * (at + i) + run]), sum);
                    const auto product = V::mul(V::to_float(dots[i][p]), V::broadcast(x.scales[at + i]));
                    sum = V::fma(product, scale, sum);
                }
            }
        }
    }
    sums.close(to);
}

}  // namespace shoal
