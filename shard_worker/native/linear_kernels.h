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

constexpr int kRowsMax = 6;  // of a register tile: 6 x 16 sums, two weights and a broadcast fill sixteen registers
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

    // `count` inputs of one reader a panel; x points at the first of them.
    template <int kStep, class Reader>
    SHOAL_INLINE void add(const Reader (&readers)[kPanels], const float *x, int64_t ldx, int count = kStep) {
        unrolled(
            [&](auto input) __attribute__((always_inline)) {
                constexpr int J = decltype(input)::value;
                if (J >= count) return;
                typename V::F row[kRows];
#pragma GCC unroll 8
                for (int i = 0; i < kRows; ++i) row[i] = V::broadcast(x[i * ldx + J]);
#pragma GCC unroll 8
                for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 2
                    for (int h = 0; h < kHalves; ++h) {
                        const auto weight = readers[p].template value<J>(h);
#pragma GCC unroll 8
                        for (int i = 0; i < kRows; ++i) at[i][p][h] = V::fma(row[i], weight, at[i][p][h]);
                    }
            },
            std::make_integer_sequence<int, kStep>{});
    }
};

// kRows rows of x times kPanels panels that lie `stride` bytes apart.
template <class V, class P, int kRows, int kPanels>
void multiply(const uint8_t *panel, int64_t stride, int64_t inputs, const float *x, int64_t ldx, Target to) {
    Sums<V, kRows, kPanels> sums;
    sums.open(to);
    if constexpr (P::kQuantised) {
        RunReader<V, P> readers[kPanels];
        for (int64_t b = 0; b < inputs / kBlock; ++b) {
            const uint8_t *header = panel + header_at<P>(b), *block = panel + block_at<P>(b);
            for (int run = 0; run < kBlock / P::kScaleInputs; ++run) {
                for (int p = 0; p < kPanels; ++p) readers[p].open(header + p * stride, block + p * stride, run);
#pragma GCC unroll 1
                for (int s = 0; s < P::kScaleInputs / 8; ++s) {
                    const int step = run * (P::kScaleInputs / 8) + s;
                    for (int p = 0; p < kPanels; ++p) readers[p].step(block + p * stride, step);
                    sums.template add<8>(readers, x + b * kBlock + step * 8, ldx);
                }
            }
        }
    } else {
        constexpr int kStep = P::kBlockInputs;
        typename P::template Reader<V> readers[kPanels];
        const int64_t whole = inputs / kStep;
        for (int64_t b = 0; b < whole; ++b) {
            for (int p = 0; p < kPanels; ++p) readers[p].block = panel + p * stride + b * P::kBlockBytes;
            sums.template add<kStep>(readers, x + b * kStep, ldx);
        }
        if (const int rest = static_cast<int>(inputs % kStep)) {
            for (int p = 0; p < kPanels; ++p) readers[p].block = panel + p * stride + whole * P::kBlockBytes;
            sums.template add<kStep>(readers, x + whole * kStep, ldx, rest);
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
            RunReader<V, P> reader;
            for (int step = 0; step < kBlock / 8; ++step) {
                constexpr int kSteps = P::kScaleInputs / 8;
                if (step % kSteps == 0) reader.open(panel + header_at<P>(b), block, step / kSteps);
                reader.step(block, step);
                unrolled([&](auto j) __attribute__((always_inline)) { put(reader, j); },
                         std::make_integer_sequence<int, 8>{});
                out += 8 * kPanel;
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
    uint32_t largest = 0;  // magnitudes order as their bits do, and a NaN is larger than all
    for (int j = 0; j < kBlock; ++j) {
        uint32_t bits;
        std::memcpy(&bits, x + j, sizeof bits);
        largest = std::max(largest, bits & 0x7fffffffu);
    }
    float magnitude;
    std::memcpy(&magnitude, &largest, sizeof magnitude);
    const bool finite = largest < 0x7f800000u;
    *scale = finite ? magnitude / 127.0f : __builtin_nanf("");
    const float inverse = *scale > 0.0f ? 1.0f / *scale : 0.0f;
    const float limit = 127.0f;  // a subnormal scale is too coarse to divide by
    int32_t sum[2] = {0, 0};
    for (int j = 0; j < kBlock; ++j) {
        const float scaled = finite ? std::min(std::max(x[j] * inverse, -limit), limit) : 0.0f;
        const int32_t code = static_cast<int32_t>(__builtin_rintf(scaled));
        codes[j] = static_cast<int8_t>(code);
        sum[j / 16] += code;
    }
    sums[0] = *scale * static_cast<float>(per_16 ? sum[0] : sum[0] + sum[1]);
    sums[1] = *scale * static_cast<float>(sum[1]);
}

template <class V, class P>
SHOAL_INLINE typename V::I dot(const typename V::I *words, const int8_t *x) {
    constexpr int kWords = P::kScaleInputs / 4;
    typename V::I sum = V::no_sum();
    if constexpr (P::kChain == 0) {
#pragma GCC unroll 8
        for (int w = 0; w < kWords; ++w) sum = V::dot_biased(sum, words[w], x + 4 * w);
    } else {
#pragma GCC unroll 8
        for (int first = 0; first < kWords; first += P::kChain) {
            auto pairs = V::no_pairs();
#pragma GCC unroll 8
            for (int w = first; w < first + P::kChain; ++w) pairs = V::dot_unsigned(pairs, words[w], x + 4 * w);
            sum = V::widen(sum, pairs);
        }
    }
    return sum;
}

template <class V, class P, int kRows>
void multiply_int8(const uint8_t *panel, int64_t blocks, const Activations8 &x, int64_t first_row, Target to) {
    constexpr int kHalves = kPanel / V::kWidth, kRuns = kBlock / P::kScaleInputs, kWords = P::kScaleInputs / 4;
    Sums<V, kRows, 1> sums;
    sums.open(to);
    for (int64_t b = 0; b < blocks; ++b) {
        const uint8_t *header = panel + header_at<P>(b), *block = panel + block_at<P>(b);
        const int64_t at = b * x.rows + first_row;
        for (int h = 0; h < kHalves; ++h) {
            typename V::I words[8];
#pragma GCC unroll 4
            for (int s = 0; s < 4; ++s) P::template words<V>(block, s, h, words[2 * s], words[2 * s + 1]);
#pragma GCC unroll 2
            for (int run = 0; run < kRuns; ++run) {
                typename V::F scale, offset;
                P::template scales<V>(header, block, run, h, scale, offset);
#pragma GCC unroll 8
                for (int i = 0; i < kRows; ++i) {
                    const auto codes = x.codes + (at + i) * kBlock + run * P::kScaleInputs;
                    const auto product = V::to_float(dot<V, P>(words + run * kWords, codes));
                    auto sum = V::fma(product, V::mul(scale, V::broadcast(x.scales[at + i])), sums.at[i][0][h]);
                    if constexpr (P::kChain != 0) sum = V::fma(offset, V::broadcast(x.sums[(at + i) * 2 + run]), sum);
                    sums.at[i][0][h] = sum;
                }
            }
        }
    }
    sums.close(to);
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

// From how many rows on a panel is made into floats first. Low, since each count is a kernel of its own to compile, and a
// stretch of floats in the first-level cache costs little.
template <class P>
constexpr int few_rows_max() {
    return std::is_same_v<P, F32Panel> ? kRowsMax : 2;
}

template <class V, class P>
void run_few_rows(const Job &job) {
    with_rows<few_rows_max<P>()>(job.m, [&](auto rows) {
        constexpr int kRows = decltype(rows)::value, kMany = panels_at_once<V, P>(kRows);
        int64_t panel = job.first;
        const auto advance = [&](auto count) {
            constexpr int kPanels = decltype(count)::value;
            for (; panel + kPanels <= job.last; panel += kPanels) {
                into<kRows, kPanels>(job, 0, panel, false, true, [&](Target to) {
                    multiply<V, P, kRows, kPanels>(job.w.panel(panel), job.w.panel_bytes, job.w.inputs, job.x,
                                                   job.ldx, to);
                });
            }
        };
        advance(std::integral_constant<int, kMany>{});
        if constexpr (kMany > 1) advance(std::integral_constant<int, 1>{});
    });
}

// Rows [row, end) times a stretch of kPanels panels that lie as floats at `tile`, `stride` bytes apart.
template <class V, int kPanels>
void sweep_rows(const Job &job, int64_t row, int64_t end, int64_t panel, const uint8_t *tile, int64_t stride,
                int64_t first_input, int64_t inputs) {
    const bool resume = first_input > 0, final = first_input + inputs == job.w.inputs;
    for (int64_t tiles = (end - row + kRowsMax - 1) / kRowsMax; tiles > 0; --tiles) {
        const int64_t count = (end - row + tiles - 1) / tiles;  // tiles of like height: a low one waits for its sums
        with_rows<kRowsMax>(count, [&](auto rows) {
            constexpr int kRows = decltype(rows)::value;
            into<kRows, kPanels>(job, row, panel, resume, final, [&](Target to) {
                multiply<V, F32Panel, kRows, kPanels>(tile, stride, inputs, job.x + row * job.ldx + first_input,
                                                      job.ldx, to);
            });
        });
        row += count;
    }
}

inline int64_t tile_inputs(int64_t inputs) {
    const int64_t tiles = (inputs + kTileInputsMax - 1) / kTileInputsMax;
    return ((inputs + tiles - 1) / tiles + kBlock - 1) / kBlock * kBlock;
}

inline int64_t rows_at_once(int64_t inputs) {
    const int64_t rows = kRowBlockBytes / (inputs * static_cast<int64_t>(sizeof(float)));
    return std::max<int64_t>(4, rows / kRowsMax) * kRowsMax;
}

template <class V, class P, int kPanels>
void run_tile(const Job &job, int64_t row, int64_t end, int64_t panel) {
    const int64_t stretch = tile_inputs(job.w.inputs);
    for (int64_t k = 0; k < job.w.inputs; k += stretch) {
        const int64_t inputs = std::min(stretch, job.w.inputs - k);
        const uint8_t *tile = job.scratch;
        int64_t stride = stretch * kPanel * static_cast<int64_t>(sizeof(float));
        if constexpr (std::is_same_v<P, F32Panel>) {
            tile = job.w.panel(panel) + k * kPanel * static_cast<int64_t>(sizeof(float));
            stride = job.w.panel_bytes;
        } else {
            constexpr int kInputs = P::kQuantised ? kBlock : 4;
            for (int p = 0; p < kPanels; ++p) {
                expand<V, P>(job.w.panel(panel + p), k / kInputs, (inputs + kInputs - 1) / kInputs,
                             reinterpret_cast<float *>(job.scratch + p * stride));
            }
        }
        sweep_rows<V, kPanels>(job, row, end, panel, tile, stride, k, inputs);
    }
}

template <class V, class P>
void run_many_rows(const Job &job) {
    constexpr int kMany = panels_at_once<V, F32Panel>(kRowsMax);
    const int64_t rows = rows_at_once(job.w.inputs);
    for (int64_t row = 0; row < job.m; row += rows) {
        const int64_t end = std::min(job.m, row + rows);
        int64_t panel = job.first;
        for (; panel + kMany <= job.last; panel += kMany) run_tile<V, P, kMany>(job, row, end, panel);
        for (; panel < job.last; ++panel) run_tile<V, P, 1>(job, row, end, panel);
    }
}

template <class V, class P>
void run(const Job &job) {
    if (job.m <= few_rows_max<P>()) {
        run_few_rows<V, P>(job);
    } else {
        run_many_rows<V, P>(job);
    }
}

constexpr int64_t kRowsAtOnceInt8 = 128;

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

template <class V, class P>
void run_int8(const Job &job) {
    const int64_t blocks = job.w.inputs / kBlock;
    for (int64_t first = 0; first < job.m; first += kRowsAtOnceInt8) {
        const int64_t end = std::min(job.m, first + kRowsAtOnceInt8);
        const Activations8 x = quantise_rows<V, P>(job, first, end - first);
        for (int64_t panel = job.first; panel < job.last; ++panel) {
            int64_t row = first;
            const auto advance = [&](auto count) {
                constexpr int kRows = decltype(count)::value;
                for (; row + kRows <= end; row += kRows) {
                    into<kRows, 1>(job, row, panel, false, true, [&](Target to) {
                        multiply_int8<V, P, kRows>(job.w.panel(panel), blocks, x, row - first, to);
                    });
                }
            };
            advance(std::integral_constant<int, 8>{});
            advance(std::integral_constant<int, 4>{});
            advance(std::integral_constant<int, 1>{});
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
