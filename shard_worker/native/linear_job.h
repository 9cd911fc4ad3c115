// A share of a product, and the places of its register tiles in y.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "linear_matrix.h"
#include "linear_tile.h"

namespace shoal {

struct Job {
    const shoal_linear &w;
    const float *x;
    int64_t ldx, m;
    float *y;
    int64_t ldy;
    const float *bias;
    int64_t first, last;  // panels
    uint8_t *scratch;     // aligned to 64
    const uint32_t *words = nullptr;  // instead of x: rounded to bfloat16, ldx words a row
};

// Calls multiply(target) for panels [panel, panel + kPanels) and rows [row, row + kRows), through a buffer
// where y has no room for a whole panel.
template <int kRows, int kPanels, class Multiply>
SHOAL_INLINE void into(const Job &job, int64_t row, int64_t panel, bool resume, bool final,
                       Multiply &&multiply) {
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

// Panels at once: enough chains of sums to hide the latency of a multiply-add (4 cycles, two a cycle), few
// enough to stay in registers.
template <class V, class P>
constexpr int panels_at_once(int rows) {
    constexpr int kHalves = kPanel / V::kWidth;
    constexpr int kChains = V::kRegisters == 16 && P::kQuantised ? 4 : 8;  // scales fill the other registers
    constexpr int kMax = 4;                                                // streams from memory
    const int wanted = (kChains + rows * kHalves - 1) / (rows * kHalves);
    return std::max(1, std::min({wanted, kMax, V::kRegisters * 3 / 4 / (rows * kHalves)}));
}

}  // namespace shoal
