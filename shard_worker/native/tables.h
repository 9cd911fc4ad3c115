// Every sequence's block table and sampling parameters, as columns over slots, and the layout of a step: what
// `shard_worker/inputs.py` does, in one call over the columns as they came. Same checks in the same order; a step that is
// refused changes nothing. Calls come from one thread at a time; nothing is allocated but in create.
#pragma once

#include "stage.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int64_t slots_max, block_size, num_blocks, blocks_per_sequence_max, step_tokens_max, vocab_size;
    int64_t whole;  // the stage is the whole pipeline: ids may be left open that its slots sampled last
} shoal_table_limits;

// Sampling parameters of a fresh row.
typedef struct {
    float temperature, top_p;
    uint64_t seed;
    int32_t top_k;
    int32_t unused;
} shoal_slot_start;

// For a token id: left open, the one that the row's slot sampled last.
#define SHOAL_LAST_SAMPLED UINT32_MAX

// Where a step is laid out: n rows, T tokens, k rows that sample, a ids left open (0 so far). Its maker keeps arrays for the largest step, points
// `step` to the first ones too, and a stage can run it as it is but for the activations.
typedef struct {
    shoal_step step;        // its counts and stride are set here
    uint32_t *token_ids;    // [T]
    int32_t *positions;     // [T]
    int64_t *kv_slots;      // [T]
    int32_t *row_offsets;   // [n + 1]
    int32_t *block_tables;  // [n][widest], zeros behind a table's end
    int32_t *context_lens;  // [n]
    int32_t *sample_rows;   // [k]
    float *temperature;     // [k]
    int32_t *top_k;         // [k]
    float *top_p;           // [k]
    uint64_t *seeds;        // [k]
    int32_t *output_index;  // [k]
    int64_t *sample_slots;  // [k]
    int64_t *ahead_places;  // [a]: among the T
    int64_t *ahead_slots;   // [a]
    int64_t num_samples;    // k
    int64_t num_ahead;      // a
} shoal_layout;

enum shoal_refusal {
    SHOAL_STEP_TAKEN = 0,
    SHOAL_COLUMNS_DIFFER = 1,  // their lengths and sums: the parser says which
    SHOAL_FREED_OUT_OF_RANGE = 2,
    SHOAL_SLOT_OUT_OF_RANGE = 3,
    SHOAL_TOO_MANY_TOKENS = 4,
    SHOAL_TOKEN_OUT_OF_RANGE = 5,
    SHOAL_BLOCK_OUT_OF_RANGE = 6,
    SHOAL_UNKNOWN_SLOT = 7,
    SHOAL_TABLE_TOO_LONG = 8,
    SHOAL_POSITION_WITHOUT_BLOCK = 9,
    SHOAL_SKIPPED_POSITIONS = 10,
    SHOAL_OPEN_ON_A_PART = 11,      // of the pipeline
    SHOAL_OPEN_NOT_ALONE = 12,      // in a row that is not one sampling token
    SHOAL_OPEN_BEHIND_NOTHING = 13, // that was sampled
};

typedef struct shoal_tables shoal_tables;

shoal_tables *shoal_tables_create(const shoal_table_limits *limits);  // NULL: no memory

void shoal_tables_destroy(shoal_tables *tables);

// Checks a step, and unless `layout` is NULL takes it in and lays it out; returns a shoal_refusal. `starts`: one for each
// of the fresh rows. The columns are those of the message, little-endian, lengths in bytes; `first` is its `starts`.
int shoal_tables_apply(shoal_tables *tables, shoal_layout *layout, const shoal_slot_start *starts, int64_t num_starts,
                       const void *slots, int64_t slots_bytes, const void *num_tokens, int64_t num_tokens_bytes,
                       const void *first, int64_t first_bytes, const void *flags, int64_t flags_bytes,
                       const void *output_index, int64_t output_index_bytes, const void *token_ids,
                       int64_t token_ids_bytes, const void *table_lens, int64_t table_lens_bytes, const void *table,
                       int64_t table_bytes, const void *freed_slots, int64_t freed_slots_bytes);

#ifdef __cplusplus
}
#endif
