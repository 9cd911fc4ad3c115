// Sixteen floats at a time, in one register where there is AVX-512 (One16), else in two of eight (Two16): kernels are
// templates over the set, so that both are compiled and tested wherever the first one runs.
//
// Both do the same operations in the same order. Only products of bfloat16 pairs and powers of two round differently:
// where the processor has an instruction for them it is used.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "vec8.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define SHOAL_HAS_ONE16 1
#endif

namespace shoal {

constexpr int WIDTH = 16;

// How many of a type lie in the 32 bits of a lane.
template <typename T>
constexpr int PER_WORD = 4 / sizeof(T);

// Two vectors of eight.
struct Two16 {
    struct F {
        v8 a, b;
        friend inline __attribute__((always_inline)) F operator+(F x, F y) { return {x.a + y.a, x.b + y.b}; }
        friend inline __attribute__((always_inline)) F operator-(F x, F y) { return {x.a - y.a, x.b - y.b}; }
        friend inline __attribute__((always_inline)) F operator*(F x, F y) { return {x.a * y.a, x.b * y.b}; }
        friend inline __attribute__((always_inline)) F operator/(F x, F y) { return {x.a / y.a, x.b / y.b}; }
        friend inline __attribute__((always_inline)) F operator-(F x) { return {-x.a, -x.b}; }
    };
    static constexpr int SUMS = 6;  // of 16 lanes that registers hold beside what is multiplied

    SHOAL_INLINE F set1(float x) { return {shoal::set1(x), shoal::set1(x)}; }
    SHOAL_INLINE F load(const float *p) { return {shoal::load(p), shoal::load(p + 8)}; }
    SHOAL_INLINE void store(float *p, F x) {
        shoal::store(p, x.a);
        shoal::store(p + 8, x.b);
    }
    SHOAL_INLINE F load_half(const float *p) { return {shoal::load(p), shoal::set1(0.0f)}; }
    SHOAL_INLINE void store_half(float *p, F x) { shoal::store(p, x.a); }
    SHOAL_INLINE F load(const bf16 *p) { return {shoal::load(p), shoal::load(p + 8)}; }
    SHOAL_INLINE F load_half(const bf16 *p) { return {shoal::load(p), shoal::set1(0.0f)}; }
    SHOAL_INLINE void store(bf16 *p, F x) {
        shoal::store(p, x.a);
        shoal::store(p + 8, x.b);
    }
    SHOAL_INLINE void store_half(bf16 *p, F x) { shoal::store(p, x.a); }
    SHOAL_INLINE F round_bf16(F x) { return {shoal::round_bf16(x.a), shoal::round_bf16(x.b)}; }
    SHOAL_INLINE F fma(F x, F y, F z) { return {shoal::fma(x.a, y.a, z.a), shoal::fma(x.b, y.b, z.b)}; }
    SHOAL_INLINE F max(F x, F y) { return {shoal::max(x.a, y.a), shoal::max(x.b, y.b)}; }
    SHOAL_INLINE F min(F x, F y) { return {shoal::min(x.a, y.a), shoal::min(x.b, y.b)}; }
    SHOAL_INLINE F exp(F x) { return {shoal::exp(x.a), shoal::exp(x.b)}; }
    SHOAL_INLINE F tanh(F x) { return {shoal::tanh(x.a), shoal::tanh(x.b)}; }
    SHOAL_INLINE F exp2(F x) { return exp(x * set1(0.693147180559945309f)); }
    SHOAL_INLINE F inverse(F x) { return set1(1.0f) / x; }
    SHOAL_INLINE F number(F x) {
        return {choose(x.a == x.a, x.a, shoal::set1(0.0f)), choose(x.b == x.b, x.b, shoal::set1(0.0f))};
    }
    SHOAL_INLINE float sum(F x) { return shoal::sum(x.a + x.b); }
    SHOAL_INLINE float max(F x) { return shoal::max(shoal::max(x.a, x.b)); }

    // Lanes [from, to) of x, minus infinity in the others.
    SHOAL_INLINE F only(F x, int from, int to) {
        const i8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
        const v8 none = shoal::set1(-INFINITY);
        const i8 b = lanes + 8;
        return {choose((lanes >= from) & (lanes < to), x.a, none), choose((b >= from) & (b < to), x.b, none)};
    }

    // The first N lanes of x, zeros in the others; the same to memory.
    template <int N>
    SHOAL_INLINE F load_some(const float *p) {
        float lanes[WIDTH] = {};
        memcpy(lanes, p, N * sizeof(float));
        return load(lanes);
    }
    template <int N>
    SHOAL_INLINE void store_some(float *p, F x) {
        float lanes[WIDTH];
        store(lanes, x);
        memcpy(p, lanes, N * sizeof(float));
    }
    // Lane r: the largest of x[r], for r below R.
    template <int R>
    SHOAL_INLINE F largest_of(const F *x) {
        float lanes[WIDTH] = {};
        for (int r = 0; r < R; r++) lanes[r] = max(x[r]);
        return load(lanes);
    }
    // 0 for minus infinity.
    SHOAL_INLINE F or_zero(F x) {
        const v8 zero = shoal::set1(0.0f), none = shoal::set1(-INFINITY);
        return {choose(x.a == none, zero, x.a), choose(x.b == none, zero, x.b)};
    }
    // Rounded to bfloat16, in line: x, then y.
    SHOAL_INLINE F pack(F x, F y) {
        bf16 both[2 * WIDTH];
        store(both, x);
        store(both + WIDTH, y);
        F packed;
        memcpy(&packed, both, sizeof packed);
        return packed;
    }

