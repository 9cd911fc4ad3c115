// y = x W^T with W packed once: the matrices of a stage, in f32, bf16, f16 or GGUF's quantised blocks.
//
// Rules: y[i][j] has the same bits whatever m, the row's place in x, the split into parts and the choice of
// path: one f32 accumulator per output, fused multiply-adds in the order of k, bias last. (Between
// instruction sets, see shoal_linear_use_isa, the numbers are close, not equal.) Quantised weights stay
// packed in memory. No allocation and no lock but in create and destroy; a matrix is read-only after create
// and shared between threads freely.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The order of stage_weights.WeightFormat. Bytes of a row: GGUF's, little endian.
enum shoal_format {
    SHOAL_F32 = 0,
    SHOAL_BF16 = 1,
    SHOAL_F16 = 2,
    SHOAL_Q8_0 = 3,
    SHOAL_Q4_0 = 4,
    SHOAL_Q4_1 = 5,
    SHOAL_Q5_0 = 6,
    SHOAL_Q4_K = 7,
    SHOAL_Q6_K = 8,
};

typedef struct shoal_linear shoal_linear;

// Packs a copy of `rows` ([outputs][row_bytes]; a row may be longer than its data, never shorter). NULL:
// unknown format, a size that is not positive, inputs that are no multiple of the format's block, too short
// rows, or no memory.
shoal_linear *shoal_linear_create(int format, const uint8_t *rows, int64_t outputs, int64_t inputs,
                                  int64_t row_bytes);

void shoal_linear_destroy(shoal_linear *linear);

// Resident bytes of the packed weights.
int64_t shoal_linear_bytes(const shoal_linear *linear);

int64_t shoal_linear_outputs(const shoal_linear *linear);
int64_t shoal_linear_inputs(const shoal_linear *linear);

// Bytes of scratch that one thread needs for any run with at most m_max rows. It grows with m up to a
// bound that only depends on `inputs`.
size_t shoal_linear_scratch_bytes(const shoal_linear *linear, int64_t m_max);

// y[m][outputs] = x[m][inputs] W^T (+ bias[outputs] if not NULL), for the share `part` of `parts` of the
// outputs: whole panels of 16, or none. No rows (m = 0) are no work. Strides ldx and ldy count floats.
// `scratch` is this thread's own, of any alignment; x and y do not overlap.
void shoal_linear_run(const shoal_linear *linear, const float *x, int64_t ldx, int64_t m, float *y,
                      int64_t ldy, const float *bias, int part, int parts, void *scratch);

// The same with x rounded to bfloat16 (to nearest, ties to even; subnormal numbers count as zero), where the
// instruction set in use multiplies pairs of bfloat16 and the format is bf16 or quantised: codes are exact in
// bfloat16, and what they sum to under a scale is scaled in f32. Elsewhere as shoal_linear_run does. The same
// rule for bits.
void shoal_linear_run_bf16(const shoal_linear *linear, const float *x, int64_t ldx, int64_t m, float *y,
                           int64_t ldy, const float *bias, int part, int parts, void *scratch);

// What such a product takes can be rounded once for all of them: words of two inputs, the earlier one low; rows
// begin this many words apart.
int64_t shoal_linear_pair_stride(int64_t inputs);

// y as shoal_linear_run_bf16 gives it, for a matrix that rounded x when it was asked (shoal_linear_rounds_bf16),
// whatever is in use since. ldx counts words.
void shoal_linear_run_pairs(const shoal_linear *linear, const uint32_t *x, int64_t ldx, int64_t m, float *y,
                            int64_t ldy, const float *bias, int part, int parts, void *scratch);

// Whether it does round x, in the instruction set in use.
int shoal_linear_rounds_bf16(const shoal_linear *linear);

// The same with x rounded to 8 bits, symmetrically per row and 32 inputs, and integer dot products per block:
// faster and less exact. Formats without integer codes (f32, bf16, f16) run as shoal_linear_run_bf16 does. The
// same rule for bits.
void shoal_linear_run_int8(const shoal_linear *linear, const float *x, int64_t ldx, int64_t m, float *y,
                           int64_t ldy, const float *bias, int part, int parts, void *scratch);

// out[inputs]: row `row` of W as the runs see it (an embedding that is tied to the head).
void shoal_linear_dequantize_row(const shoal_linear *linear, int64_t row, float *out);

// Chooses the instruction set of the process's runs: "portable", "avx2", "avx512"; NULL or "":
// SHOAL_NATIVE_ISA, else the best that was compiled in and that this processor has. Returns 0, or -1 if it
// cannot be had (nothing changes then). Packed matrices stay valid. Not to be called during a run.
int shoal_linear_use_isa(const char *name);

// The name of the one in use.
const char *shoal_linear_isa(void);

#ifdef __cplusplus
}
#endif
