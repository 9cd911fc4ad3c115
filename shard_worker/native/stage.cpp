// A stage is made, takes its memory, and runs when it is told to.
#include "stage.h"

#include <algorithm>
#include <atomic>
#include <new>

#include "stage_state.h"

namespace shoal {

void Stage::attach(const shoal_stage_memory &memory) {
    shape = {c.heads, c.kv_heads, c.head_dim, memory.block_size, c.score_scale, c.score_softcap, c.narrow != 0, one16};
    pages.assign(memory.pages, memory.pages + layers.size());
    tokens_max = memory.step_tokens_max;
    wide_rows = std::max(std::min(tokens_max, 2 * BLOCK_ROWS), threads * BLOCK_ROWS);
    if (c.total) wide_rows = std::max(tokens_max, wide_rows);
    int64_t half_max = 0;
    for (const shoal_rope &rope : ropes) half_max = std::max(half_max, rope.rotary_dim / 2);
    hidden.take(tokens_max * c.hidden);
    normed.take(tokens_max * c.hidden);
    qkv.take(tokens_max * qkv_width());
    mixed.take(tokens_max * mixed_width());
    added.take(wide_rows * c.hidden);
    gates.take(wide_rows * 2 * c.inner);
    if (paired) normed_pairs.take(tokens_max * normed_stride());
    if (paired) gated_pairs.take(wide_rows * gated_stride());
    turns.take(tokens_max * (int64_t)ropes.size() * 2 * half_max);
    units.take(shape, tokens_max, threads, SLOTS);
    if (c.head_norm) last_units.take(shape, tokens_max, threads, 0);
    if (c.head_norm) kept.take(tokens_max);
    if (threads > 1) {
        slots.take(SLOTS * (int64_t)attention_slot_bytes(shape));
        finished.take(SLOTS);
        for (int64_t i = 0; i < SLOTS; i++) new (finished + i) std::atomic<int32_t>(0);
    }
    size_t bytes = attention_scratch_bytes(shape);
    for (const Layer &layer : layers)
        for (const Map *map : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down})
            bytes = std::max(bytes, map->scratch_bytes(std::min(tokens_max, wide_rows)));
    if (c.head_norm) bytes = std::max(bytes, head.scratch_bytes(tokens_max));
    scratch_bytes = (int64_t)((bytes + 4095) / 4096 * 4096);
    scratch.take(threads * scratch_bytes);
}

}  // namespace shoal

shoal_stage *shoal_stage_create(const shoal_stage_config *config, shoal_pool *pool) {
    if (config->hidden % 8 || config->head_dim % 8 || config->inner % 8) return nullptr;
    try {
        return new shoal_stage(*config, pool);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

void shoal_stage_destroy(shoal_stage *stage) { delete stage; }

int64_t shoal_stage_block_pad(int64_t block_size) { return (block_size + 15) / 16 * 16; }

int shoal_stage_attach(shoal_stage *stage, const shoal_stage_memory *memory) {
    try {
        stage->attach(*memory);
        return 0;
    } catch (const std::bad_alloc &) {
        return -1;
    }
}

void shoal_stage_run(shoal_stage *stage, const shoal_step *step) {
    stage->begin(*step);
    shoal_pool_run(stage->pool, [](void *arg, int part, int) { ((shoal_stage *)arg)->run(part); }, stage);
    stage->step = nullptr;
}

void shoal_stage_times(const shoal_stage *stage, int64_t *ns) {
    std::copy(stage->times, stage->times + SHOAL_TIME_PHASES, ns);
}