    template <typename T>
    SHOAL_INLINE F multiply_add(F x, F y, F z) {
        if constexpr (PER_WORD<T> == 1) return fma(x, y, z);
        const F low = fma(first(x), first(y), z);
        return fma(second(x), second(y), low);
    }

    // Of bfloat16 at p, p + 2, p + 4, ... these numbers.
    SHOAL_INLINE void store_every_second(bf16 *p, F x) {
        for (int i = 0; i < 8; i++) store1(p + 2 * i, x.a[i]), store1(p + 16 + 2 * i, x.b[i]);
    }

private:
    SHOAL_INLINE F first(F x) { return {(v8)((u8)x.a << 16), (v8)((u8)x.b << 16)}; }
    SHOAL_INLINE F second(F x) { return {(v8)((u8)x.a & 0xffff0000u), (v8)((u8)x.b & 0xffff0000u)}; }
};

#ifdef SHOAL_HAS_ONE16
// One vector of sixteen.
struct One16 {
    typedef __m512 F;
    static constexpr int SUMS = 24;

    SHOAL_INLINE F set1(float x) { return _mm512_set1_ps(x); }
    SHOAL_INLINE F load(const float *p) { return _mm512_loadu_ps(p); }
    SHOAL_INLINE void store(float *p, F x) { _mm512_storeu_ps(p, x); }
    SHOAL_INLINE F load_half(const float *p) { return _mm512_zextps256_ps512(_mm256_loadu_ps(p)); }
    SHOAL_INLINE void store_half(float *p, F x) { _mm256_storeu_ps(p, _mm512_castps512_ps256(x)); }
    SHOAL_INLINE F load(const bf16 *p) { return wide(_mm256_loadu_si256((const __m256i *)p)); }
    SHOAL_INLINE F load_half(const bf16 *p) {
        return wide(_mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)p)));
    }
    SHOAL_INLINE void store(bf16 *p, F x) { _mm256_storeu_si256((__m256i *)p, narrow(x)); }
    SHOAL_INLINE void store_half(bf16 *p, F x) {
        _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(narrow(x)));
    }
    SHOAL_INLINE F round_bf16(F x) { return wide(narrow(x)); }
    SHOAL_INLINE F fma(F x, F y, F z) { return _mm512_fmadd_ps(x, y, z); }
    SHOAL_INLINE F max(F x, F y) { return _mm512_max_ps(x, y); }
    SHOAL_INLINE F min(F x, F y) { return _mm512_min_ps(x, y); }
    SHOAL_INLINE F exp(F x) {  // vec8.h's
        const F magic = set1(12582912.0f), lowest = set1(-87.33f);
        const __mmask16 vanishes = _mm512_cmp_ps_mask(x, lowest, _CMP_LT_OQ);
        const F y = max(min(x, set1(88.3f)), lowest);
        const F shifted = fma(y, set1(1.44269504088896341f), magic), n = shifted - magic;
        F r = fma(n, set1(-0.693359375f), y);
        r = fma(n, set1(2.12194440e-4f), r);
        F p = fma(set1(1.9875691500e-4f), r, set1(1.3981999507e-3f));
        p = fma(p, r, set1(8.3334519073e-3f));
        p = fma(p, r, set1(4.1665795894e-2f));
        p = fma(p, r, set1(1.6666665459e-1f));
        p = fma(p, r, set1(5.0000001201e-1f));
        p = fma(p * r, r, r) + set1(1.0f);
        return _mm512_maskz_scalef_ps(_knot_mask16(vanishes), p, n);
    }
    SHOAL_INLINE F tanh(F x) {
        return halves(shoal::tanh((v8)_mm512_castps512_ps256(x)), shoal::tanh((v8)_mm512_extractf32x8_ps(x, 1)));
    }
    // Within 1e-5 of itself; 1 at 0. For weights that are rounded to bfloat16.
    SHOAL_INLINE F exp2(F x) {
        constexpr int FRACTION = 1;  // x - floor(x)
        const F f = _mm512_reduce_ps(x, FRACTION);
        F p = fma(set1(EXP2_4), f, set1(EXP2_3));
        p = fma(p, f, set1(EXP2_2));
        p = fma(p, f, set1(EXP2_1));
        return _mm512_scalef_ps(fma(p, f, set1(1.0f)), x);
    }
    SHOAL_INLINE F inverse(F x) { return _mm512_rcp14_ps(x); }  // within 2^-14 of itself
    SHOAL_INLINE F number(F x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), x); }
    SHOAL_INLINE float sum(F x) {
        return shoal::sum((v8)_mm512_castps512_ps256(x) + (v8)_mm512_extractf32x8_ps(x, 1));
    }
    SHOAL_INLINE float max(F x) {
        return shoal::max(shoal::max((v8)_mm512_castps512_ps256(x), (v8)_mm512_extractf32x8_ps(x, 1)));
    }
    SHOAL_INLINE F only(F x, int from, int to) {
        const uint32_t lanes = from < to ? ((1u << to) - 1) & ~((1u << from) - 1) : 0;
        return _mm512_mask_mov_ps(set1(-INFINITY), (__mmask16)lanes, x);
    }

    template <int N>
    SHOAL_INLINE F load_some(const float *p) { return _mm512_maskz_loadu_ps((1u << N) - 1, p); }
    template <int N>
    SHOAL_INLINE void store_some(float *p, F x) { _mm512_mask_storeu_ps(p, (1u << N) - 1, x); }
    template <int R>
    SHOAL_INLINE F largest_of(const F *x) {
        static_assert(R <= 8);
        auto at = [&](int r) { return x[r < R ? r : 0]; };
        const F low = largest_of_four(at(0), at(1), at(2), at(3));
        if constexpr (R <= 4) {
            const F halves = max(low, _mm512_shuffle_f32x4(low, low, _MM_SHUFFLE(2, 3, 0, 1)));
            return max(halves, _mm512_shuffle_f32x4(halves, halves, _MM_SHUFFLE(1, 0, 3, 2)));
        }
        const F high = largest_of_four(at(4), at(5), at(6), at(7));
        const F halves = max(_mm512_shuffle_f32x4(low, high, _MM_SHUFFLE(2, 0, 2, 0)),
                             _mm512_shuffle_f32x4(low, high, _MM_SHUFFLE(3, 1, 3, 1)));
        const F whole = max(halves, _mm512_shuffle_f32x4(halves, halves, _MM_SHUFFLE(2, 3, 0, 1)));
        return _mm512_shuffle_f32x4(whole, whole, _MM_SHUFFLE(0, 0, 2, 0));
    }
    SHOAL_INLINE F or_zero(F x) {
        return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set1(-INFINITY), _CMP_NEQ_UQ), x);
    }
    SHOAL_INLINE F pack(F x, F y) {
#ifdef __AVX512BF16__
        return (F)_mm512_cvtne2ps_pbh(y, x);
#else
        return (F)_mm512_inserti64x4(_mm512_castsi256_si512(narrow(x)), narrow(y), 1);
#endif
    }

    template <typename T>
    SHOAL_INLINE F multiply_add(F x, F y, F z) {
        if constexpr (PER_WORD<T> == 1) return fma(x, y, z);
#ifdef __AVX512BF16__
        return _mm512_dpbf16_ps(z, (__m512bh)x, (__m512bh)y);
#else
        return fma(second(x), second(y), fma(first(x), first(y), z));
#endif
    }

    SHOAL_INLINE void store_every_second(bf16 *p, F x) {
        _mm512_mask_storeu_epi16(p, 0x55555555u, _mm512_cvtepu16_epi32(narrow(x)));
    }

