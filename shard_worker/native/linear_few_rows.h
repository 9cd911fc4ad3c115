// Products of few rows: each packed weight is read once, made a float in a register and used for all rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "linear_job.h"

namespace shoal {

// Rows for which a weight is made a float in a register rather than written down.
template <class V, class P>
constexpr int few_rows() {
    return P::kQuantised ? V::kFewRowsPacked : V::kFewRows;
}

constexpr int64_t kGroupBytesMax = 128 << 10;  // of panels that are fetched while those before them are used
constexpr int64_t kFewRowsAtOnce = 4;  // more are two tiles, which make each weight a float twice: half the kernels

// At most few_rows<V, P>() rows: x is read where it is, and each weight from memory once. Fetched meanwhile is the next
// group of panels, or if it is too large for that what comes next in each. Groups and tiles are whole ones always: the
// last begins before the end of the one before it, and what it computes again has the same bits.
template <class V, class P>
void run_few_rows(const Job &job) {
    const int64_t tiles = job.m > kFewRowsAtOnce ? 2 : 1, count = job.last - job.first;
    with_rows<std::min<int>(few_rows<V, P>(), kFewRowsAtOnce)>((job.m + tiles - 1) / tiles, [&](auto rows) {
        constexpr int kRows = decltype(rows)::value, kMany = panels_at_once<V, P>(kRows);
        const auto group = [&](int64_t panel, auto panels) {
            constexpr int kPanels = decltype(panels)::value;
            const int64_t stride = job.w.panel_bytes, next = kPanels * stride;
            const Ahead ahead{job.w.panel(panel) + (next <= kGroupBytesMax ? next : kBytesAhead), P::kBlockBytes};
            for (int64_t tile = 0; tile < tiles; ++tile) {
                const int64_t row = tile * (job.m - kRows);
                into<kRows, kPanels>(job, row, panel, false, true, [&](const Target &to) {
                    multiply<V, P, kRows, kPanels>(job.w.panel(panel), stride, job.w.inputs,
                                                   StridedRows{job.x + row * job.ldx, job.ldx}, to, ahead);
                });
            }
        };
        if (count < kMany) {
            for (int64_t i = job.first; i < job.last; ++i) group(i, std::integral_constant<int, 1>{});
        } else {
            for (int64_t at = 0; at < count; at += kMany)
                group(job.first + std::min(at, count - kMany), std::integral_constant<int, kMany>{});
        }
    });
}

}  // namespace shoal
