// Eight floats at a time, written once for every processor: vector types of the compiler, fused products where
// the hardware has them. The compiler may not fuse by itself (-ffp-contract=off), so that a sum has the same bits
// wherever it is inlined.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

namespace shoal {

constexpr int LANES = 8;

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));

struct bf16 {
    uint16_t bits;
};

#define SHOAL_INLINE static inline __attribute__((always_inline))

SHOAL_INLINE v8 load(const float *p) {
    v8 x;
    memcpy(&x, p, sizeof x);
    return x;
}

SHOAL_INLINE v8 load(const bf16 *p) {
#if defined(__AVX2__)  // the compiler takes two halves and joins them
    const __m128i narrow = _mm_loadu_si128((const __m128i *)p);
    return (v8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16);
#else
    h8 narrow;
    memcpy(&narrow, p, sizeof narrow);
    return (v8)(__builtin_convertvector(narrow, u8) << 16);
#endif
}

SHOAL_INLINE void store(float *p, v8 x) { memcpy(p, &x, sizeof x); }

SHOAL_INLINE v8 set1(float x) { return v8{x, x, x, x, x, x, x, x}; }

// Rounds to the nearest bfloat16, ties to even; what is not a number stays one.
SHOAL_INLINE u8 bf16_bits(v8 x) {
    u8 u = (u8)x;
    u8 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    u8 nan = (u >> 16) | 0x40u;
    u8 is_nan = (u8)((u & 0x7fffffffu) > 0x7f800000u);
    return (is_nan & nan) | (~is_nan & rounded);
}

SHOAL_INLINE void store(bf16 *p, v8 x) {
    h8 narrow = __builtin_convertvector(bf16_bits(x), h8);
    memcpy(p, &narrow, sizeof narrow);
}

SHOAL_INLINE v8 round_bf16(v8 x) { return (v8)(bf16_bits(x) << 16); }

SHOAL_INLINE float to_float(float x) { return x; }

SHOAL_INLINE void store1(float *p, float x) { *p = x; }

SHOAL_INLINE void store1(bf16 *p, float x) { p->bits = (uint16_t)bf16_bits(set1(x))[0]; }

SHOAL_INLINE v8 fma(v8 a, v8 b, v8 c) {
#if defined(__AVX2__) && defined(__FMA__)
    return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
    v8 y;
    for (int i = 0; i < LANES; i++) y[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return y;
#else
    return a * b + c;
#endif
}

SHOAL_INLINE v8 choose(i8 where, v8 a, v8 b) { return (v8)((where & (i8)a) | (~where & (i8)b)); }

// b where either is not a number, as x86 has it.
SHOAL_INLINE v8 max(v8 a, v8 b) { return choose(a > b, a, b); }
SHOAL_INLINE v8 min(v8 a, v8 b) { return choose(a < b, a, b); }

SHOAL_INLINE float sum(v8 x) {
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

SHOAL_INLINE float max(v8 x) {
    const float a = x[0] > x[4] ? x[0] : x[4], b = x[1] > x[5] ? x[1] : x[5];
    const float c = x[2] > x[6] ? x[2] : x[6], d = x[3] > x[7] ? x[3] : x[7];
    const float e = a > c ? a : c, f = b > d ? b : d;
    return e > f ? e : f;
}

// e^x within 2 units in the last place; exactly 0 below -87.3, exactly 1 at 0; largest finite power above 88.3.
// After Cody and Waite: x = n ln 2 + r, a polynomial in r (that of Cephes' expf), n into the exponent.
SHOAL_INLINE v8 exp(v8 x) {
    const v8 lowest = set1(-87.33f), magic = set1(12582912.0f);  // 1.5 * 2^23: rounds to whole numbers
    i8 vanishes = x < lowest;
    v8 y = max(min(x, set1(88.3f)), lowest);
    v8 shifted = fma(y, set1(1.44269504088896341f), magic);
    v8 n = shifted - magic;
    v8 r = fma(n, set1(-0.693359375f), y);
    r = fma(n, set1(2.12194440e-4f), r);
    v8 p = fma(set1(1.9875691500e-4f), r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p * r, r, r) + set1(1.0f);
    i8 exponent = ((i8)shifted - (i8)magic) << 23;
    return choose(vanishes, set1(0.0f), (v8)((i8)p + exponent));
}

// Within 4 units in the last place: a rational function over [-7.9, 7.9] (Eigen's), beyond it 1 to all bits.
SHOAL_INLINE v8 tanh(v8 x) {
    v8 y = max(min(x, set1(7.90531110763549805f)), set1(-7.90531110763549805f));
    v8 z = y * y;
    v8 p = fma(set1(-2.76076847742355e-16f), z, set1(2.00018790482477e-13f));
    p = fma(p, z, set1(-8.60467152213735e-11f));
    p = fma(p, z, set1(5.12229709037114e-08f));
    p = fma(p, z, set1(1.48572235717979e-05f));
    p = fma(p, z, set1(6.37261928875436e-04f));
    p = fma(p, z, set1(4.89352455891786e-03f));
    v8 q = fma(set1(1.19825839466702e-06f), z, set1(1.18534705686654e-04f));
    q = fma(q, z, set1(2.26843463243900e-03f));
    q = fma(q, z, set1(4.89352518554385e-03f));
    return y * p / q;
}

}  // namespace shoal