private:
    // In each quarter: the largest of a quarter of a, of b, of c, of d.
    SHOAL_INLINE F largest_of_four(F a, F b, F c, F d) {
        const F ab = max(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        const F cd = max(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        return max((F)_mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), (F)_mm512_unpackhi_pd((__m512d)ab, (__m512d)cd));
    }
    // Over [0, 1), with 1 at 0.
    static constexpr float EXP2_1 = 0.69304484f, EXP2_2 = 0.24128021f, EXP2_3 = 0.05224247f, EXP2_4 = 0.01342669f;

    SHOAL_INLINE F halves(v8 a, v8 b) {
        return _mm512_insertf32x8(_mm512_castps256_ps512((__m256)a), (__m256)b, 1);
    }
    SHOAL_INLINE F wide(__m256i x) { return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); }
    SHOAL_INLINE __m256i narrow(F x) {
#ifdef __AVX512BF16__
        return (__m256i)_mm512_cvtneps_pbh(x);
#else
        const __m512i bits = (__m512i)x, odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded =
            _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
        const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
        return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, quiet));
#endif
    }
    SHOAL_INLINE F first(F x) { return (F)_mm512_slli_epi32((__m512i)x, 16); }
    SHOAL_INLINE F second(F x) { return (F)_mm512_and_si512((__m512i)x, _mm512_set1_epi32((int)0xffff0000)); }
};
#endif

// Calls f with the best set that is compiled in and that the process's runs use (linear.h: shoal_linear_use_isa).
template <typename F>
inline decltype(auto) with_best16(bool one, F f) {
#ifdef SHOAL_HAS_ONE16
    if (one) return f(One16());
#endif
    (void)one;
    return f(Two16());
}

}  // namespace shoal
