// Norms, rotations, activations and residuals. Every sum has one order, which depends on the width of the row alone.
#include "ops.h"

#include <cmath>
#include <cstring>

#include "linear.h"
#include "stage.h"
#include "vec16.h"

namespace shoal {

namespace {

// f(offset, read, write) for each vector of a row, the last of which may be half of one.
template <class V, typename F>
SHOAL_INLINE void each_vector(int64_t count, F f) {
    auto load = [](auto *p) __attribute__((always_inline)) { return V::load(p); };
    auto store = [](auto *p, typename V::F x) __attribute__((always_inline)) { V::store(p, x); };
    auto load_half = [](auto *p) __attribute__((always_inline)) { return V::load_half(p); };
    auto store_half = [](auto *p, typename V::F x) __attribute__((always_inline)) { V::store_half(p, x); };
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) f(i, load, store);
    if (i < count) f(i, load_half, store_half);
}

template <class V>
struct OpsOn {
    typedef typename V::F F;

    SHOAL_INLINE F silu(F x) { return x / (V::set1(1.0f) + V::exp(-x)); }

    SHOAL_INLINE F rough_silu(F x) {
        return x * V::inverse(V::set1(1.0f) + V::exp2(x * V::set1(-1.44269504088896341f)));
    }

    template <typename T>
    SHOAL_INLINE void norm(const float *x, const float *weight, float eps, int64_t count, T *y) {
        F squares[4] = {V::set1(0.0f), V::set1(0.0f), V::set1(0.0f), V::set1(0.0f)};
        int64_t i = 0;
        for (; i + 4 * WIDTH <= count; i += 4 * WIDTH)
            for (int c = 0; c < 4; c++) {
                const F v = V::load(x + i + c * WIDTH);
                squares[c] = V::fma(v, v, squares[c]);
            }
        each_vector<V>(count - i, [&](int64_t at, auto load, auto) {
            const F v = load(x + i + at);
            squares[0] = V::fma(v, v, squares[0]);
        });
        const float mean = V::sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)count;
        const F scale = V::set1(1.0f / std::sqrt(mean + eps));
        each_vector<V>(count, [&](int64_t at, auto load, auto store) {
            store(y + at, load(x + at) * scale * load(weight + at));
        });
    }

    static void rms_norm(const float *x, const float *weight, float eps, int64_t count, float *y) {
        norm(x, weight, eps, count, y);
    }

    static void narrow_rms_norm(const float *x, const float *weight, float eps, int64_t count, void *y) {
        norm(x, weight, eps, count, (bf16 *)y);
    }

    static void add_residual(float *hidden, const float *added, int64_t count, bool narrow) {
        each_vector<V>(count, [&](int64_t i, auto load, auto store) {
            const F x = load(hidden + i) + load(added + i);
            store(hidden + i, narrow ? V::round_bf16(x) : x);
        });
    }

    template <typename T, typename A>
    SHOAL_INLINE void times(const float *gate, const float *up, int64_t count, T *y, A activation) {
        each_vector<V>(count, [&](int64_t i, auto load, auto store) {
            store(y + i, activation(load(gate + i)) * load(up + i));
        });
    }

    SHOAL_INLINE F gelu(F x) {
        const F root = V::set1(0.7978845608028654f), cubic = V::set1(0.044715f);
        const F inner = root * V::fma(cubic * x * x, x, x);
        return V::set1(0.5f) * x * (V::set1(1.0f) + V::tanh(inner));
    }

    static void silu_times(float *gate, const float *up, int64_t count) { times(gate, up, count, gate, silu); }

    static void gelu_times(float *gate, const float *up, int64_t count) { times(gate, up, count, gate, gelu); }

    static void silu_times_rough(float *gate, const float *up, int64_t count) {
        times(gate, up, count, gate, rough_silu);
    }

