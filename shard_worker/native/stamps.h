// What each block of a pool holds, as its worker saw it written: what `shard_worker/stamps.py` does, in one call over a
// step's columns. Memory is the caller's. Calls come from one thread at a time; nothing is allocated.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    uint64_t begin, end;  // digests of the ids before the block, and with those in it
    uint64_t epoch;       // of writing
    int32_t index;        // which block of its sequence
    int32_t fill;         // tokens in it; 0: nothing is known; -n: n, a copy to be gone on from at any of them
} shoal_block_stamp;

enum { SHOAL_SLOT_UNKNOWN = 0, SHOAL_SLOT_GOOD = 1, SHOAL_SLOT_VOID = 2 };

typedef struct {
    uint64_t digest;   // of its ids so far
    int64_t position;  // that they are
    uint32_t last;     // the id it sampled last
    uint32_t state;
} shoal_slot_stamp;

typedef struct {
    shoal_block_stamp *blocks;
    shoal_slot_stamp *slots;
    int64_t block_size;
    uint64_t epoch;
    uint64_t rate;  // the share of rows that are proven, times 2^32
    uint64_t turn;  // rows so far, times the rate, modulo 2^32
} shoal_stamps;

// The step was computed: stamps the blocks that it wrote, then proves its rows. Columns are those of the message, which
// tables have checked; `digests`: one for each fresh row, or NULL; `tables`: [rows][stride], as the step was laid out;
// `sampled`: an id for each row that samples, or NULL. `void_rows`: in the first `num_void` those that are void from the
// start, ascending; it has room for all. Returns how many are void after all.
int64_t shoal_stamps_note(shoal_stamps *stamps, int64_t rows, const void *slots, const void *num_tokens, const void *starts,
                          const void *flags, const void *token_ids, const void *digests, const int32_t *tables,
                          int64_t stride, const uint32_t *sampled, int32_t *void_rows, int64_t num_void);

#ifdef __cplusplus
}
#endif
