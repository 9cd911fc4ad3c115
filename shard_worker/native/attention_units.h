// A step's attention, cut into units.
//
// Decodes whose tables begin with the same blocks are units together: one pass over those blocks serves their rows, and
// each goes on through its own. Who is in a unit changes no row's numbers.
#pragma once

#include <cstdint>

#include "attention.h"
#include "buffer.h"

namespace shoal {

class AttentionUnits {
public:
    // For steps of that many tokens, by that many threads; `slots`: for pieces of contexts, at most.
    void take(const AttentionShape &shape, int64_t tokens_max, int threads, int64_t slots);

    // Then tokens of one row, [first, end), row after row; then all are cut.
    void begin() { num_units_ = num_lone_ = 0; }
    void add(int32_t row, int32_t first, int32_t end);
    void close(const shoal_step &step, bool together);

    // Instead: decodes, one a row, of which long contexts are shared out in pieces. False: none is; nothing is there.
    bool cut_in_pieces(const shoal_step &step);

    int64_t count() const { return num_units_; }
    const AttentionUnit &operator[](int64_t i) const { return units_[i]; }

private:
    void cut_group(const Sharer *sharers, int64_t count);

    AttentionShape shape_{};
    int threads_ = 1;
    int64_t slots_ = 0;
    Buffer<AttentionUnit> units_;
    Buffer<Sharer> lone_;  // tokens that are alone in their rows
    int64_t num_units_ = 0, num_lone_ = 0;
};

}  // namespace shoal
