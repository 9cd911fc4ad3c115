// What this machine can do at most, as a step's bounds: memory read, and products multiplied and added, a second.
//
// Each thread reads its own share from front to back, or keeps enough chains of products under way to fill its units:
// the widest that products have here, and for bfloat16 and 8-bit integers the instructions that take several at once.
#include "bounds.h"

#include "vec8.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

using namespace shoal;

namespace {

constexpr int CHAINS = 12;

struct Read {
    const float *data;
    int64_t count;
    float *sums;
};

void read_part(void *arg, int part, int parts) {
    const Read &r = *(const Read *)arg;
    int64_t share = r.count / parts / (CHAINS * LANES) * (CHAINS * LANES);
    const float *p = r.data + part * share, *end = p + share;
    v8 sums[CHAINS] = {};
    for (; p < end; p += CHAINS * LANES)
        for (int i = 0; i < CHAINS; i++) sums[i] += load(p + i * LANES);
    v8 total = sums[0];
    for (int i = 1; i < CHAINS; i++) total += sums[i];
    store(r.sums + part * LANES, total);
}

// One instruction each: kProducts are multiplied and added to what `sum` holds.
#if defined(__AVX512F__)
struct F32 {
    static constexpr int kProducts = 16;
    using Vector = __m512;
    static Vector all(float x) { return _mm512_set1_ps(x); }
    static Vector add(Vector sum, Vector x, Vector y) { return _mm512_fmadd_ps(x, y, sum); }
    static float one(Vector sum) { return _mm512_cvtss_f32(sum); }
};
#else
struct F32 {
    static constexpr int kProducts = LANES;
    using Vector = v8;
    static Vector all(float x) { return set1(x); }
    static Vector add(Vector sum, Vector x, Vector y) { return fma(x, y, sum); }
    static float one(Vector sum) { return sum[0]; }
};
#endif

#if defined(__AVX512BF16__)
struct Bf16 : F32 {
    static constexpr int kProducts = 32;
    static Vector add(Vector sum, Vector x, Vector y) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y); }
};
#endif

#if defined(__AVX512VNNI__)
struct Int8 : F32 {
    static constexpr int kProducts = 64;
    static Vector add(Vector sum, Vector x, Vector y) {
        return (__m512)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)y);
    }
};
#endif

struct Multiply {
    int64_t rounds;
    float *sums;
};

template <class T>
void multiply_part(void *arg, int part, int) {
    const Multiply &m = *(const Multiply *)arg;
    typename T::Vector sums[CHAINS];
    typename T::Vector x = T::all(m.sums[part * LANES]), y = T::all(m.sums[part * LANES] * 0.5f);
    for (int i = 0; i < CHAINS; i++) sums[i] = T::all(float(i));  // equal chains would be computed once
    for (int64_t round = 0; round < m.rounds; round++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) sums[i] = T::add(sums[i], x, y);
        asm volatile("");  // or the loops change places, and each chain waits for itself
    }
    float total = 0.0f;
    for (int i = 0; i < CHAINS; i++) total += T::one(sums[i]);
    m.sums[part * LANES] = total;
}

template <class T>
int64_t multiply(shoal_pool *pool, Multiply m) {
    shoal_pool_run(pool, multiply_part<T>, &m);
    return m.rounds * CHAINS * T::kProducts * shoal_pool_threads(pool);
}

}  // namespace

int64_t shoal_bounds_read(shoal_pool *pool, const float *data, int64_t count, float *sums) {
    Read r = {data, count, sums};
    shoal_pool_run(pool, read_part, &r);
    int64_t parts = shoal_pool_threads(pool);
    return count / parts / (CHAINS * LANES) * (CHAINS * LANES) * parts;
}

int64_t shoal_bounds_multiply(shoal_pool *pool, int arithmetic, int64_t rounds, float *sums) {
    const Multiply m = {rounds, sums};
    switch (arithmetic) {
        case SHOAL_MULTIPLY_F32: return multiply<F32>(pool, m);
#if defined(__AVX512BF16__)
        case SHOAL_MULTIPLY_BF16: return multiply<Bf16>(pool, m);
#endif
#if defined(__AVX512VNNI__)
        case SHOAL_MULTIPLY_INT8: return multiply<Int8>(pool, m);
#endif
        default: return 0;
    }
}
