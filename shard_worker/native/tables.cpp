// See tables.h. The order of the checks is that of `parse_step` and `SlotTables._check`, so that both refuse a step with
// the same words.
#include "tables.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <type_traits>

static_assert(sizeof(shoal_slot_start) == 24, "as packed by the caller");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "columns are read as they come");

namespace {

constexpr uint8_t SAMPLES = 1, FRESH = 2;
constexpr int64_t POSITIONS_MAX = int64_t(1) << 31;

// A column of bytes of any alignment.
struct Column {
    const uint8_t *data;
    int64_t bytes;

    int64_t size() const { return bytes / 4; }
    uint32_t operator[](int64_t i) const {
        uint32_t value;
        std::memcpy(&value, data + 4 * i, 4);
        return value;
    }
};

struct Step {
    Column slots, num_tokens, starts, flags, output_index, token_ids, table_lens, table, freed;
    int64_t fresh;

    int64_t rows() const { return slots.size(); }
    bool is_fresh(int64_t row) const { return flags.data[row] & FRESH; }
};

bool adds_up(const Step &step) {
    const int64_t n = step.rows();
    for (const Column *column : {&step.slots, &step.token_ids, &step.table, &step.freed})
        if (column->bytes % 4) return false;
    for (const Column *column : {&step.num_tokens, &step.starts, &step.output_index, &step.table_lens})
        if (column->bytes != 4 * n) return false;
    if (step.flags.bytes != n) return false;
    int64_t tokens = 0, blocks = 0, fresh = 0;
    for (int64_t row = 0; row < n; row++) {
        const int64_t count = step.num_tokens[row];
        if (!count || step.flags.data[row] > (SAMPLES | FRESH) || step.starts[row] + count >= POSITIONS_MAX)
            return false;
        tokens += count;
        blocks += step.table_lens[row];
        fresh += step.is_fresh(row);
    }
    return tokens == step.token_ids.size() && blocks == step.table.size() && fresh == step.fresh;
}

// Ids, the largest but for those left open.
bool ids_below(const Column &column, int64_t limit) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < column.size(); i++) {
        const uint32_t id = column[i] == SHOAL_LAST_SAMPLED ? 0 : column[i];
        largest = id > largest ? id : largest;
    }
    return !column.size() || largest < limit;
}

bool all_below(const Column &column, int64_t limit) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < column.size(); i++) largest = column[i] > largest ? column[i] : largest;
    return !column.size() || largest < limit;
}

}  // namespace

struct shoal_tables {
    shoal_table_limits limits;
    uint64_t steps;     // looked at so far: what marks a slot as named in this one
    int32_t *blocks;    // [slots][blocks_per_sequence_max]
    int64_t *lens;      // [slots]
    int64_t *computed;  // [slots]: tokens whose K and V a step has written
    uint64_t *named, *freed;  // [slots]: the last step that did
    uint8_t *known;     // [slots]
    uint8_t *sampled;   // [slots]: the last row of it did
    float *temperature, *top_p;
    int32_t *top_k;
    uint64_t *seeds;

    int32_t *table(int64_t slot) const { return blocks + slot * limits.blocks_per_sequence_max; }
    int check(const Step &step);
    void take(const Step &step, const shoal_slot_start *starts);
    void lay_out(const Step &step, shoal_layout &layout);
};