    static void narrow_gelu_times(const float *gate, const float *up, int64_t count, void *y) {
        times(gate, up, count, (bf16 *)y, gelu);
    }

    static void narrow_silu_times_rough(const float *gate, const float *up, int64_t count, void *y) {
        times(gate, up, count, (bf16 *)y, rough_silu);
    }

    static void rotate(float *head, const float *cosines, const float *sines, int64_t half) {
        float *other = head + half;
        each_vector<V>(half / 8 * 8, [&](int64_t i, auto load, auto store) {
            const F a = load(head + i), b = load(other + i), c = load(cosines + i), s = load(sines + i);
            store(head + i, V::fma(-b, s, a * c));
            store(other + i, V::fma(a, s, b * c));
        });
        for (int64_t i = half / 8 * 8; i < half; i++) {
            const float a = head[i], b = other[i];
            head[i] = a * cosines[i] - b * sines[i];
            other[i] = b * cosines[i] + a * sines[i];
        }
    }

    static void scale_row(float *x, float scale, int64_t count) {
        each_vector<V>(count, [&](int64_t i, auto load, auto store) { store(x + i, load(x + i) * V::set1(scale)); });
    }

    static void cap_row(float *x, float cap, int64_t count) {
        auto capped = [&](F v) { return V::tanh(v / V::set1(cap)) * V::set1(cap); };
        each_vector<V>(count / 8 * 8, [&](int64_t i, auto load, auto store) { store(x + i, capped(load(x + i))); });
        float rest[WIDTH] = {};
        const int64_t whole = count / 8 * 8;
        std::memcpy(rest, x + whole, (count - whole) * sizeof(float));
        V::store(rest, capped(V::load(rest)));
        std::memcpy(x + whole, rest, (count - whole) * sizeof(float));
    }

    static void widen(const void *narrow, int64_t count, float *wide) {
        each_vector<V>(count, [&](int64_t i, auto load, auto store) { store(wide + i, load((const bf16 *)narrow + i)); });
    }

    static void narrow(const float *wide, int64_t count, void *narrow) {
        each_vector<V>(count, [&](int64_t i, auto load, auto store) { store((bf16 *)narrow + i, load(wide + i)); });
    }

    static void functions(const float *x, int64_t count, float *exps, float *tanhs, float *silus, float *powers,
                          float *rough_silus) {
        each_vector<V>(count, [&](int64_t i, auto load, auto store) {
            store(exps + i, V::exp(load(x + i)));
            store(tanhs + i, V::tanh(load(x + i)));
            store(silus + i, silu(load(x + i)));
            store(powers + i, V::exp2(load(x + i)));
            store(rough_silus + i, rough_silu(load(x + i)));
        });
    }

    static constexpr Ops ops = {rms_norm,
                                add_residual,
                                silu_times,
                                gelu_times,
                                silu_times_rough,
                                narrow_rms_norm,
                                narrow_gelu_times,
                                narrow_silu_times_rough,
                                rotate,
                                scale_row,
                                cap_row,
                                widen,
                                narrow,
                                functions};
};

}  // namespace

const Ops &ops_of(bool one16) {
    return with_best16(one16, [](auto set) -> const Ops & { return OpsOn<decltype(set)>::ops; });
}

void angles(int32_t position, const float *frequencies, float scale, int64_t half, float *cosines, float *sines) {
    for (int64_t i = 0; i < half; i++) {
        const float angle = (float)position * frequencies[i];
        cosines[i] = std::cos(angle) * scale;
        sines[i] = std::sin(angle) * scale;
    }
}

bool uses_one16() { return !std::strcmp(shoal_linear_isa(), "avx512"); }

}  // namespace shoal

void shoal_vector_functions(const float *x, int64_t count, float *exps, float *tanhs, float *silus, float *powers,
                            float *rough_silus) {
    shoal::ops_of(shoal::uses_one16()).functions(x, count, exps, tanhs, silus, powers, rough_silus);
}
