// How a product is cut into register tiles, once for all instruction sets and formats.
//
// Few rows: linear_few_rows.h. Many rows: a stretch of a panel is made into floats once, in a buffer that stays in the
// first-level cache, and the f32 tile runs over it for every six rows; sums wait in y between stretches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "linear_few_rows.h"
#include "linear_int8.h"
#include "linear_vnni.h"
#include "panels.h"

namespace shoal {

constexpr int kTilePanelsMax = 2;
constexpr int64_t kTileInputsMax = 320;  // 20 KB of floats, beside six rows of x, in 32 KB
// Of x, which a sweep over all panels rereads: half a second-level cache.
constexpr int64_t kRowBlockBytes = 256 << 10;

// ---- many rows

inline int64_t tile_inputs(int64_t inputs) {
    const int64_t tiles = (inputs + kTileInputsMax - 1) / kTileInputsMax;
    return ((inputs + tiles - 1) / tiles + kBlock - 1) / kBlock * kBlock;
}

// How many rows of x, each `inputs` long, stay in the cache while all panels pass.
inline int64_t rows_cached(int64_t inputs) {
    return kRowBlockBytes / (inputs * static_cast<int64_t>(sizeof(float))) / 12 * 12;  // full register tiles
}

// Calls body(first row, rows) for tiles of like height: a low one would wait for its sums.
template <class Body>
SHOAL_INLINE void each_tile(int64_t rows, int64_t height, Body &&body) {
    int64_t row = 0;
    for (int64_t tiles = (rows + height - 1) / height; tiles > 0; --tiles) {
        const int64_t count = (rows - row + tiles - 1) / tiles;
        body(row, count);
        row += count;
    }
}

// The same for register tiles: body(first row, integral_constant<rows>).
template <int kMax, class Body>
SHOAL_INLINE void each_row_tile(int64_t rows, Body &&body) {
    each_tile(rows, kMax, [&](int64_t row, int64_t count) {
        with_rows<kMax>(count, [&](auto height) { body(row, height); });
    });
}

// Some inputs of some rows of x.
struct Stretch {
    int64_t row, rows;
    int64_t first, inputs;
    float *x;  // PackedRows tile after tile, once `pack` is done