int shoal_tables::check(const Step &step) {
    const uint64_t now = ++steps;
    const int64_t n = step.rows();
    if (!adds_up(step)) return SHOAL_COLUMNS_DIFFER;
    if (!all_below(step.freed, limits.slots_max)) return SHOAL_FREED_OUT_OF_RANGE;
    if (!n) return SHOAL_STEP_TAKEN;
    for (int64_t row = 0; row < n; row++) {
        const int64_t slot = step.slots[row];
        if (slot >= limits.slots_max || named[slot] == now) return SHOAL_SLOT_OUT_OF_RANGE;
        named[slot] = now;
    }
    if (step.token_ids.size() > limits.step_tokens_max) return SHOAL_TOO_MANY_TOKENS;
    bool any_open = false, open_alone = true;
    for (int64_t row = 0, token = 0; row < n; row++) {
        const int64_t count = step.num_tokens[row];
        const bool may = count == 1 && (step.flags.data[row] & (SAMPLES | FRESH)) == SAMPLES;
        for (int64_t i = 0; i < count; i++, token++) {
            const bool open = step.token_ids[token] == SHOAL_LAST_SAMPLED;
            any_open |= open;
            open_alone &= !open || may;
        }
    }
    if (any_open && !limits.whole) return SHOAL_OPEN_ON_A_PART;
    if (!open_alone) return SHOAL_OPEN_NOT_ALONE;
    if (!ids_below(step.token_ids, limits.vocab_size)) return SHOAL_TOKEN_OUT_OF_RANGE;
    if (!all_below(step.table, limits.num_blocks)) return SHOAL_BLOCK_OUT_OF_RANGE;
    for (int64_t i = 0; i < step.freed.size(); i++) freed[step.freed[i]] = now;
    bool all_known = true, short_enough = true, in_blocks = true, in_order = true, behind_sampled = true;
    for (int64_t row = 0, token = 0; row < n; token += step.num_tokens[row], row++) {
        const int64_t slot = step.slots[row], start = step.starts[row];
        const bool fresh = step.is_fresh(row);
        const int64_t len = (fresh ? 0 : lens[slot]) + step.table_lens[row];
        all_known &= fresh || (known[slot] && freed[slot] != now);
        short_enough &= len <= limits.blocks_per_sequence_max;
        in_blocks &= start + step.num_tokens[row] <= len * limits.block_size;
        in_order &= fresh || start <= computed[slot];
        if (any_open && step.token_ids[token] == SHOAL_LAST_SAMPLED)
            behind_sampled &= sampled[slot] && start == computed[slot];
    }
    if (!all_known) return SHOAL_UNKNOWN_SLOT;
    if (!short_enough) return SHOAL_TABLE_TOO_LONG;
    if (!in_blocks) return SHOAL_POSITION_WITHOUT_BLOCK;
    if (!in_order) return SHOAL_SKIPPED_POSITIONS;
    if (!behind_sampled) return SHOAL_OPEN_BEHIND_NOTHING;
    return SHOAL_STEP_TAKEN;
}

void shoal_tables::take(const Step &step, const shoal_slot_start *starts) {
    for (int64_t i = 0; i < step.freed.size(); i++) known[step.freed[i]] = 0;
    int64_t next = 0;
    for (int64_t row = 0; row < step.rows(); row++) {
        const int64_t slot = step.slots[row], added = step.table_lens[row];
        if (step.is_fresh(row)) {
            known[slot] = 1;
            lens[slot] = 0;
            temperature[slot] = starts->temperature;
            top_p[slot] = starts->top_p;
            top_k[slot] = starts->top_k;
            seeds[slot] = starts->seed;
            starts++;
        }
        if (added) std::memcpy(table(slot) + lens[slot], step.table.data + 4 * next, 4 * added);
        next += added;
        lens[slot] += added;
        computed[slot] = int64_t(step.starts[row]) + step.num_tokens[row];
        sampled[slot] = (step.flags.data[row] & SAMPLES) != 0;
    }
}

