// The kernels, once for all instruction sets and formats.
//
// Few rows: a kernel reads each packed weight once, makes a float of it in a register and uses it for all rows. Many rows: a
// stretch of a panel is made into floats once, in a buffer that stays in the first-level cache, and the same kernel in its f32 form
// runs over it for every six rows; sums wait in y between stretches. Either way an output is one chain of fused
// multiply-adds over the inputs in order, which is why its bits do not depend on the way taken.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "linear_matrix.h"
#include "panels.h"

namespace shoal {

constexpr int kTilePanelsMax = 2;
constexpr int64_t kTileInputsMax = 320;  // 20 KB of floats, beside six rows of x, in 32 KB
constexpr int64_t kRowBlockBytes = 256 << 10;  // of x, which a sweep over all panels rereads: half a second-level cache

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

// What is read next, fetched bit by bit while the present is used, so that memory and multipliers work at the same time: the
// processor's own guesses keep too few lines under way.
struct Ahead {
    const uint8_t *at;
    int64_t bytes;  // for each block that is worked on

    // The same number of lines each time, be it the same line again: a branch that is now and then taken costs more.
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

// kRows rows of x times kPanels panels that lie `stride` bytes apart.
template <class V, class P, int kRows, int kPanels, class Rows>
void multiply(const uint8_t *panel, int64_t stride, int64_t inputs, const Rows x, Target to,
              Ahead ahead) {
    Sums<V, kRows, kPanels> sums;
    sums.open(to);
    if constexpr (P::kQuantised) {
        RunReader<V, P> readers[kPanels];
        for (int64_t b = 0; b < inputs / kBlock; ++b) {
            const uint8_t *header = panel + header_at<P>(b), *block = panel + block_at<P>(b);
            ahead.fetch<kPanels>(stride);
            for (int run = 0; run < kBlock / P::kScaleInputs; ++run) {
                for (int p = 0; p < kPanels; ++p) readers[p].open(header + p * stride, block + p * stride, run);
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
void expand(const uint8_t *panel, int64_t first, int64_t blocks, float *out) {
    constexpr int kHalves = kPanel / V::kWidth;
    const auto put = [&](auto &reader, auto input) __attribute__((always_inline)) {
        constexpr int J = decltype(input)::value;
        for (int h = 0; h < kHalves; ++h) V::store(out + J * kPanel + h * V::kWidth, reader.template value<J>(h));
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

// ---- 8-bit activations

// x in blocks of 32: block by block, so that a kernel finds all rows of a block together.
struct Activations8 {
    int8_t *codes;  // [blocks][rows][32]
    float *scales;  // [blocks][rows]
    float *sums;    // [blocks][rows][2]: scale times the sum of codes, of each 16; of all 32 in the first if a scale spans 32
    int64_t rows;
};

template <class V>
void quantise_block(const float *x, bool per_16, int8_t *codes, float *scale, float *sums) {
    constexpr float kScaleMin = 0x1p-126f;  // a subnormal one is too coarse to divide by: the block counts as zero
    const uint32_t largest = V::largest_magnitude(x);
    float magnitude;
    std::memcpy(&magnitude, &largest, sizeof magnitude);
    const bool finite = largest < 0x7f800000u;
    *scale = finite ? magnitude / 127.0f : __builtin_nanf("");
    const bool worth = finite && *scale >= kScaleMin;
    int32_t sum[2] = {0, 0};
    if (worth) {
        V::round_block(x, 1.0f / *scale, codes, sum);
    } else {
        std::memset(codes, 0, kBlock);
    }
    sums[0] = *scale * static_cast<float>(per_16 ? sum[0] : sum[0] + sum[1]);
    sums[1] = *scale * static_cast<float>(sum[1]);
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
            for (int s = 0; s < kSums; ++s) parts[h][s] = V::widen(tree_sum<kEach>(pairs[h] + s * kEach, add));
        }
        const auto add = [](typename V::I a, typename V::I b) { return V::add_words(a, b); };
        sums[h] = tree_sum<kSums>(parts[h], add);
    }
}

// 16 inputs (half a block) of one panel and all rows, added to sums[rows][16]. Where a scale spans the block, the first half leaves
// its integers in `integers`. The loop over rows stays a loop: unrolled, its broadcasts outlive the registers.
template <class V, class P, int kHalf>
SHOAL_INLINE void multiply_half_block(const uint8_t *header, const uint8_t *block, const int8_t *codes,
                                      const float *row_scale, const float *row_sums, int64_t rows, int32_t *integers,
                                      float *sums) {
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
                if constexpr (P::kChain != 0) sum = V::fma(offset[h], V::broadcast(row_sums[2 * i + kRun]), sum);
                const auto both = V::mul(scale[h], V::broadcast(row_scale[i]));
                V::store(sums + at, V::fma(V::to_float(products[h]), both, sum));
            }
        }
    }
}

constexpr int kRowsInt8 = 32;  // whose sums are under way for one panel

// Adds the product of one panel and rows [first, first + rows) of x to sums[rows][16].
template <class V, class P>
void multiply_int8(const uint8_t *panel, int64_t blocks, const Activations8 &x, int64_t first, int64_t rows, float *sums) {
    int32_t integers[kRowsInt8 * kPanel];
    for (int64_t b = 0; b < blocks; ++b) {
        const uint8_t *header = panel + header_at<P>(b), *block = panel + block_at<P>(b);
        const int64_t at = b * x.rows + first;
        const int8_t *codes = x.codes + at * kBlock;
        const float *row_scale = x.scales + at, *row_sums = x.sums + 2 * at;
        multiply_half_block<V, P, 0>(header, block, codes, row_scale, row_sums, rows, integers, sums);
        multiply_half_block<V, P, 1>(header, block, codes, row_scale, row_sums, rows, integers, sums);
    }
}

// ---- a share of one product

struct Job {
    const shoal_linear &w;
    const float *x;
    int64_t ldx, m;
    float *y;
    int64_t ldy;
    const float *bias;
    int64_t first, last;  // panels
    uint8_t *scratch;     // aligned to 64
};

// Calls multiply(target) for panels [panel, panel + kPanels) and rows [row, row + kRows), through a buffer where y has no room for
// a whole panel.
template <int kRows, int kPanels, class Multiply>
SHOAL_INLINE void into(const Job &job, int64_t row, int64_t panel, bool resume, bool final, Multiply &&multiply) {
    constexpr int kWidth = kPanels * kPanel;
    const int64_t column = panel * kPanel, valid = std::min<int64_t>(kWidth, job.w.outputs - column);
    float *y = job.y + row * job.ldy + column;
    const float *bias = final && job.bias ? job.bias + column : nullptr;
    if (valid == kWidth) return multiply(Target{y, job.ldy, bias, resume});
    float wide[kRows][kWidth] = {}, wide_bias[kWidth] = {};
    const size_t bytes = static_cast<size_t>(valid) * sizeof(float);
    if (resume) {
        for (int i = 0; i < kRows; ++i) std::memcpy(wide[i], y + i * job.ldy, bytes);
    }
    if (bias) std::memcpy(wide_bias, bias, bytes);
    multiply(Target{wide[0], kWidth, bias ? wide_bias : nullptr, resume});
    for (int i = 0; i < kRows; ++i) std::memcpy(y + i * job.ldy, wide[i], bytes);
}

// Calls body(integral_constant<rows>) for rows in [1, kMax].
template <int kMax, class Body>
SHOAL_INLINE void with_rows(int64_t rows, Body &&body) {
    unrolled(
        [&](auto index) {
            constexpr int kRows = decltype(index)::value + 1;
            if (rows == kRows) body(std::integral_constant<int, kRows>{});
        },
        std::make_integer_sequence<int, kMax>{});
}

// Panels at once: enough chains of sums to hide the latency of a multiply-add (4 cycles, two a cycle), few enough to stay in
// registers.
template <class V, class P>
constexpr int panels_at_once(int rows) {
    constexpr int kHalves = kPanel / V::kWidth;
    constexpr int kChains = V::kRegisters == 32 ? 8 : P::kQuantised ? 4 : 8;
    const int wanted = (kChains + rows * kHalves - 1) / (rows * kHalves);
    return std::max(1, std::min(wanted, V::kRegisters * 3 / 4 / (rows * kHalves)));
}

constexpr int64_t kFewRowsAhead = 4096;
constexpr int kFewRows = 2;  // up to these x is read where it is, and each weight once

template <class V, class P>
void run_few_rows(const Job &job) {
    with_rows<kFewRows>(job.m, [&](auto rows) {
        constexpr int kRows = decltype(rows)::value, kMany = panels_at_once<V, P>(kRows);
        int64_t panel = job.first;
        const auto advance = [&](auto count) {
            constexpr int kPanels = decltype(count)::value;
            for (; panel + kPanels <= job.last; panel += kPanels) {
                into<kRows, kPanels>(job, 0, panel, false, true, [&](Target to) {
                    multiply<V, P, kRows, kPanels>(job.w.panel(panel), job.w.panel_bytes, job.w.inputs,
                                                   StridedRows{job.x, job.ldx}, to,
                                                   {job.w.panel(panel) + kFewRowsAhead, P::kBlockBytes});
                });
            }
        };
        advance(std::integral_constant<int, kMany>{});
        if constexpr (kMany > 1) advance(std::integral_constant<int, 1>{});
    });
}

// ---- many rows

inline int64_t tile_inputs(int64_t inputs) {
    const int64_t tiles = (inputs + kTileInputsMax - 1) / kTileInputsMax;
    return ((inputs + tiles - 1) / tiles + kBlock - 1) / kBlock * kBlock;
}

inline int64_t rows_at_once(int64_t inputs) {
    const int64_t rows = kRowBlockBytes / (inputs * static_cast<int64_t>(sizeof(float)));
    return std::max<int64_t>(2, rows / 12) * 12;  // full register tiles, of whatever height
}

// Calls body(first row, integral_constant<rows>) for register tiles of like height: a low one would wait for its sums.
template <int kMax, class Body>
SHOAL_INLINE void each_row_tile(int64_t rows, Body &&body) {
    int64_t row = 0;
    for (int64_t tiles = (rows + kMax - 1) / kMax; tiles > 0; --tiles) {
        const int64_t count = (rows - row + tiles - 1) / tiles;
        with_rows<kMax>(count, [&](auto height) { body(row, height); });
        row += count;
    }
}

// Rows [row, row + rows) of x, as PackedRows tile after tile.
template <int kMax>
void pack_rows(const Job &job, int64_t row, int64_t rows, float *out) {
    each_row_tile<kMax>(rows, [&](int64_t first, auto height) {
        constexpr int kRows = decltype(height)::value;
        const float *x = job.x + (row + first) * job.ldx;
        float *tile = out + first * job.w.inputs;
        for (int64_t k = 0; k < job.w.inputs; ++k) {
            for (int i = 0; i < kRows; ++i) tile[k * kRows + i] = x[i * job.ldx + k];
        }
    });
}

// A stretch of inputs of panels as a kernel is to read it.
struct Stretch {
    const uint8_t *weights;
    int64_t stride;
    int64_t first, inputs;
};

template <class V, class P, int kPanels, int kHeightMax>
void sweep_rows(const Job &job, int64_t row, int64_t rows, const float *packed, int64_t panel, const Stretch &part,
                const uint8_t *next, int64_t next_bytes) {
    const int64_t ahead_bytes = next_bytes * inputs_of_block<P>() / (rows * part.inputs) + 1;  // per row and block
    const bool resume = part.first > 0, final = part.first + part.inputs == job.w.inputs;
    each_row_tile<kHeightMax>(rows, [&](int64_t first, auto height) {
        constexpr int kRows = decltype(height)::value;
        const PackedRows<kRows> x{packed + first * job.w.inputs + part.first * kRows};
        const Ahead ahead{next + next_bytes * first / rows, ahead_bytes * kRows};
        into<kRows, kPanels>(job, row + first, panel, resume, final, [&](Target to) {
            multiply<V, P, kRows, kPanels>(part.weights, part.stride, part.inputs, x, to, ahead);
        });
    });
}

template <class V, class P, int kPanels, int kHeightMax, bool kExpand>
void run_panels(const Job &job, int64_t row, int64_t rows, const float *packed, float *tile, int64_t panel) {
    constexpr int64_t kInputs = inputs_of_block<P>();
    const int64_t length = tile_inputs(job.w.inputs);
    for (int64_t k = 0; k < job.w.inputs; k += length) {
        const int64_t inputs = std::min(length, job.w.inputs - k);
        const int64_t begin = block_at<P>(k / kInputs), end = block_at<P>((k + inputs) / kInputs);
        const uint8_t *weights = job.w.panel(panel) + begin;
        if constexpr (kExpand) {
            const int64_t stride = length * kPanel * static_cast<int64_t>(sizeof(float));
            for (int p = 0; p < kPanels; ++p) {
                expand<V, P>(job.w.panel(panel + p), k / kInputs, (inputs + kInputs - 1) / kInputs,
                             tile + p * length * kPanel);
            }
            const Stretch floats{reinterpret_cast<uint8_t *>(tile), stride, k, inputs};
            sweep_rows<V, F32Panel, kPanels, kHeightMax>(job, row, rows, packed, panel, floats, job.w.panel(panel) + end, end - begin);
        } else {
            const Stretch stored{weights, job.w.panel_bytes, k, inputs};
            sweep_rows<V, P, kPanels, kHeightMax>(job, row, rows, packed, panel, stored, weights + (end - begin), end - begin);
        }
    }
}

template <class V, class P, int kHeightMax, bool kExpand>
void sweep_panels(const Job &job) {
    constexpr int kMany = panels_at_once<V, F32Panel>(kHeightMax);
    static_assert(kMany <= kTilePanelsMax);
    auto *tile = reinterpret_cast<float *>(job.scratch);
    float *packed = tile + kMany * tile_inputs(job.w.inputs) * kPanel;
    for (int64_t row = 0; row < job.m; row += rows_at_once(job.w.inputs)) {
        const int64_t rows = std::min(job.m - row, rows_at_once(job.w.inputs));
        pack_rows<kHeightMax>(job, row, rows, packed);
        int64_t panel = job.first;
        for (; panel + kMany <= job.last; panel += kMany) {
            run_panels<V, P, kMany, kHeightMax, kExpand>(job, row, rows, packed, tile, panel);
        }
        if constexpr (kMany > 1) {
            for (; panel < job.last; ++panel) {
                run_panels<V, P, 1, kHeightMax, kExpand>(job, row, rows, packed, tile, panel);
            }
        }
    }
}

// Two tiles of four rows widen each weight twice, for less than writing it down once.
constexpr int64_t kRowsInRegisters = 8;
constexpr int kHeightInRegisters = 4;

template <class V, class P>
void run_many_rows(const Job &job) {
    if constexpr (std::is_same_v<P, F32Panel>) {
        sweep_panels<V, P, V::kTileRows, false>(job);
    } else {
        if constexpr (V::kFloatsInRegisters && !P::kQuantised) {
            if (job.m <= kRowsInRegisters) return sweep_panels<V, P, kHeightInRegisters, false>(job);
        }
        sweep_panels<V, P, V::kTileRows, true>(job);
    }
}

template <class V, class P>
void run(const Job &job) {
    if (job.m <= kFewRows) {
        run_few_rows<V, P>(job);
    } else {
        run_many_rows<V, P>(job);
    }
}

constexpr int64_t kRowsAtOnceInt8 = 128;  // quantised before the sweep over panels: as bytes they stay in the caches

template <class V, class P>
Activations8 quantise_rows(const Job &job, int64_t row, int64_t rows) {
    const int64_t blocks = job.w.inputs / kBlock;
    auto *scales = reinterpret_cast<float *>(job.scratch);
    auto *codes = reinterpret_cast<int8_t *>(scales + 3 * blocks * rows);
    const Activations8 x{codes, scales, scales + blocks * rows, rows};
    for (int64_t i = 0; i < rows; ++i) {
        for (int64_t b = 0; b < blocks; ++b) {
            const int64_t at = b * rows + i;
            quantise_block<V>(job.x + (row + i) * job.ldx + b * kBlock, P::kScaleInputs == 16, codes + at * kBlock,
                              x.scales + at, x.sums + 2 * at);
        }
    }
    return x;
}

// Rows of sums[rows][16] to their place in y.
inline void put_rows(const Job &job, int64_t row, int64_t rows, int64_t panel, float *sums) {
    const int64_t column = panel * kPanel, valid = std::min<int64_t>(kPanel, job.w.outputs - column);
    for (int64_t i = 0; i < rows; ++i, sums += kPanel) {
        if (job.bias) {
            for (int64_t j = 0; j < valid; ++j) sums[j] += job.bias[column + j];
        }
        std::memcpy(job.y + (row + i) * job.ldy + column, sums, static_cast<size_t>(valid) * sizeof(float));
    }
}

template <class V, class P>
void run_int8(const Job &job) {
    const int64_t blocks = job.w.inputs / kBlock;
    for (int64_t begin = 0; begin < job.m; begin += kRowsAtOnceInt8) {
        const int64_t end = std::min(job.m, begin + kRowsAtOnceInt8);
        const Activations8 x = quantise_rows<V, P>(job, begin, end - begin);
        for (int64_t panel = job.first; panel < job.last; ++panel) {
            for (int64_t row = begin; row < end; row += kRowsInt8) {
                const int64_t rows = std::min<int64_t>(kRowsInt8, end - row);
                float sums[kRowsInt8 * kPanel] = {};
                multiply_int8<V, P>(job.w.panel(panel), blocks, x, row - begin, rows, sums);
                put_rows(job, row, rows, panel, sums);
            }
        }
    }
}

template <class V, class P>
void read_row(const shoal_linear &w, int64_t row, float *out) {
    constexpr int kInputs = P::kQuantised ? kBlock : 4;
    float tile[kInputs * kPanel];
    const uint8_t *panel = w.panel(row / kPanel);
    for (int64_t k = 0; k < w.inputs; k += kInputs) {
        expand<V, P>(panel, k / kInputs, 1, tile);
        const int64_t count = std::min<int64_t>(kInputs, w.inputs - k);
        for (int64_t j = 0; j < count; ++j) out[k + j] = tile[j * kPanel + row % kPanel];
    }
}

// ---- tables for the choice at run time

template <class V, class P>
constexpr FormatKernels kernels_of() {
    if constexpr (P::kQuantised) {
        return {run<V, P>, run_int8<V, P>, read_row<V, P>};
    } else {
        return {run<V, P>, run<V, P>, read_row<V, P>};
    }
}

template <class V>
constexpr Kernels kernels(const char *name) {
    return {name,
            {kernels_of<V, F32Panel>(), kernels_of<V, Bf16Panel>(), kernels_of<V, F16Panel>(),
             kernels_of<V, Q8_0Panel>(), kernels_of<V, Q4_0Panel>(), kernels_of<V, Q4_1Panel>(),
             kernels_of<V, Q5_0Panel>(), kernels_of<V, Q4KPanel>(), kernels_of<V, Q6KPanel>()}};
}

}  // namespace shoal
