// A step's attention: how it is cut into units, and how the threads take them.
#include <algorithm>
#include <atomic>
#include <vector>

#include "stage_state.h"

namespace shoal {

// Into `units`, and `last_units` of the rows that are kept.
void Stage::cut() {
    const bool together = step->num_rows >= 4 * threads;
    // Where heads are too few to keep the threads busy, long contexts are shared out too.
    pieced = threads > 1 && decodes_only() && step->num_rows * c.kv_heads < 4 * threads && units.cut_in_pieces(*step);
    if (!pieced) {
        units.begin();
        for (int32_t row = 0; row < step->num_rows; row++)
            units.add(row, step->row_offsets[row], step->row_offsets[row + 1]);
        units.close(*step, together);
    }
    if (!trimmed) return;
    last_units.begin();
    int32_t row = 0;
    for (int64_t i = 0; i < num_kept;) {  // tokens in line are units together
        while (step->row_offsets[row + 1] <= kept[i]) row++;
        int64_t end = i + 1;
        while (end < num_kept && kept[end] == kept[end - 1] + 1 && kept[end] < step->row_offsets[row + 1]) end++;
        last_units.add(row, (int32_t)kept[i], (int32_t)kept[end - 1] + 1);
        i = end;
    }
    last_units.close(*step, together);
}

void Stage::attend_all(size_t index, int part, Clock &clock) {
    const AttentionCall call = this->call(index);
    const AttentionUnits &all = is_last(index) ? last_units : units;
    // The last of a chunk see most: they begin first.
    share(all.count(), [&](int64_t i) {
        const AttentionUnit &unit = all[all.count() - 1 - i];
        if (!turns_apart(index))
            for (int32_t n = 0; n < unit.count; n++)
                turn(index, unit.sharers ? unit.sharers[n].token : unit.first + n, unit.head, unit.heads);
        const AttentionUnit *next = i + threads < all.count() ? &unit - threads : nullptr;
        if (!unit.pieces) return attend(call, unit, next, scratch_of(part));
        attend_piece(call, unit, next, slots);
        if (finished[unit.slot].fetch_add(1, std::memory_order_acq_rel) + 1 < unit.pieces) return;
        finished[unit.slot].store(0, std::memory_order_relaxed);
        join_pieces(call, unit, slots);
    });
    clock.spent(SHOAL_TIME_ATTENTION);
    wait(clock);
}

}  // namespace shoal

using namespace shoal;

int shoal_attention(shoal_pool *pool, const shoal_step *step, void *pages, const shoal_stage_config *config,
                    int64_t block_size, int64_t window, const float *qkv, float *out) {
    if (config->head_dim % 8) return -1;
    const AttentionShape shape{config->heads,         config->kv_heads,    config->head_dim,    block_size,
                               config->score_scale,   config->score_softcap, config->narrow != 0, uses_one16()};
    struct Work {
        AttentionCall call;
        AttentionUnits units;
        std::vector<char> scratch;
    } work{{shape, *step, pages, window, qkv, out}, {}, {}};
    const int threads = shoal_pool_threads(pool);
    work.units.take(shape, step->num_tokens, threads, 0);
    work.units.begin();
    for (int32_t row = 0; row < step->num_rows; row++)
        work.units.add(row, step->row_offsets[row], step->row_offsets[row + 1]);
    work.units.close(*step, step->num_rows >= 4 * threads);
    work.scratch.resize(attention_scratch_bytes(shape) * threads);
    for (int64_t t = 0; t < step->num_tokens; t++) write_kv(work.call, t, 0, shape.kv_heads);
    shoal_pool_run(
        pool,
        [](void *arg, int part, int parts) {
            Work &w = *(Work *)arg;
            for (int64_t i = part; i < w.units.count(); i += parts)
                attend(w.call, w.units[i], i + parts < w.units.count() ? &w.units[i + parts] : nullptr,
                       w.scratch.data() + part * (w.scratch.size() / parts));
        },
        &work);
    return (int)work.units.count();
}
