// What this machine can do at most, measured by its own threads.
#pragma once

#include <stdint.h>

#include "pool.h"

#ifdef __cplusplus
extern "C" {
#endif

enum shoal_multiply { SHOAL_MULTIPLY_F32 = 0, SHOAL_MULTIPLY_BF16 = 1, SHOAL_MULTIPLY_INT8 = 2 };

// Reads `count` floats once; sums[threads][8] takes what keeps the compiler from leaving it out. Returns how many.
int64_t shoal_bounds_read(shoal_pool *pool, const float *data, int64_t count, float *sums);

// Returns how many products were multiplied and added, all threads together; 0: no instruction here takes them.
int64_t shoal_bounds_multiply(shoal_pool *pool, int arithmetic, int64_t rounds, float *sums);

#ifdef __cplusplus
}
#endif
