// From numbers to the rows of bytes that `linear.h` packs: what numpy makes in `formats.py`, bit for bit.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// `from`: SHOAL_F32, SHOAL_BF16 or SHOAL_F16; `to`: SHOAL_Q8_0, SHOAL_Q4_0 or SHOAL_Q4_1. `values`: [groups][32], of any
// alignment; `blocks`: [groups][bytes of a block]. At most `threads` share the work, the caller among them. 0; 1 if a
// number is not finite or above 60,000 (blocks are then rubbish); -1 where it makes no such formats.
int shoal_quantise(int from, const void *values, int64_t groups, int to, uint8_t *blocks, int threads);

#ifdef __cplusplus
}
#endif
