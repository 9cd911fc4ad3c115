// What stands between the products of a layer, one row of `count` floats (a multiple of 8) at a time.
#pragma once

#include <cstdint>

namespace shoal {

struct Ops {
    // y = x / sqrt(mean(x^2) + eps) * weight; y may be x.
    void (*rms_norm)(const float *x, const float *weight, float eps, int64_t count, float *y);

    // hidden += added; then hidden is rounded to bfloat16 if `narrow`.
    void (*add_residual)(float *hidden, const float *added, int64_t count, bool narrow);

    // gate = silu(gate) * up, and gate = gelu(gate) * up in the tanh approximation.
    void (*silu_times)(float *gate, const float *up, int64_t count);
    void (*gelu_times)(float *gate, const float *up, int64_t count);
    // silu within 1e-4 of itself, for what is rounded to bfloat16.
    void (*silu_times_rough)(float *gate, const float *up, int64_t count);

    // The same rounded to bfloat16, elsewhere.
    void (*narrow_rms_norm)(const float *x, const float *weight, float eps, int64_t count, void *y);
    void (*narrow_gelu_times)(const float *gate, const float *up, int64_t count, void *y);
    void (*narrow_silu_times_rough)(const float *gate, const float *up, int64_t count, void *y);

    // Turns pairs (i, i + half) of a head by the angles whose cosines and sines these are.
    void (*rotate)(float *head, const float *cosines, const float *sines, int64_t half);

    void (*scale_row)(float *x, float scale, int64_t count);

    // x = cap * tanh(x / cap); any count.
    void (*cap_row)(float *x, float cap, int64_t count);

    void (*widen)(const void *narrow, int64_t count, float *wide);
    void (*narrow)(const float *wide, int64_t count, void *narrow);

    void (*functions)(const float *x, int64_t count, float *exps, float *tanhs, float *silus, float *powers, float *rough_silus);
};

// For the vectors to use: vec16.h.
const Ops &ops_of(bool one16);

// cosines[half], sines[half] of position * frequency, times scale.
void angles(int32_t position, const float *frequencies, float scale, int64_t half, float *cosines, float *sines);

// Whether the process's runs use AVX-512 (shoal_linear_use_isa) and these sources were compiled with it.
bool uses_one16();

}  // namespace shoal
