#include "attention_units.h"

#include <algorithm>

#include "attention_walk.h"

namespace shoal {

void AttentionUnits::take(const AttentionShape &shape, int64_t tokens_max, int threads, int64_t slots) {
    shape_ = shape, threads_ = threads, slots_ = slots;
    units_.take(tokens_max * shape.kv_heads + slots);
    lone_.take(tokens_max);
}

void AttentionUnits::add(int32_t row, int32_t first, int32_t end) {
    if (end - first == 1)
        lone_[num_lone_++] = {row, first, 0};
    else
        num_units_ += cut_units(shape_, row, first, end, false, units_ + num_units_);
}

// Neighbours in the order of tables have most in common.
void AttentionUnits::close(const shoal_step &step, bool together) {
    const int64_t per_block = shape_.block_pad() / WIDTH;
    auto table = [&](const Sharer &one) { return step.block_tables + one.row * step.table_stride; };
    auto table_end = [&](const Sharer &one) { return table(one) + step.positions[one.token] / shape_.block_size + 1; };
    Sharer *lone = lone_, *end = lone + num_lone_;
    if (shape_.sharers_max() > 1) {
        std::sort(lone, end, [&](const Sharer &a, const Sharer &b) {
            const int32_t *end_a = table_end(a), *end_b = table_end(b);
            const auto [of_a, of_b] = std::mismatch(table(a), end_a, table(b), end_b);
            if (of_a != end_a && of_b != end_b) return *of_a < *of_b;
            return of_a == end_a && of_b == end_b ? a.row < b.row : of_a == end_a;
        });
        for (Sharer *one = lone + 1; one < end; one++) {
            const int32_t *before = table(one[-1]);
            const auto differs = std::mismatch(before, table_end(one[-1]), table(*one), table_end(*one)).first;
            one->tiles = (int32_t)((differs - before) * per_block / TILE_STRIPS);
        }
    }
    for (Sharer *first = lone, *next; first < end; first = next) {
        for (next = first + 1; next < end && next->tiles; next++) {}
        if (next - first > 1) cut_group(first, next - first);
    }
    const int64_t grouped = num_units_;
    for (Sharer *one = lone; one < end; one++)
        if (!one->tiles && (one + 1 == end || !one[1].tiles))
            num_units_ += cut_units(shape_, one->row, one->token, one->token + 1, together, units_ + num_units_);
    // As rows lie in memory.
    std::sort(units_ + grouped, units_ + num_units_, [](const AttentionUnit &a, const AttentionUnit &b) {
        return a.first != b.first ? a.first < b.first : a.head < b.head;
    });
}

// Each head by itself, in parts that keep the threads busy alike.
void AttentionUnits::cut_group(const Sharer *sharers, int64_t count) {
    const int64_t most = shape_.sharers_max();
    int64_t parts = (count + most - 1) / most;
    while (parts * shape_.kv_heads % threads_ && parts < count / 2) parts++;
    for (int32_t head = 0; head < shape_.kv_heads; head++)
        for (int64_t part = 0; part < parts; part++) {
            const int64_t first = count * part / parts, end = count * (part + 1) / parts;
            units_[num_units_++] = {sharers[first].row, sharers[first].token, (int32_t)(end - first), head, 1, 0, 0, 0,
                                    sharers + first};
        }
}

bool AttentionUnits::cut_in_pieces(const shoal_step &step) {
    begin();
    bool any = false;
    int64_t slot = 0;
    for (int32_t row = 0; row < step.num_rows; row++) {
        const int64_t cut = cut_pieces(shape_, row, row, step.positions[row], (int32_t)slot, (int32_t)(slots_ - slot),
                                       units_ + num_units_);
        slot += cut, any |= cut > 0;
        num_units_ += cut ? cut : cut_units(shape_, row, row, row + 1, false, units_ + num_units_);
    }
    if (!any) begin();
    return any;
}

}  // namespace shoal
