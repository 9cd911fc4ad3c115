// Sums over the ranks of a stage that are processes of one host, through memory that they share.
//
// A turn: each rank puts its numbers into its slot and says so, waits until all have, and reads all slots. Turns alternate
// between two sets of slots: who writes one again knows from the turn between that all have read it. Waiting spins, lets
// others run, then sleeps. Every sum has rank order. Calls come from one thread of a rank, in the same order on all.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct shoal_ranks shoal_ranks;

// Of the shared memory.
int64_t shoal_ranks_bytes(int64_t ranks);

// `memory` is all zeros when the first opens it, and stays mapped until the handle is destroyed. NULL: no memory.
shoal_ranks *shoal_ranks_open(void *memory, int64_t ranks, int64_t rank, int64_t timeout_ms);
void shoal_ranks_destroy(shoal_ranks *ranks);

// From any thread: whoever waits in this process gives up, and so does every later call.
void shoal_ranks_abort(shoal_ranks *ranks);

// rows[count] become the sum over all ranks. 0, or -1: aborted, or a rank did not come in time.
int shoal_ranks_sum(shoal_ranks *ranks, float *rows, int64_t count);

// Rank 0 gets counts[r] numbers of every rank into parts[r]; all others pass NULL for parts. 0 or -1, as above.
int shoal_ranks_gather(shoal_ranks *ranks, const float *own, const int64_t *counts, float *const *parts);

#ifdef __cplusplus
}
#endif
