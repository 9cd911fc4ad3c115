// A stage from within: what it is made of, what it has taken, and the step under way.
//
// All threads of the pool walk a step together and meet at a barrier between its phases; each function that takes a `part`
// is called by all of them. stage.cpp makes it, stage_rows.cpp is what happens to one token's row, stage_units.cpp its
// attention, stage_step.cpp the layer loop, stage_head.cpp the logits.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "attention_units.h"
#include "barrier.h"
#include "buffer.h"
#include "map.h"
#include "ops.h"
#include "stage.h"
#include "step_clock.h"

namespace shoal {

constexpr int64_t BLOCK_ROWS = 64;  // rows that a thread takes at once
constexpr int64_t SLICE = 96;       // outputs of gate and up whose sums stay in the first cache until they are activated
constexpr int64_t SLOTS = 256;      // for pieces of contexts

struct Layer {
    shoal_layer norms;  // and options
    Map qkv, out, gate_up, down;

    Layer(const shoal_layer &layer, int threads)
        : norms(layer), qkv(layer.qkv, threads), out(layer.out, threads), gate_up(layer.gate_up, threads),
          down(layer.down, threads) {}

    bool rounds() const { return qkv.rounds() && gate_up.rounds() && down.rounds(); }
};

class Stage {
public:
    Stage(const shoal_stage_config &config, shoal_pool *pool)
        : c(config), multiply(config.int8 ? shoal_linear_run_int8 : config.narrow ? shoal_linear_run_bf16 : shoal_linear_run),
          pool(pool), threads(shoal_pool_threads(pool)), one16(uses_one16()), ops(ops_of(one16)), barrier(threads),
          ropes(config.ropes, config.ropes + config.num_ropes) {
        for (int64_t i = 0; i < config.num_layers; i++) layers.emplace_back(config.layers[i], threads);
        if (config.head_norm) head = Map(config.head, 4 * threads);
        paired = c.narrow && !c.int8;
        for (const Layer &layer : layers) paired = paired && layer.rounds();
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
    bool paired = false;  // what norms and activations give is rounded where it is made, once for all threads
    int64_t times[SHOAL_TIME_PHASES] = {};

    // What attach takes.
    AttentionShape shape{};
    std::vector<void *> pages;
    int64_t tokens_max = 0, wide_rows = 0, scratch_bytes = 0;
    Buffer<float> hidden, normed, qkv, mixed, added, gates, turns;
    Buffer<uint32_t> normed_pairs, gated_pairs;
    AttentionUnits units, last_units;
    Buffer<char> slots;                     // of units that are pieces
    Buffer<std::atomic<int32_t>> finished;  // pieces, by a head's first slot
    Buffer<int64_t> kept;
    Buffer<char> scratch;

    // The step under way.
    const shoal_step *step = nullptr;
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
    bool by_rows() const { return !c.total && step->num_tokens >= 2 * BLOCK_ROWS; }

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
    int64_t normed_stride() const { return shoal_linear_pair_stride(c.hidden); }
    int64_t gated_stride() const { return shoal_linear_pair_stride(c.inner); }
    Inputs normed_rows() const {
        return paired ? Inputs{nullptr, normed_pairs, normed_stride()} : Inputs{normed, nullptr, c.hidden};
    }
    Inputs gated_rows() const {
        return paired ? Inputs{nullptr, gated_pairs, gated_stride()} : Inputs{gates, nullptr, 2 * c.inner};
    }
    Inputs mixed_rows() const { return {mixed, nullptr, mixed_width()}; }
    void norm(int64_t t, const float *weight);
    void product(const Map &map, const Inputs &x, float *y, int64_t ldy, int64_t n, int part, Clock &clock);
    void gates_of_all(const Layer &layer, int64_t n, int part, Clock &clock);
    void add_up(int64_t n, int part, Clock &clock);
    void turn(size_t index, int64_t t, int64_t head, int64_t heads);
    void cut();
    void attend_all(size_t index, int part, Clock &clock);
    void trim(int part, Clock &clock);
    void after_attention(const Layer &layer, int64_t t, const float *row);
    void after_mlp(size_t index, int64_t t, const float *row);
    void activate(float *gate, const float *up, int64_t row, int64_t first, int64_t end) const;
    void gates_of_block(const Map &map, int64_t first, int64_t rows, int part, Clock &clock);
    void by_outputs(int part, Clock &clock);
    void outputs_after(size_t index, int64_t n, int part, Clock &clock);
    void rows_before(size_t index, int64_t first, int64_t end, int part, Clock &clock);
    void rows_after(size_t index, int64_t first, int64_t end, int part, Clock &clock);
    void by_blocks(int part, Clock &clock);
};

}  // namespace shoal

struct shoal_stage : shoal::Stage {
    using Stage::Stage;
};
