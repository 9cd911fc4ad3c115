// One stage of a model: all its layers over a step of tokens in one call.
//
// A stage is described once by pointers that its maker keeps alive; it copies the descriptions, never the arrays. Calls
// come from one thread at a time and use the pool's threads; nothing is allocated but in create and attach. Rows of
// tokens lie one after another, row by row. Sizes count elements unless they say bytes.
//
// Rule: a token's numbers depend on its sequence alone. Not on the rows beside it, the cut into chunks or stages, the
// number of threads: every sum has one order, and work is shared out whole outputs or whole tokens at a time.
#pragma once

#include "linear.h"
#include "pool.h"

#ifdef __cplusplus
extern "C" {
#endif

// Matrices with the same input; their outputs follow each other.
typedef struct {
    const shoal_linear *const *matrices;
    int64_t count;
    const float *bias;  // [all outputs]; NULL: none
} shoal_map;

// Norms are [hidden], those of q and k [head_dim]; NULL: there is none (the first two must be).
typedef struct {
    const float *attention_norm, *mlp_norm;
    const float *q_norm, *k_norm, *post_attention_norm, *post_mlp_norm;
    shoal_map qkv, out, gate_up, down;
    int64_t rope;    // index into the stage's ropes
    int64_t window;  // a token sees itself and the window - 1 before it; 0: all
} shoal_layer;

typedef struct {
    const float *frequencies;  // [rotary_dim / 2]
    int64_t rotary_dim;
    float scale;
} shoal_rope;

enum shoal_activation { SHOAL_SILU = 0, SHOAL_GELU_TANH = 1 };

typedef struct {
    int64_t hidden, heads, kv_heads, head_dim, inner, vocab;
    const shoal_layer *layers;
    int64_t num_layers;
    const shoal_rope *ropes;
    int64_t num_ropes;
    const shoal_linear *embedding;  // NULL: activations come in
    const float *head_norm;         // NULL: activations go out
    shoal_map head;
    float rms_eps, embedding_scale, score_scale, score_softcap, logit_softcap;
    int32_t activation;
    int32_t narrow;  // KV and what passes between layers and stages are bfloat16, else float32; products may round to it
    int32_t int8;    // products with activations rounded to 8 bits where the weights are integers
    // Where this is one rank's share of a stage: rows [count][hidden] become the sum over all ranks. NULL: it is whole.
    // Twice a layer, from the calling thread.
    void (*total)(void *arg, float *rows, int64_t count);
    void *total_arg;
} shoal_stage_config;

typedef struct {
    // Of each layer: [blocks][kv_heads]{keys [head_dim][block_pad], values [block_size][head_dim]}. In bfloat16 by pairs:
    // {keys [head_dim / 2][block_pad][2], values [block_size / 2 rounded up][head_dim][2]}, all zeros at first.
    void *const *pages;
    int64_t block_size;
    int64_t step_tokens_max;
} shoal_stage_memory;

typedef struct {
    int64_t num_tokens, num_rows;
    const uint32_t *token_ids;    // [T]; read on the first stage
    const int32_t *positions;     // [T]
    const int32_t *row_offsets;   // [rows + 1]
    const int64_t *kv_slots;      // [T]
    const int32_t *block_tables;  // [rows][table_stride]
    int64_t table_stride;
    const void *activations_in;  // [T][hidden] stored type; NULL on the first stage
    void *activations_out;       // the same; NULL on the last
    const int64_t *wanted;       // on the last stage: tokens whose logits may be asked for, rising; NULL: all
    int64_t num_wanted;
} shoal_step;

// What a step's wall time went to, as the calling thread sees it.
enum shoal_phase {
    SHOAL_TIME_EDGES = 0,      // embedding, activations in and out
    SHOAL_TIME_NORMS = 1,      // norms, rotations, activations functions, residuals, writing KV
    SHOAL_TIME_ATTENTION = 2,
    SHOAL_TIME_PRODUCTS = 3,   // of the layers
    SHOAL_TIME_HEAD = 4,       // final norm and logits
    SHOAL_TIME_WAIT = 5,       // for the other threads
    SHOAL_TIME_PHASES = 6,
};

typedef struct shoal_stage shoal_stage;

// head_dim, hidden and inner must be multiples of 8. NULL: they are not, or no memory.
shoal_stage *shoal_stage_create(const shoal_stage_config *config, shoal_pool *pool);

void shoal_stage_destroy(shoal_stage *stage);

// Positions that a block's keys take in memory: its size, rounded up to whole vectors.
int64_t shoal_stage_block_pad(int64_t block_size);

// Takes the memory that steps of at most step_tokens_max tokens need. 0, or -1 without memory: then nothing is attached.
int shoal_stage_attach(shoal_stage *stage, const shoal_stage_memory *memory);

void shoal_stage_run(shoal_stage *stage, const shoal_step *step);

// logits[count][vocab] of the last run's tokens at those places, on the last stage. 0, or -1: one was not wanted or is
// none of it, or they are more than a step's most.
int shoal_stage_logits(shoal_stage *stage, const int64_t *places, int64_t count, float *logits);

// ns[SHOAL_TIME_PHASES] since the stage was made.
void shoal_stage_times(const shoal_stage *stage, int64_t *ns);

// What one layer's attention does in a run, alone: k and v of qkv are written to their slots, then each token attends.
// qkv [T][heads + 2 kv_heads][head_dim], q and k rotated; out [T][heads][head_dim]. Returns how
// many units of work it was, or -1: head_dim is no multiple of 8. For tests and measurements.
int shoal_attention(shoal_pool *pool, const shoal_step *step, void *pages, const shoal_stage_config *config,
                    int64_t block_size, int64_t window, const float *qkv, float *out);

// e^x[i], tanh(x[i]), x[i] * sigmoid(x[i]), then 2^x[i] and x[i] * sigmoid(x[i]) for what is rounded to bfloat16; count is
// a multiple of 8. For tests of their error.
void shoal_vector_functions(const float *x, int64_t count, float *exps, float *tanhs, float *silus, float *powers,
                            float *rough_silus);

#ifdef __cplusplus
}
#endif
