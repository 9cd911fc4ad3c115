// Products with 8-bit activations: x is rounded per row and 32 inputs, the codes are multiplied as integers.
//
// Integers are exact, so what is left to order are the blocks of a row: one sum per output takes them one
// after the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "linear_tile.h"

namespace shoal {

// x in tiles of rows, each in blocks of 32, block by block: a kernel finds all rows of a block together.
struct Activations8 {
    int64_t blocks;
    int8_t *codes;  // [blocks][rows][32]
    float *scales;  // [blocks][rows]
    // [blocks][rows][2], of each 16 codes, or of all 32 in the first if a scale of the weights spans 32: their sum
    // times the scale, or, in the same place, where an integer sum of products with them starts.
    float *sums;
    int32_t *starts;

    // The tile that begins with row `row`.
    SHOAL_INLINE Activations8 tile(int64_t row) const {
        const int64_t at = row * blocks;
        return {blocks, codes + at * kBlock, scales + at, sums + 2 * at, starts + 2 * at};
    }
};

// A set that sums products in their lanes starts sums of unsigned codes at what makes them signed.
template <class V, class P>
constexpr bool kStartsSums = V::kSumsFours && P::kCentre != 0;

template <class V, class P>
SHOAL_INLINE void quantise_block(const float *x, const Activations8 &to, int64_t at) {
    constexpr float kScaleMin =
        0x1p-126f;  // a subnormal one is too coarse to divide by: the block counts as zero
    const uint32_t largest = V::largest_magnitude(x);
    float magnitude;
    std::memcpy(&magnitude, &largest, sizeof magnitude);
    const bool finite = largest < 0x7f800000u;
    const float scale = finite ? magnitude / 127.0f : __builtin_nanf("");
    int8_t *codes = to.codes + at * kBlock;
    int32_t sum[2] = {0, 0};
    if (finite && scale >= kScaleMin) {
        V::round_block(x, 1.0f / scale, codes, sum);
    } else {
        std::memset(codes, 0, kBlock);
    }
    if constexpr (P::kScaleInputs == kBlock) sum[0] += sum[1];
    to.scales[at] = scale;
    for (int i = 0; i < 2; ++i) {
        if constexpr (kStartsSums<V, P>) {
            to.starts[2 * at + i] = -P::kCentre * sum[i];
        } else {
            to.sums[2 * at + i] = scale * static_cast<float>(sum[i]);
        }
    }
}

// As a tree: a chain would fill the scheduler with what waits.
template <int kCount, class Value, class Add>
SHOAL_INLINE Value tree_sum(const Value *values, Add add) {
    if constexpr (kCount == 1) {
        return values[0];
    } else {
        constexpr int kHalf = kCount / 2;
        return add(tree_sum<kHalf>(values, add), tree_sum<kHalf>(values + kHalf, add));
    }
}

constexpr int kWordsAtOnce = 4;  // two steps: of both halves of a panel they fill half of sixteen registers

// The integer sums of codes times 16 inputs; with kChain 0 of codes that are biased by 128.
template <class V, class P, int kHalves>
SHOAL_INLINE void dot(const typename V::I (&words)[kHalves][kWordsAtOnce], const int8_t *x,
                      typename V::I (&sums)[kHalves]) {
    constexpr int kSums = P::kChain == 0 ? kWordsAtOnce : std::max(1, kWordsAtOnce / P::kChain);
    typename V::I parts[kHalves][kSums];
    typename V::Pairs pairs[kHalves][kWordsAtOnce];
#pragma GCC unroll 4
    for (int w = 0; w < kWordsAtOnce; ++w) {
        const auto four = V::four(x + 4 * w);
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) {
            if constexpr (P::kChain == 0) {
                parts[h][w] = V::biased_products(words[h][w], four);
            } else {
                pairs[h][w] = V::products(words[h][w], four);
            }
        }
    }
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h) {
        if constexpr (P::kChain != 0) {
            constexpr int kEach = kWordsAtOnce / kSums;
            const auto add = [](typename V::Pairs a, typename V::Pairs b) { return V::add_pairs(a, b); };
            for (int s = 0; s < kSums; ++s)
                parts[h][s] = V::widen(tree_sum<kEach>(pairs[h] + s * kEach, add));
        }
        const auto add = [](typename V::I a, typename V::I b) { return V::add_words(a, b); };
        sums[h] = tree_sum<kSums>(parts[h], add);
    }
}

// 16 inputs (half a block) of one panel and all rows, added to sums[rows][16]. Where a scale spans the block,
// the first half leaves its integers in `integers`. The loop over rows stays a loop: unrolled, its broadcasts
// outlive the registers.
template <class V, class P, int kHalf>
SHOAL_INLINE void multiply_half_block(const uint8_t *header, const uint8_t *block, const int8_t *codes,
                                      const float *row_scale, const float *row_sums, int64_t rows,
                                      int32_t *integers, float *sums) {
    constexpr int kHalves = kPanel / V::kWidth, kRun = P::kScaleInputs == 16 ? kHalf : 0;
    constexpr bool kLast = P::kScaleInputs == 16 || kHalf == 1, kFirst = P::kScaleInputs == 16 || kHalf == 0;
    typename V::I words[kHalves][kWordsAtOnce];
    typename V::F scale[kHalves], offset[kHalves];
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h) {
        P::template words<V>(block, 2 * kHalf, h, words[h][0], words[h][1]);
        P::template words<V>(block, 2 * kHalf + 1, h, words[h][2], words[h][3]);
        if constexpr (kLast) P::template scales<V>(header, block, kRun, h, scale[h], offset[h]);
    }
#pragma GCC unroll 1
    for (int64_t i = 0; i < rows; ++i) {
        typename V::I products[kHalves];
        dot<V, P, kHalves>(words, codes + i * kBlock + 16 * kHalf, products);
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) {
            const int64_t at = i * kPanel + h * V::kWidth;
            if constexpr (!kFirst) products[h] = V::add_words(products[h], V::load_words(integers + at));
            if constexpr (!kLast) {
                V::store_words(integers + at, products[h]);
            } else {
                auto sum = V::load(sums + at);
                if constexpr (P::kChain != 0)
                    sum = V::fma(offset[h], V::broadcast(row_sums[2 * i + kRun]), sum);
                const auto both = V::mul(scale[h], V::broadcast(row_scale[i]));
                V::store(sums + at, V::fma(V::to_float(products[h]), both, sum));
            }
        }
    }
}

constexpr int kRowsInt8 = 32;  // whose sums are under way for one panel

// Adds the product of one panel and a tile of x to sums[rows][16].
template <class V, class P>
void multiply_int8(const uint8_t *panel, const Activations8 &x, int64_t rows, float *sums) {
    int32_t integers[kRowsInt8 * kPanel];
    Ahead ahead{panel + kBytesAhead, P::kBlockBytes};
    for (int64_t b = 0; b < x.blocks; ++b) {
        const uint8_t *header = panel + header_at<P>(b), *block = panel + block_at<P>(b);
        const int64_t at = b * rows;
        ahead.fetch<1>(0);
        const int8_t *codes = x.codes + at * kBlock;
        const float *row_scale = x.scales + at, *row_sums = x.sums + 2 * at;
        multiply_half_block<V, P, 0>(header, block, codes, row_scale, row_sums, rows, integers, sums);
        multiply_half_block<V, P, 1>(header, block, codes, row_scale, row_sums, rows, integers, sums);
    }
}

}  // namespace shoal
