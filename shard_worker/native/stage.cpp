// The layer loop. All threads of the pool walk it together and meet at a barrier between its phases.
//
// Two ways to share out a step, with the same numbers: few tokens share out the outputs of each product, so that a
// weight is read by one thread once; many tokens share out blocks of rows, which a thread takes from the attention's
// sums through the rest of the layer and the next one's queries, keys and values without meeting anyone.
#include "stage.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <vector>

#include "attention.h"
#include "barrier.h"
#include "buffer.h"
#include "map.h"
#include "ops.h"
#include "step_clock.h"

namespace {

using namespace shoal;

constexpr int64_t BLOCK_ROWS = 64;  // rows that a thread takes at once
constexpr int64_t SLOTS = 256;      // for pieces of contexts

struct Layer {
    shoal_layer norms;  // and options
    Map qkv, out, gate_up, down;

    Layer(const shoal_layer &layer, int threads)
        : norms(layer), qkv(layer.qkv, threads), out(layer.out, threads), gate_up(layer.gate_up, threads),
          down(layer.down, threads) {}
};

}  // namespace

struct shoal_stage {
    shoal_stage(const shoal_stage_config &config, shoal_pool *pool)
        : c(config), multiply(config.int8 ? shoal_linear_run_int8 : config.narrow ? shoal_linear_run_bf16 : shoal_linear_run),
          pool(pool), threads(shoal_pool_threads(pool)), one16(uses_one16()), ops(ops_of(one16)), barrier(threads),
          ropes(config.ropes, config.ropes + config.num_ropes) {
        for (int64_t i = 0; i < config.num_layers; i++) layers.emplace_back(config.layers[i], threads);
        if (config.head_norm) head = Map(config.head, 4 * threads);
    }

    shoal_stage_config c;
    Run multiply;
    shoal_pool *pool;
    int threads;
    bool one16;
    const Ops &ops;
    Barrier barrier;
    std::vector<Layer> layers;
    std::vector<shoal_rope> ropes;
    Map head;
    int64_t times[SHOAL_TIME_PHASES] = {};

    // What attach takes.
    AttentionShape shape{};
    std::vector<void *> pages;
    int64_t tokens_max = 0, wide_rows = 0, scratch_bytes = 0;
    Buffer<float> hidden, normed, qkv, mixed, added, gates, turns;
    Buffer<AttentionUnit> units, last_units;
    Buffer<char> slots;                     // of units that are pieces
    Buffer<std::atomic<int32_t>> finished;  // pieces, by a head's first slot
    Buffer<int64_t> kept;
    Buffer<char> scratch;

    // The step under way.
    const shoal_step *step = nullptr;
    int64_t num_units = 0, num_last_units = 0;
    int64_t num_kept = 0;  // rows that the last layer ends with: all, or those of the tokens `kept`
    bool trimmed = false;
    bool pieced = false;  // units are pieces of contexts
    const int64_t *places = nullptr;
    int64_t num_places = 0;
    float *logits = nullptr;

    int64_t qkv_width() const { return shape.qkv_width(); }
    int64_t mixed_width() const { return c.heads * c.head_dim; }
    void *scratch_of(int part) const { return scratch + part * scratch_bytes; }
    bool decodes_only() const { return step->num_rows == step->num_tokens; }
    bool by_rows() const { return step->num_tokens >= 2 * BLOCK_ROWS; }