    template <int kMax>
    void pack(const Job &job) const {
        each_row_tile<kMax>(rows, [&](int64_t row_in, auto height) {
            constexpr int kRows = decltype(height)::value;
            const float *from = job.x + (row + row_in) * job.ldx + first;
            float *tile = x + row_in * inputs;
            for (int64_t k = 0; k < inputs; ++k) {
                for (int i = 0; i < kRows; ++i) tile[k * kRows + i] = from[i * job.ldx + k];
            }
        });
    }
};

// Where a kernel finds the weights of a stretch, and what it is to fetch meanwhile.
struct Weights {
    const uint8_t *at;
    int64_t stride;  // between panels
    const uint8_t *next;
    int64_t next_bytes;
};

// The next tile's place in y: its rows lie far apart, so that the processor does not guess them.
template <int kPanels, int kHeightMax>
SHOAL_INLINE void fetch_target(const Job &job, int64_t row, int64_t end, int64_t panel) {
    constexpr int kToWrite = 1;
    for (int64_t i = row; i < std::min(row + kHeightMax, end); ++i) {
        const float *y = job.y + i * job.ldy + panel * kPanel;
        for (int p = 0; p < kPanels; ++p) __builtin_prefetch(y + p * kPanel, kToWrite);
    }
}

template <class V, class P, int kPanels, int kHeightMax>
void sweep_rows(const Job &job, const Stretch &part, int64_t panel, const Weights &weights) {
    // of what comes next, per row and block
    const int64_t bytes = weights.next_bytes * inputs_of_block<P>() / (part.rows * part.inputs) + 1;
    const bool resume = part.first > 0, final = part.first + part.inputs == job.w.inputs;
    each_row_tile<kHeightMax>(part.rows, [&](int64_t row, auto height) {
        constexpr int kRows = decltype(height)::value;
        const PackedRows<kRows> x{part.x + row * part.inputs};
        const Ahead ahead{weights.next + weights.next_bytes * row / part.rows, bytes * kRows};
        fetch_target<kPanels, kHeightMax>(job, part.row + row + kRows, part.row + part.rows, panel);
        into<kRows, kPanels>(job, part.row + row, panel, resume, final, [&](const Target &to) {
            multiply<V, P, kRows, kPanels>(weights.at, weights.stride, part.inputs, x, to, ahead);
        });
    });
}

// One stretch of kPanels panels; input `next_first` of panel `next` is where the following one begins.
template <class V, class P, int kPanels, int kHeightMax, bool kExpand>
void run_stretch(const Job &job, const Stretch &part, int64_t panel, int64_t next, int64_t next_first) {
    constexpr int64_t kInputs = inputs_of_block<P>();
    const int64_t begin = block_at<P>(part.first / kInputs);
    const int64_t end = block_at<P>((part.first + part.inputs) / kInputs);
    const uint8_t *following = job.w.panel(next) + block_at<P>(next_first / kInputs);
    if constexpr (kExpand) {
        auto *tile = reinterpret_cast<float *>(job.scratch);
        const int64_t blocks = (part.inputs + kInputs - 1) / kInputs, floats = blocks * kInputs * kPanel;
        for (int p = 0; p < kPanels; ++p) {
            expand<V, P>(job.w.panel(panel + p), part.first / kInputs, blocks, tile + p * floats);
        }
        const int64_t stride = floats * static_cast<int64_t>(sizeof(float));
        const Weights weights{job.scratch, stride, following, end - begin};
        sweep_rows<V, F32Panel, kPanels, kHeightMax>(job, part, panel, weights);
    } else {
        const Weights weights{job.w.panel(panel) + begin, job.w.panel_bytes, following, end - begin};
        sweep_rows<V, P, kPanels, kHeightMax>(job, part, panel, weights);
    }
}

// Calls body(panel, integral_constant<panels>) for groups of panels.
template <int kMany, class Body>
SHOAL_INLINE void each_panel_group(const Job &job, Body &&body) {
    int64_t panel = job.first;
    for (; panel + kMany <= job.last; panel += kMany) body(panel, std::integral_constant<int, kMany>{});
    if constexpr (kMany > 1) {
        for (; panel < job.last; ++panel) body(panel, std::integral_constant<int, 1>{});
    }
}

// If x stays cached, a panel is finished before the next: sums stay in the cache. If not, all panels pass for
// one stretch of as many rows as stay: panels are made into floats less often.
template <class V, class P, int kHeightMax, bool kExpand>
void sweep_panels(const Job &job) {
    constexpr int kMany = panels_at_once<V, F32Panel>(kHeightMax);
    static_assert(kMany <= kTilePanelsMax);
    const int64_t length = tile_inputs(job.w.inputs);
    float *packed = reinterpret_cast<float *>(job.scratch) + kMany * length * kPanel;
    const bool whole = job.m <= rows_cached(job.w.inputs);
    const auto stretch = [&](int64_t row, int64_t rows, int64_t k) {
        return Stretch{row, rows, k, std::min(length, job.w.inputs - k), packed + (whole ? k * rows : 0)};
    };
    if (whole) {
        for (int64_t k = 0; k < job.w.inputs; k += length)
            stretch(0, job.m, k).template pack<kHeightMax>(job);
        each_panel_group<kMany>(job, [&](int64_t panel, auto count) {
            constexpr int kPanels = decltype(count)::value;
            for (int64_t k = 0; k < job.w.inputs; k += length) {
                const bool last = k + length >= job.w.inputs;
                run_stretch<V, P, kPanels, kHeightMax, kExpand>(
                    job, stretch(0, job.m, k), panel, last ? panel + kPanels : panel, last ? 0 : k + length);
            }
        });
        return;
    }
    for (int64_t row = 0; row < job.m; row += rows_cached(length)) {
        for (int64_t k = 0; k < job.w.inputs; k += length) {
            const Stretch part = stretch(row, std::min(job.m - row, rows_cached(length)), k);
            part.template pack<kHeightMax>(job);
            each_panel_group<kMany>(job, [&](int64_t panel, auto count) {
                constexpr int kPanels = decltype(count)::value;
                run_stretch<V, P, kPanels, kHeightMax, kExpand>(job, part, panel, panel + kPanels, k);
            });
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
    if constexpr (few_rows<V, P>() > 0) {
        if (job.m <= few_rows<V, P>()) return run_few_rows<V, P>(job);
    }
    run_many_rows<V, P>(job);
}

// Quantised before the sweep over panels: as bytes they stay in the caches.
constexpr int64_t kRowsAtOnceInt8 = 128;

// Rows of x at the start of scratch, in tiles of at most `height` rows and like heights.
template <class V, class P>
Activations8 quantise_rows(const Job &job, int64_t first, int64_t rows, int64_t height) {
    const int64_t blocks = job.w.inputs / kBlock;
    auto *scales = reinterpret_cast<float *>(job.scratch), *sums = scales + blocks * rows;
    auto *codes = reinterpret_cast<int8_t *>(sums + 2 * blocks * rows);
    const Activations8 x{blocks, codes, scales, sums, reinterpret_cast<int32_t *>(sums)};
    each_tile(rows, height, [&](int64_t row, int64_t count) {
        const Activations8 tile = x.tile(row);
        for (int64_t i = 0; i < count; ++i) {
            const float *from = job.x + (first + row + i) * job.ldx;
            for (int64_t b = 0; b < blocks; ++b) quantise_block<V, P>(from + b * kBlock, tile, b * count + i);
        }
    });
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
void sweep_panels_int8(const Job &job, const Activations8 &x, int64_t first, int64_t rows) {
    for (int64_t panel = job.first; panel < job.last; ++panel) {
        each_tile(rows, kRowsInt8, [&](int64_t row, int64_t count) {
            float sums[kRowsInt8 * kPanel];
            std::fill_n(sums, count * kPanel, 0.0f);
            multiply_int8<V, P>(job.w.panel(panel), x.tile(row), count, sums);
            put_rows(job, first + row, count, panel, sums);
        });
    }
}

// One tile of rows: panels stream from memory one by one, which is the order they lie in.
template <class V, class P>
void stream_panels_vnni(const Job &job, const Activations8 &x) {
    constexpr int64_t kStreamAhead = 2 * kBytesAhead;  // little work a byte
    with_rows<kVnniRows>(job.m, [&](auto height) {
        constexpr int kRows = decltype(height)::value;
        for (int64_t panel = job.first; panel < job.last; ++panel) {
            const uint8_t *weights = job.w.panel(panel);
            const Ahead ahead{weights + kStreamAhead, P::kBlockBytes};
            into<kRows, 1>(job, 0, panel, false, true, [&](const Target &to) {
                multiply_vnni<V, P, kRows, 1>(weights, 0, 0, x.blocks, x, to, ahead);
            });
        }
    });
}

// Of a stretch of blocks the panels stay in the first-level cache while all tiles of rows pass.
constexpr int64_t kBlocksInt8 = 24;

template <class V, class P>
void sweep_panels_vnni(const Job &job, const Activations8 &x, int64_t first, int64_t rows) {
    each_panel_group<kVnniPanels>(job, [&](int64_t panel, auto panels) {
        constexpr int kPanels = decltype(panels)::value;
        for (int64_t b = 0; b < x.blocks; b += kBlocksInt8) {
            const int64_t end = std::min(x.blocks, b + kBlocksInt8);
            const bool last = end == x.blocks;
            const uint8_t *weights = job.w.panel(panel);
            const uint8_t *next = last ? job.w.panel(panel + kPanels) : weights + block_at<P>(end);
            const int64_t bytes = P::kBlockBytes * (end - b), each = P::kBlockBytes / rows + 1;
            each_row_tile<kVnniRows>(rows, [&](int64_t row, auto height) {
                constexpr int kRows = decltype(height)::value;
                const Ahead ahead{next + bytes * row / rows, each * kRows};
                into<kRows, kPanels>(job, first + row, panel, b > 0, last, [&](const Target &to) {
                    multiply_vnni<V, P, kRows, kPanels>(weights, job.w.panel_bytes, b, end, x.tile(row), to,
                                                        ahead);
                });
            });
        }
    });
}

template <class V, class P>
void run_int8(const Job &job) {
    for (int64_t row = 0; row < job.m; row += kRowsAtOnceInt8) {
        const int64_t rows = std::min(job.m - row, kRowsAtOnceInt8);
        if constexpr (V::kSumsFours) {
            const Activations8 x = quantise_rows<V, P>(job, row, rows, kVnniRows);
            if (job.m <= kVnniRows) return stream_panels_vnni<V, P>(job, x);
            sweep_panels_vnni<V, P>(job, x, row, rows);
        } else {
            sweep_panels_int8<V, P>(job, quantise_rows<V, P>(job, row, rows, kRowsInt8), row, rows);
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
        return {run<V, P>, run<V, P>, run_int8<V, P>, read_row<V, P>};
    } else {
        return {run<V, P>, run<V, P>, run<V, P>, read_row<V, P>};
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
