// The layer loop.
//
// Two ways to share out a step, with the same numbers: few tokens share out the outputs of each product, so that a
// weight is read by one thread once; many tokens share out blocks of rows, which a thread takes from the attention's
// sums through the rest of the layer and the next one's queries, keys and values without meeting anyone.
#include <algorithm>
#include <vector>

#include "stage_state.h"

namespace shoal {

// Of the last layer's rows only those go on whose logits are wanted.
void Stage::trim(int part, Clock &clock) {
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

void Stage::product(const Map &map, const Inputs &x, float *y, int64_t ldy, int64_t n, int part, Clock &clock) {
    const std::vector<Piece> &pieces = map.pieces;
    share(pieces.size(), [&](int64_t i) { map.run(pieces[i], multiply, x, n, y, ldy, scratch_of(part)); });
    clock.spent(SHOAL_TIME_PRODUCTS);
    wait(clock);
}

// Gate and up, and the one's activation times the other: at once, where they are matrices of their own.
void Stage::gates_of_all(const Layer &layer, int64_t n, int part, Clock &clock) {
    const int64_t ld = 2 * c.inner;
    const Map &map = layer.gate_up;
    if (!map.pairs(c.inner)) {
        product(map, normed_rows(), gates, ld, n, part, clock);
        own_rows(n, part, [&](int64_t t) { activate(gates + t * ld, gates + t * ld + c.inner, t, 0, c.inner); });
    } else {
        const std::vector<Piece> &pieces = map.pieces;
        const int64_t pairs = (int64_t)pieces.size() / 2;
        share(pairs, [&](int64_t i) {
            const Piece &gate = pieces[i];
            for (const Piece *piece : {&gate, &pieces[pairs + i]})
                map.run(*piece, multiply, normed_rows(), n, gates, ld, scratch_of(part));
            clock.spent(SHOAL_TIME_PRODUCTS);
            for (int64_t t = 0; t < n; t++) {
                float *row = gates + t * ld + gate.first;
                activate(row, row + c.inner, t, gate.first, gate.end);
            }
            clock.spent(SHOAL_TIME_NORMS);
        });
    }
    clock.spent(SHOAL_TIME_NORMS);
    wait(clock);
}

// Of ranks: all rows have to be there, so that many tokens go by outputs too.
void Stage::add_up(int64_t n, int part, Clock &clock) {
    if (!c.total) return;
    if (part == 0) c.total(c.total_arg, added, n);
    wait(clock);
}

void Stage::outputs_after(size_t index, int64_t n, int part, Clock &clock) {
    const Layer &layer = layers[index];
    product(layer.out, mixed_rows(), added, c.hidden, n, part, clock);
    add_up(n, part, clock);
    each_row(n, part, clock, [&](int64_t t) { after_attention(layer, t, added + t * c.hidden); });
    gates_of_all(layer, n, part, clock);
    product(layer.down, gated_rows(), added, c.hidden, n, part, clock);
    add_up(n, part, clock);
    each_row(n, part, clock, [&](int64_t t) { after_mlp(index, t, added + t * c.hidden); });
}

void Stage::by_outputs(int part, Clock &clock) {
    for (size_t i = 0; i < layers.size(); i++) {
        product(layers[i].qkv, normed_rows(), qkv, qkv_width(), step->num_tokens, part, clock);
        if (turns_apart(i)) each_row(step->num_tokens, part, clock, [&](int64_t t) { turn(i, t, 0, c.kv_heads); });
        if (is_last(i) && !num_kept) return;
        attend_all(i, part, clock);
        if (is_last(i)) trim(part, clock);
        outputs_after(i, is_last(i) ? num_kept : step->num_tokens, part, clock);
    }
}

// ---- many tokens: blocks of rows -----------------------------------------------------------------------------------

void Stage::rows_before(size_t index, int64_t first, int64_t end, int part, Clock &clock) {
    const Layer &layer = layers[index];
    layer.qkv.run_all(multiply, normed_rows().from(first), end - first, qkv + first * qkv_width(), qkv_width(),
                      scratch_of(part));
    clock.spent(SHOAL_TIME_PRODUCTS);
    if (!turns_apart(index)) return;
    for (int64_t t = first; t < end; t++) turn(index, t, 0, c.kv_heads);
    clock.spent(SHOAL_TIME_NORMS);
}

// Rounded once for all slices, x is multiplied a slice of gate and up at a time.
void Stage::gates_of_block(const Map &map, int64_t first, int64_t rows, int part, Clock &clock) {
    const Inputs x = normed_rows().from(first);
    const int64_t own = part * BLOCK_ROWS;  // the thread's first row in `gates` and gated_rows
    float *sums = gates + own * 2 * c.inner;
    void *room = scratch_of(part);
    const bool sliced = paired && map.pairs(c.inner);
    const int64_t width = sliced ? std::min(SLICE, c.inner) : c.inner, ld = 2 * width;
    const int64_t slices = (c.inner + width - 1) / width;
    for (int64_t i = 0; i < slices; i++) {
        int64_t begin = 0, end = c.inner;
        if (sliced) {
            const Piece gate = Map::piece(map.matrices[0], 0, i, slices);
            const Piece up = Map::piece(map.matrices[1], c.inner, i, slices);
            begin = gate.first, end = gate.end;
            float *front = sums - begin;  // where the matrix's first output would be
            map.run(gate, multiply, x, rows, front, ld, room);
            map.run(up, multiply, x, rows, front + width - c.inner, ld, room);
        } else {
            map.run_all(multiply, x, rows, sums, ld, room);
        }
        clock.spent(SHOAL_TIME_PRODUCTS);
        for (int64_t t = 0; t < rows; t++) activate(sums + t * ld, sums + t * ld + width, own + t, begin, end);
        clock.spent(SHOAL_TIME_NORMS);
    }
}

void Stage::rows_after(size_t index, int64_t first, int64_t end, int part, Clock &clock) {
    const Layer &layer = layers[index];
    const int64_t rows = end - first;
    float *sums = added + part * BLOCK_ROWS * c.hidden;
    void *own = scratch_of(part);
    layer.out.run_all(multiply, mixed_rows().from(first), rows, sums, c.hidden, own);
    clock.spent(SHOAL_TIME_PRODUCTS);
    for (int64_t t = 0; t < rows; t++) after_attention(layer, first + t, sums + t * c.hidden);
    clock.spent(SHOAL_TIME_NORMS);
    gates_of_block(layer.gate_up, first, rows, part, clock);
    layer.down.run_all(multiply, gated_rows().from(part * BLOCK_ROWS), rows, sums, c.hidden, own);
    clock.spent(SHOAL_TIME_PRODUCTS);
    for (int64_t t = 0; t < rows; t++) after_mlp(index, first + t, sums + t * c.hidden);
    clock.spent(SHOAL_TIME_NORMS);
}

void Stage::by_blocks(int part, Clock &clock) {
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

void Stage::begin(const shoal_step &next) {
    step = &next;
    trimmed = c.head_norm && step->wanted && step->num_wanted < step->num_tokens;
    num_kept = trimmed ? step->num_wanted : step->num_tokens;
    if (trimmed) std::copy(step->wanted, step->wanted + num_kept, (int64_t *)kept);
    cut();
}

void Stage::run(int part) {
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

}  // namespace shoal