    void attach(const shoal_stage_memory &memory);
    void begin(const shoal_step &next);
    void run(int part);
    int64_t row_of(int64_t token) const;
    void run_head(int part);

private:
    template <typename F>
    void share(int64_t count, F f) {
        for (int64_t i; (i = barrier.take()) < count;) f(i);
    }
    void wait(Clock &clock) {
        barrier.wait();
        clock.spent(SHOAL_TIME_WAIT);
    }
    void enter(int64_t t);
    void leave(int64_t t);
    // A row stays with its thread from layer to layer, and with its thread's cache.
    template <typename F>
    void own_rows(int64_t count, int part, F f) {
        for (int64_t t = count * part / threads; t < count * (part + 1) / threads; t++) f(t);
    }
    template <typename F>
    void each_row(int64_t count, int part, Clock &clock, F f) {
        own_rows(count, part, f);
        clock.spent(SHOAL_TIME_NORMS);
        wait(clock);
    }
    bool is_last(size_t index) const { return trimmed && index + 1 == layers.size(); }
    // Attention turns the row it takes, where each row is one token and none is left out.
    bool turns_apart(size_t index) const { return !decodes_only() || pieced || is_last(index); }
    AttentionCall call(size_t index) {
        return {shape, *step, pages[index], layers[index].norms.window, qkv, mixed};
    }
    void product(const Map &map, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t n, int part, Clock &clock);
    void gates_of_all(const Layer &layer, int64_t n, int part, Clock &clock);
    void turn(size_t index, int64_t t, int64_t head, int64_t heads);
    void attend_all(size_t index, int part, Clock &clock);
    void trim(int part, Clock &clock);
    void after_attention(const Layer &layer, int64_t t, const float *row);
    void after_mlp(size_t index, int64_t t, const float *row);
    void activate(float *row, int64_t first, int64_t end) const;
    void by_outputs(int part, Clock &clock);
    void outputs_after(size_t index, int64_t n, int part, Clock &clock);
    void rows_before(size_t index, int64_t first, int64_t end, int part, Clock &clock);
    void rows_after(size_t index, int64_t first, int64_t end, int part, Clock &clock);
    void by_blocks(int part, Clock &clock);
};