void shoal_tables::lay_out(const Step &step, shoal_layout &layout) {
    const int64_t n = step.rows(), block_size = limits.block_size;
    int64_t widest = 0, token = 0, samples = 0, ahead = 0;
    for (int64_t row = 0; row < n; row++) {
        const int64_t len = lens[step.slots[row]];
        widest = len > widest ? len : widest;
    }
    layout.row_offsets[0] = 0;
    for (int64_t row = 0; row < n; row++) {
        const int64_t slot = step.slots[row], count = step.num_tokens[row], len = lens[slot];
        const int32_t *blocks = table(slot);
        int32_t *copy = layout.block_tables + row * widest;
        std::memcpy(copy, blocks, 4 * len);
        std::memset(copy + len, 0, 4 * (widest - len));
        int64_t position = step.starts[row], block = position / block_size, within = position % block_size;
        for (int64_t i = 0; i < count; i++, position++, token++) {
            layout.positions[token] = int32_t(position);
            layout.kv_slots[token] = blocks[block] * block_size + within;
            if (++within == block_size) {
                within = 0;
                block++;
            }
        }
        layout.row_offsets[row + 1] = int32_t(token);
        layout.context_lens[row] = int32_t(position);
        if (step.flags.data[row] & SAMPLES) {
            layout.sample_rows[samples] = int32_t(row);
            layout.temperature[samples] = temperature[slot];
            layout.top_k[samples] = top_k[slot];
            layout.top_p[samples] = top_p[slot];
            layout.seeds[samples] = seeds[slot];
            layout.output_index[samples] = int32_t(step.output_index[row]);
            layout.sample_slots[samples] = slot;
            samples++;
        }
        if (step.token_ids[token - 1] == SHOAL_LAST_SAMPLED) {
            layout.ahead_places[ahead] = token - 1;
            layout.ahead_slots[ahead] = slot;
            ahead++;
        }
    }
    if (token) std::memcpy(layout.token_ids, step.token_ids.data, 4 * token);
    for (int64_t i = 0; i < ahead; i++) layout.token_ids[layout.ahead_places[i]] = 0;
    layout.step.num_tokens = token;
    layout.step.num_rows = n;
    layout.step.table_stride = widest;
    layout.num_samples = samples;
    layout.num_ahead = ahead;
}

extern "C" {

shoal_tables *shoal_tables_create(const shoal_table_limits *limits) {
    auto *made = static_cast<shoal_tables *>(std::calloc(1, sizeof(shoal_tables)));
    if (!made) return nullptr;
    const size_t n = size_t(limits->slots_max);
    made->limits = *limits;
    const auto get = [n](auto *&column, size_t width = 1) {
        column = static_cast<std::remove_reference_t<decltype(column)>>(std::calloc(n * width, sizeof(*column)));
        return column != nullptr;
    };
    const bool all = get(made->blocks, size_t(limits->blocks_per_sequence_max)) && get(made->lens) &&
                     get(made->computed) && get(made->named) && get(made->freed) && get(made->known) && get(made->sampled) &&
                     get(made->temperature) && get(made->top_p) && get(made->top_k) && get(made->seeds);
    if (all) return made;
    shoal_tables_destroy(made);
    return nullptr;
}

void shoal_tables_destroy(shoal_tables *tables) {
    if (!tables) return;
    for (void *column : {static_cast<void *>(tables->blocks), static_cast<void *>(tables->lens),
                         static_cast<void *>(tables->computed), static_cast<void *>(tables->named),
                         static_cast<void *>(tables->freed), static_cast<void *>(tables->known),
                         static_cast<void *>(tables->temperature), static_cast<void *>(tables->top_p),
                         static_cast<void *>(tables->top_k), static_cast<void *>(tables->seeds),
                         static_cast<void *>(tables->sampled)})
        std::free(column);
    std::free(tables);
}

int shoal_tables_apply(shoal_tables *tables, shoal_layout *layout, const shoal_slot_start *starts, int64_t num_starts,
                       const void *slots, int64_t slots_bytes, const void *num_tokens, int64_t num_tokens_bytes,
                       const void *first, int64_t first_bytes, const void *flags, int64_t flags_bytes,
                       const void *output_index, int64_t output_index_bytes, const void *token_ids,
                       int64_t token_ids_bytes, const void *table_lens, int64_t table_lens_bytes, const void *table,
                       int64_t table_bytes, const void *freed_slots, int64_t freed_slots_bytes) {
    const auto column = [](const void *data, int64_t bytes) {
        return Column{static_cast<const uint8_t *>(data), bytes};
    };
    const Step step{column(slots, slots_bytes),
                    column(num_tokens, num_tokens_bytes),
                    column(first, first_bytes),
                    column(flags, flags_bytes),
                    column(output_index, output_index_bytes),
                    column(token_ids, token_ids_bytes),
                    column(table_lens, table_lens_bytes),
                    column(table, table_bytes),
                    column(freed_slots, freed_slots_bytes),
                    num_starts};
    const int refusal = tables->check(step);
    if (refusal || !layout) return refusal;
    tables->take(step, starts);
    tables->lay_out(step, *layout);
    return SHOAL_STEP_TAKEN;
}

}  // extern "C"
