// Norms, rotations, activations and residuals. Every sum has one order, which depends on the width of the row alone.
#include "ops.h"

#include <cmath>

#include "stage.h"
#include "vec8.h"

namespace shoal {

SHOAL_INLINE v8 silu(v8 x) { return x / (set1(1.0f) + exp(-x)); }

void rms_norm(const float *x, const float *weight, float eps, int64_t count, float *y) {
    v8 squares[4] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};
    int64_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES)
        for (int c = 0; c < 4; c++) {
            v8 v = load(x + i + c * LANES);
            squares[c] = fma(v, v, squares[c]);
        }
    for (; i < count; i += LANES) {
        v8 v = load(x + i);
        squares[0] = fma(v, v, squares[0]);
    }
    const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)count;
    const v8 scale = set1(1.0f / std::sqrt(mean + eps));
    for (i = 0; i < count; i += LANES) store(y + i, load(x + i) * scale * load(weight + i));
}

void add_residual(float *hidden, const float *added, int64_t count, bool narrow) {
    for (int64_t i = 0; i < count; i += LANES) {
        v8 x = load(hidden + i) + load(added + i);
        store(hidden + i, narrow ? round_bf16(x) : x);
    }
}

void silu_times(float *gate, const float *up, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store(gate + i, silu(load(gate + i)) * load(up + i));
}

void gelu_times(float *gate, const float *up, int64_t count) {
    const v8 root = set1(0.7978845608028654f), cubic = set1(0.044715f), half = set1(0.5f), one = set1(1.0f);
    for (int64_t i = 0; i < count; i += LANES) {
        v8 x = load(gate + i);
        v8 inner = root * fma(cubic * x * x, x, x);
        store(gate + i, half * x * (one + tanh(inner)) * load(up + i));
    }
}

void rotate(float *head, const float *cosines, const float *sines, int64_t half) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        v8 a = load(head + i), b = load(head + half + i), c = load(cosines + i), s = load(sines + i);
        store(head + i, fma(-b, s, a * c));
        store(head + half + i, fma(a, s, b * c));
    }
    for (; i < half; i++) {
        float a = head[i], b = head[half + i];
        head[i] = a * cosines[i] - b * sines[i];
        head[half + i] = b * cosines[i] + a * sines[i];
    }
}

void angles(int32_t position, const float *frequencies, float scale, int64_t half, float *cosines, float *sines) {
    for (int64_t i = 0; i < half; i++) {
        const float angle = (float)position * frequencies[i];
        cosines[i] = std::cos(angle) * scale;
        sines[i] = std::sin(angle) * scale;
    }
}

void scale_row(float *x, float scale, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store(x + i, load(x + i) * set1(scale));
}

void cap_row(float *x, float cap, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(x + i, tanh(load(x + i) / set1(cap)) * set1(cap));
    for (; i < count; i++) x[i] = (tanh(set1(x[i] / cap)) * set1(cap))[0];
}

void widen(const void *narrow, int64_t count, float *wide) {
    for (int64_t i = 0; i < count; i += LANES) store(wide + i, load((const bf16 *)narrow + i));
}

void narrow(const float *wide, int64_t count, void *narrow) {
    for (int64_t i = 0; i < count; i += LANES) store((bf16 *)narrow + i, load(wide + i));
}

}  // namespace shoal

void shoal_vector_functions(const float *x, int64_t count, float *exps, float *tanhs, float *silus) {
    using namespace shoal;
    for (int64_t i = 0; i < count; i += LANES) {
        store(exps + i, exp(load(x + i)));
        store(tanhs + i, tanh(load(x + i)));
        store(silus + i, silu(load(x + i)));
    }
}