void shoal_stage::attach(const shoal_stage_memory &memory) {
    shape = {c.heads, c.kv_heads, c.head_dim, memory.block_size, c.score_scale, c.score_softcap, c.narrow != 0, one16};
    pages.assign(memory.pages, memory.pages + layers.size());
    tokens_max = memory.step_tokens_max;
    wide_rows = std::max(std::min(tokens_max, 2 * BLOCK_ROWS), threads * BLOCK_ROWS);
    int64_t half_max = 0;
    for (const shoal_rope &rope : ropes) half_max = std::max(half_max, rope.rotary_dim / 2);
    hidden.take(tokens_max * c.hidden);
    normed.take(tokens_max * c.hidden);
    qkv.take(tokens_max * qkv_width());
    mixed.take(tokens_max * mixed_width());
    added.take(wide_rows * c.hidden);
    gates.take(wide_rows * 2 * c.inner);
    turns.take(tokens_max * (int64_t)ropes.size() * 2 * half_max);
    units.take(tokens_max * c.kv_heads + SLOTS);
    if (c.head_norm) last_units.take(tokens_max * c.kv_heads);
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

// ---- rows of one token ---------------------------------------------------------------------------------------------

void shoal_stage::enter(int64_t t) {
    float *row = hidden + t * c.hidden;
    if (c.embedding) {
        shoal_linear_dequantize_row(c.embedding, step->token_ids[t], row);
        if (c.embedding_scale != 1.0f) ops.scale_row(row, c.embedding_scale, c.hidden);
    } else if (c.narrow) {
        ops.widen((const uint16_t *)step->activations_in + t * c.hidden, c.hidden, row);
    } else {
        const float *from = (const float *)step->activations_in + t * c.hidden;
        std::copy(from, from + c.hidden, row);
    }
    float *at = turns;
    for (const shoal_rope &rope : ropes) {
        const int64_t half = rope.rotary_dim / 2;
        float *cosines = at + t * 2 * half;
        angles(step->positions[t], rope.frequencies, rope.scale, half, cosines, cosines + half);
        at += tokens_max * 2 * half;
    }
    if (!layers.empty()) ops.rms_norm(row, layers[0].norms.attention_norm, c.rms_eps, c.hidden, normed + t * c.hidden);
}

void shoal_stage::leave(int64_t t) {
    if (!step->activations_out) return;
    const float *row = hidden + t * c.hidden;
    if (c.narrow)
        ops.narrow(row, c.hidden, (uint16_t *)step->activations_out + t * c.hidden);
    else
        std::copy(row, row + c.hidden, (float *)step->activations_out + t * c.hidden);
}

// Under KV heads [head, head + heads): queries and keys are normed and rotated, keys and values go to their slots.
void shoal_stage::turn(size_t index, int64_t t, int64_t head, int64_t heads) {
    const shoal_layer &layer = layers[index].norms;
    float *row = qkv + t * qkv_width();
    const float *at = turns;
    for (int64_t i = 0; i < layer.rope; i++) at += tokens_max * ropes[i].rotary_dim;
    const int64_t half = ropes[layer.rope].rotary_dim / 2, group = shape.group();
    const float *cosines = at + t * 2 * half;
    auto turned = [&](float *x, const float *norm) {
        if (norm) ops.rms_norm(x, norm, c.rms_eps, c.head_dim, x);
        ops.rotate(x, cosines, cosines + half, half);
    };
    for (int64_t h = head * group; h < (head + heads) * group; h++) turned(row + h * c.head_dim, layer.q_norm);
    for (int64_t h = head; h < head + heads; h++) turned(row + (c.heads + h) * c.head_dim, layer.k_norm);
    write_kv(call(index), t, head, heads);
}

void shoal_stage::after_attention(const Layer &layer, int64_t t, const float *row) {
    float *to = hidden + t * c.hidden;
    if (layer.norms.post_attention_norm) {
        ops.rms_norm(row, layer.norms.post_attention_norm, c.rms_eps, c.hidden, normed + t * c.hidden);
        row = normed + t * c.hidden;
    }
    ops.add_residual(to, row, c.hidden, false);
    ops.rms_norm(to, layer.norms.mlp_norm, c.rms_eps, c.hidden, normed + t * c.hidden);
}

void shoal_stage::after_mlp(size_t index, int64_t t, const float *row) {
    float *to = hidden + t * c.hidden;
    const Layer &layer = layers[index];
    if (layer.norms.post_mlp_norm) {
        ops.rms_norm(row, layer.norms.post_mlp_norm, c.rms_eps, c.hidden, normed + t * c.hidden);
        row = normed + t * c.hidden;
    }
    ops.add_residual(to, row, c.hidden, c.narrow != 0);
    if (index + 1 < layers.size())
        ops.rms_norm(to, layers[index + 1].norms.attention_norm, c.rms_eps, c.hidden, normed + t * c.hidden);
}

void shoal_stage::activate(float *row, int64_t first, int64_t end) const {
    (c.activation != SHOAL_SILU ? ops.gelu_times : c.narrow ? ops.silu_times_rough : ops.silu_times)(
        row + first, row + c.inner + first, end - first);
}

void shoal_stage::attend_all(size_t index, int part, Clock &clock) {
    const AttentionCall call = this->call(index);
    const AttentionUnit *first = is_last(index) ? last_units : units;
    const int64_t count = is_last(index) ? num_last_units : num_units;
    // The last of a chunk see most: they begin first.
    share(count, [&](int64_t i) {
        const AttentionUnit &unit = first[count - 1 - i];
        if (!turns_apart(index)) turn(index, unit.first, unit.head, unit.heads);
        const AttentionUnit *next = i + threads < count ? &unit - threads : nullptr;
        if (!unit.pieces) return attend(call, unit, next, scratch_of(part));
        attend_piece(call, unit, next, slots);
        if (finished[unit.slot].fetch_add(1, std::memory_order_acq_rel) + 1 < unit.pieces) return;
        finished[unit.slot].store(0, std::memory_order_relaxed);
        join_pieces(call, unit, slots);
    });
    clock.spent(SHOAL_TIME_ATTENTION);
    wait(clock);
}

// Of the last layer's rows only those go on whose logits are wanted.
void shoal_stage::trim(int part, Clock &clock) {
    if (part == 0)
        for (int64_t i = 0; i < num_kept; i++) {
            const int64_t t = kept[i];
            if (t == i) continue;
            std::copy(hidden + t * c.hidden, hidden + (t + 1) * c.hidden, hidden + i * c.hidden);
            std::copy(mixed + t * mixed_width(), mixed + (t + 1) * mixed_width(), mixed + i * mixed_width());
        }
    clock.spent(SHOAL_TIME_EDGES);
    wait(clock);
}

// ---- few tokens: products by outputs -------------------------------------------------------------------------------

void shoal_stage::product(const Map &map, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t n, int part,
                          Clock &clock) {
    const std::vector<Piece> &pieces = map.pieces;
    share(pieces.size(), [&](int64_t i) { map.run(pieces[i], multiply, x, ldx, n, y, ldy, scratch_of(part)); });
    clock.spent(SHOAL_TIME_PRODUCTS);
    wait(clock);
}

// Gate and up, and the one's activation times the other: at once, where they are matrices of their own.
void shoal_stage::gates_of_all(const Layer &layer, int64_t n, int part, Clock &clock) {
    const int64_t ld = 2 * c.inner;
    const Map &map = layer.gate_up;
    if (!map.pairs(c.inner)) {
        product(map, normed, c.hidden, gates, ld, n, part, clock);
        own_rows(n, part, [&](int64_t t) { activate(gates + t * ld, 0, c.inner); });
    } else {
        const std::vector<Piece> &pieces = map.pieces;
        const int64_t pairs = (int64_t)pieces.size() / 2;
        share(pairs, [&](int64_t i) {
            const Piece &gate = pieces[i];
            for (const Piece *piece : {&gate, &pieces[pairs + i]})
                map.run(*piece, multiply, normed, c.hidden, n, gates, ld, scratch_of(part));
            clock.spent(SHOAL_TIME_PRODUCTS);
            for (int64_t t = 0; t < n; t++) activate(gates + t * ld, gate.first, gate.end);
            clock.spent(SHOAL_TIME_NORMS);
        });
    }
    clock.spent(SHOAL_TIME_NORMS);
    wait(clock);
}

void shoal_stage::outputs_after(size_t index, int64_t n, int part, Clock &clock) {
    const Layer &layer = layers[index];
    product(layer.out, mixed, mixed_width(), added, c.hidden, n, part, clock);
    each_row(n, part, clock, [&](int64_t t) { after_attention(layer, t, added + t * c.hidden); });
    gates_of_all(layer, n, part, clock);
    product(layer.down, gates, 2 * c.inner, added, c.hidden, n, part, clock);
    each_row(n, part, clock, [&](int64_t t) { after_mlp(index, t, added + t * c.hidden); });
}

void shoal_stage::by_outputs(int part, Clock &clock) {
    for (size_t i = 0; i < layers.size(); i++) {
        product(layers[i].qkv, normed, c.hidden, qkv, qkv_width(), step->num_tokens, part, clock);
        if (turns_apart(i)) each_row(step->num_tokens, part, clock, [&](int64_t t) { turn(i, t, 0, c.kv_heads); });
        if (is_last(i) && !num_kept) return;
        attend_all(i, part, clock);
        if (is_last(i)) trim(part, clock);
        outputs_after(i, is_last(i) ? num_kept : step->num_tokens, part, clock);
    }
}

// ---- many tokens: blocks of rows -----------------------------------------------------------------------------------

void shoal_stage::rows_before(size_t index, int64_t first, int64_t end, int part, Clock &clock) {
    const Layer &layer = layers[index];
    layer.qkv.run_all(multiply, normed + first * c.hidden, c.hidden, end - first, qkv + first * qkv_width(), qkv_width(),
                      scratch_of(part));
    clock.spent(SHOAL_TIME_PRODUCTS);
    if (!turns_apart(index)) return;
    for (int64_t t = first; t < end; t++) turn(index, t, 0, c.kv_heads);
    clock.spent(SHOAL_TIME_NORMS);
}

void shoal_stage::rows_after(size_t index, int64_t first, int64_t end, int part, Clock &clock) {
    const Layer &layer = layers[index];
    const int64_t rows = end - first;
    float *sums = added + part * BLOCK_ROWS * c.hidden, *inner = gates + part * BLOCK_ROWS * 2 * c.inner;
    void *own = scratch_of(part);
    layer.out.run_all(multiply, mixed + first * mixed_width(), mixed_width(), rows, sums, c.hidden, own);
    clock.spent(SHOAL_TIME_PRODUCTS);
    for (int64_t t = 0; t < rows; t++) after_attention(layer, first + t, sums + t * c.hidden);
    clock.spent(SHOAL_TIME_NORMS);
    layer.gate_up.run_all(multiply, normed + first * c.hidden, c.hidden, rows, inner, 2 * c.inner, own);
    clock.spent(SHOAL_TIME_PRODUCTS);
    for (int64_t t = 0; t < rows; t++) activate(inner + t * 2 * c.inner, 0, c.inner);
    clock.spent(SHOAL_TIME_NORMS);
    layer.down.run_all(multiply, inner, 2 * c.inner, rows, sums, c.hidden, own);
    clock.spent(SHOAL_TIME_PRODUCTS);
    for (int64_t t = 0; t < rows; t++) after_mlp(index, first + t, sums + t * c.hidden);
    clock.spent(SHOAL_TIME_NORMS);
}

void shoal_stage::by_blocks(int part, Clock &clock) {
    int64_t n = step->num_tokens;
    for (size_t i = 0; i <= layers.size(); i++) {
        const int64_t blocks = std::max<int64_t>(threads, (n + BLOCK_ROWS - 1) / BLOCK_ROWS);
        share(blocks, [&](int64_t b) {
            const int64_t first = b * n / blocks, end = (b + 1) * n / blocks;
            if (i > 0) rows_after(i - 1, first, end, part, clock);
            if (i < layers.size()) rows_before(i, first, end, part, clock);
        });
        wait(clock);
        if (i == layers.size() || (is_last(i) && !num_kept)) return;
        attend_all(i, part, clock);
        if (!is_last(i)) continue;
        trim(part, clock);
        n = num_kept;
        if (n < 2 * BLOCK_ROWS) return outputs_after(i, n, part, clock);
    }
}

// ---- a step --------------------------------------------------------------------------------------------------------

void shoal_stage::begin(const shoal_step &next) {
    step = &next;
    const bool together = step->num_rows >= 4 * threads;
    num_units = num_last_units = 0;
    trimmed = c.head_norm && step->wanted && step->num_wanted < step->num_tokens;
    num_kept = trimmed ? step->num_wanted : step->num_tokens;
    // Where heads are too few to keep the threads busy, long contexts are shared out too.
    pieced = false;
    if (threads > 1 && decodes_only() && step->num_rows * c.kv_heads < 4 * threads) {
        int64_t slot = 0;
        for (int64_t row = 0; row < step->num_rows; row++) {
            const int64_t cut = cut_pieces(shape, (int32_t)row, (int32_t)row, step->positions[row], (int32_t)slot,
                                           (int32_t)(SLOTS - slot), units + num_units);
            slot += cut, pieced |= cut > 0;
            num_units += cut ? cut
                             : cut_units(shape, (int32_t)row, (int32_t)row, (int32_t)row + 1, false, units + num_units);
        }
    }
    if (!pieced) num_units = 0;
    for (int64_t row = 0; row < step->num_rows && !pieced; row++)
        num_units += cut_units(shape, (int32_t)row, step->row_offsets[row], step->row_offsets[row + 1], together,
                               units + num_units);
    if (!trimmed) return;
    std::copy(step->wanted, step->wanted + num_kept, (int64_t *)kept);
    int64_t row = 0;
    for (int64_t i = 0; i < num_kept;) {  // tokens in line are units together
        while (step->row_offsets[row + 1] <= kept[i]) row++;
        int64_t end = i + 1;
        while (end < num_kept && kept[end] == kept[end - 1] + 1 && kept[end] < step->row_offsets[row + 1]) end++;
        num_last_units += cut_units(shape, (int32_t)row, (int32_t)kept[i], (int32_t)kept[end - 1] + 1, together,
                                    last_units + num_last_units);
        i = end;
    }
}

// Where the last run left a token's row; -1: nowhere.
int64_t shoal_stage::row_of(int64_t token) const {
    if (!trimmed) return token >= 0 && token < num_kept ? token : -1;
    const int64_t *end = kept + num_kept, *at = std::lower_bound((const int64_t *)kept, end, token);
    return at < end && *at == token ? at - kept : -1;
}

void shoal_stage::run(int part) {
    Clock clock(part == 0 ? times : nullptr);
    own_rows(step->num_tokens, part, [&](int64_t t) { enter(t); });
    clock.spent(SHOAL_TIME_EDGES);
    wait(clock);
    if (by_rows())
        by_blocks(part, clock);
    else
        by_outputs(part, clock);
    if (!step->activations_out) return;
    own_rows(step->num_tokens, part, [&](int64_t t) { leave(t); });
    clock.spent(SHOAL_TIME_EDGES);
    wait(clock);
}

void shoal_stage::run_head(int part) {
    Clock clock(part == 0 ? times : nullptr);
    own_rows(num_places, part, [&](int64_t i) {
        ops.rms_norm(hidden + row_of(places[i]) * c.hidden, c.head_norm, c.rms_eps, c.hidden, normed + i * c.hidden);
    });
    barrier.wait();
    const std::vector<Piece> &pieces = head.pieces;
    share(pieces.size(), [&](int64_t i) {
        head.run(pieces[i], multiply, normed, c.hidden, num_places, logits, c.vocab, scratch_of(part));
    });
    barrier.wait();
    if (c.logit_softcap != 0.0f)
        own_rows(num_places, part, [&](int64_t i) { ops.cap_row(logits + i * c.vocab, c.logit_softcap, c.vocab); });
    barrier.wait();
    clock.spent(SHOAL_TIME_HEAD);
}

// ---- C -------------------------------------------------------------------------------------------------------------

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

int shoal_stage_logits(shoal_stage *stage, const int64_t *places, int64_t count, float *logits) {
    if (count > stage->tokens_max) return -1;
    for (int64_t i = 0; i < count; i++)
        if (stage->row_of(places[i]) < 0) return -1;
    if (!count) return 0;
    stage->places = places, stage->num_places = count, stage->logits = logits;
    shoal_pool_run(stage->pool, [](void *arg, int part, int) { ((shoal_stage *)arg)->run_head(part); }, stage);
    return 0;
}

void shoal_stage_times(const shoal_stage *stage, int64_t *ns) {
    std::copy(stage->times, stage->times + SHOAL_TIME_PHASES, ns);
}

int shoal_attention(shoal_pool *pool, const shoal_step *step, void *pages, const shoal_stage_config *config,
                    int64_t block_size, int64_t window, const float *qkv, float *out) {
    if (config->head_dim % 8) return -1;
    const AttentionShape shape{config->heads,         config->kv_heads,    config->head_dim,    block_size,
                               config->score_scale,   config->score_softcap, config->narrow != 0, uses_one16()};
    struct Work {
        AttentionCall call;
        std::vector<AttentionUnit> units;
        std::vector<char> scratch;
    } work{{shape, *step, pages, window, qkv, out}, std::vector<AttentionUnit>(step->num_tokens * shape.kv_heads), {}};
    const int threads = shoal_pool_threads(pool);
    int64_t count = 0;
    for (int64_t row = 0; row < step->num_rows; row++)
        count += cut_units(shape, (int32_t)row, step->row_offsets[row], step->row_offsets[row + 1],
                           step->num_rows >= 4 * threads, work.units.data() + count);
    work.units.resize(count);
    work.scratch.resize(attention_scratch_bytes(shape) * threads);
    for (int64_t t = 0; t < step->num_tokens; t++) write_kv(work.call, t, 0, shape.kv_heads);
    shoal_pool_run(
        pool,
        [](void *arg, int part, int parts) {
            Work &w = *(Work *)arg;
            for (size_t i = part; i < w.units.size(); i += parts)
                attend(w.call, w.units[i], i + parts < w.units.size() ? &w.units[i + parts] : nullptr,
                       w.scratch.data() + part * (w.scratch.size() / parts));
        },
        &work);
    return 0;
}
