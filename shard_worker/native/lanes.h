// Vectors of outputs: what the kernels need of an instruction set, and nothing more, so that one kernel
// serves all.
//
// A lane is an output of the panel. `F` holds floats, `I` 32-bit words, each with four 8-bit codes of
// consecutive inputs where codes are meant. Every operation is exact or rounds once; `dot` functions are
// exact integers on every set.
#pragma once

#include <cstdint>
#include <cstring>

// SHOAL_PORTABLE_ONLY spares who needs no more the reading of the processor's headers.
#if !defined(SHOAL_PORTABLE_ONLY) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define SHOAL_HAS_AVX2 1
#include <immintrin.h>
#endif
#if !defined(SHOAL_PORTABLE_ONLY) && defined(__AVX512F__) && defined(__AVX512BW__) && \
    defined(__AVX512VNNI__) && defined(SHOAL_HAS_AVX2)
#define SHOAL_HAS_AVX512 1
#endif

#define SHOAL_INLINE inline __attribute__((always_inline))

namespace shoal {

// Compiler vectors of eight: lowered to whatever the processor has, scalars at worst.
struct PortableLanes {
    static constexpr int kWidth = 8;
    static constexpr int kRegisters = 16;
    static constexpr int kTileRows =
        4;  // fewer kernels to compile: this set is for when there is no better one
    static constexpr int kFewRows = 0, kFewRowsPacked = 0;
    static constexpr bool kFloatsInRegisters = false;
    static constexpr bool kSumsFours = false;
    typedef float F __attribute__((vector_size(32)));
    typedef int32_t I __attribute__((vector_size(32)));
    typedef uint32_t U __attribute__((vector_size(32)));
    using Pairs = I;  // sums stay at 32 bits

    static SHOAL_INLINE F zero() { return F{}; }
    static SHOAL_INLINE F load(const float *p) {
        F v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
    static SHOAL_INLINE void store(float *p, F v) { std::memcpy(p, &v, sizeof v); }
    static SHOAL_INLINE F broadcast(float x) { return F{} + x; }
    static SHOAL_INLINE F fma(F a, F b, F c) {
        return a * b + c;
    }  // two roundings, unless the compiler fuses
    static SHOAL_INLINE F mul(F a, F b) { return a * b; }
    static SHOAL_INLINE F add(F a, F b) { return a + b; }
    static SHOAL_INLINE F held(F a) { return a; }
    static SHOAL_INLINE F halves(const uint8_t *p) {
        typedef uint16_t Shorts __attribute__((vector_size(16)));
        Shorts packed;
        std::memcpy(&packed, p, sizeof packed);
        const U half = __builtin_convertvector(packed, U), magnitude = half & 0x7fff;
        // the exponent's bias by an exact product, which makes numbers of subnormals too
        const F value = (F)(magnitude << 13) * 0x1p112f;
        const U not_finite = (U)(magnitude >= 0x7c00) & 0x7f800000u;
        return (F)((U)value | not_finite | (half & 0x8000) << 16);
    }
    static SHOAL_INLINE F unsigned_bytes(const uint8_t *p) {
        typedef uint8_t Bytes __attribute__((vector_size(8)));
        Bytes bytes;
        std::memcpy(&bytes, p, sizeof bytes);
        return __builtin_convertvector(bytes, F);
    }
    static SHOAL_INLINE F signed_bytes(const uint8_t *p) {
        typedef int8_t Bytes __attribute__((vector_size(8)));
        Bytes bytes;
        std::memcpy(&bytes, p, sizeof bytes);
        return __builtin_convertvector(bytes, F);
    }

    static SHOAL_INLINE I words(const uint8_t *p) {
        I v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
    static SHOAL_INLINE I mask(I a, uint32_t bits) { return a & static_cast<int32_t>(bits); }
    static SHOAL_INLINE I either(I a, I b) { return a | b; }
    template <int N>
    static SHOAL_INLINE I left(I a) {
        return a << N;
    }
    template <int N>
    static SHOAL_INLINE I right(I a) {
        return (I)((U)a >> N);
    }
    static SHOAL_INLINE I right_by(I a, int n) { return (I)((U)a >> n); }
    static SHOAL_INLINE F to_float(I a) { return __builtin_convertvector(a, F); }
    static SHOAL_INLINE F as_float(I a) { return (F)a; }

    using Four = const int8_t *;
    static SHOAL_INLINE Four four(const int8_t *x) { return x; }
    static SHOAL_INLINE I load_words(const int32_t *p) {
        I v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
    static SHOAL_INLINE void store_words(int32_t *p, I v) { std::memcpy(p, &v, sizeof v); }
    static SHOAL_INLINE Pairs products(I codes, Four x) {
        return (codes & 255) * x[0] + ((codes >> 8) & 255) * x[1] + ((codes >> 16) & 255) * x[2] +
               right<24>(codes) * x[3];
    }
    static SHOAL_INLINE Pairs add_pairs(Pairs a, Pairs b) { return a + b; }
    static SHOAL_INLINE I widen(Pairs pairs) { return pairs; }
    static SHOAL_INLINE I add_words(I a, I b) { return a + b; }
    static SHOAL_INLINE I biased_products(I codes, Four x) {
        return products(codes, x) - 128 * (x[0] + x[1] + x[2] + x[3]);
    }

    // Of 32 floats, as bits: magnitudes order as their bits do, and a NaN is larger than all.
    static uint32_t largest_magnitude(const float *x) {
        uint32_t largest = 0;
        for (int j = 0; j < 32; ++j) {
            uint32_t bits;
            std::memcpy(&bits, x + j, sizeof bits);
            bits &= 0x7fffffffu;
            largest = bits > largest ? bits : largest;
        }
        return largest;
    }
    // 32 floats times `inverse`, to the nearest integers; they fit. And the sum of each 16.
    static void round_block(const float *x, float inverse, int8_t *codes, int32_t *sums) {
        for (int j = 0; j < 32; ++j) {
            const auto code = static_cast<int32_t>(__builtin_rintf(x[j] * inverse));
            codes[j] = static_cast<int8_t>(code);
            sums[j / 16] += code;
        }
    }
};

#ifdef SHOAL_HAS_AVX2
struct Avx2Lanes {
    static constexpr int kWidth = 8;
    static constexpr int kRegisters = 16;
    static constexpr int kTileRows = 6;  // 6 x 16 sums, two weights and a broadcast fill sixteen registers
    static constexpr int kFewRows = 2, kFewRowsPacked = 2;
    static constexpr bool kFloatsInRegisters = true;
    static constexpr bool kSumsFours = false;
    using F = __m256;
    using I = __m256i;
    using Pairs = __m256i;  // sixteen 16-bit sums

    static SHOAL_INLINE F zero() { return _mm256_setzero_ps(); }
    static SHOAL_INLINE F load(const float *p) { return _mm256_loadu_ps(p); }
    static SHOAL_INLINE void store(float *p, F v) { _mm256_storeu_ps(p, v); }
    static SHOAL_INLINE F broadcast(float x) { return _mm256_set1_ps(x); }
    static SHOAL_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static SHOAL_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static SHOAL_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
    // In a register, now: compilers fold a load into each of its uses, and loads are what a tile is short of.
    static SHOAL_INLINE F held(F a) {
        asm("" : "+x"(a));
        return a;
    }
    static SHOAL_INLINE F halves(const uint8_t *p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    }
    static SHOAL_INLINE F unsigned_bytes(const uint8_t *p) {
        return to_float(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
    }
    static SHOAL_INLINE F signed_bytes(const uint8_t *p) {
        return to_float(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
    }

    static SHOAL_INLINE I words(const uint8_t *p) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    }
    static SHOAL_INLINE I mask(I a, uint32_t bits) {
        return _mm256_and_si256(a, _mm256_set1_epi32(static_cast<int>(bits)));
    }
    static SHOAL_INLINE I either(I a, I b) { return _mm256_or_si256(a, b); }
    template <int N>
    static SHOAL_INLINE I left(I a) {
        return _mm256_slli_epi32(a, N);
    }
    template <int N>
    static SHOAL_INLINE I right(I a) {
        return _mm256_srli_epi32(a, N);
    }
    static SHOAL_INLINE I right_by(I a, int n) { return _mm256_srl_epi32(a, _mm_cvtsi32_si128(n)); }
    static SHOAL_INLINE F to_float(I a) { return _mm256_cvtepi32_ps(a); }
    static SHOAL_INLINE F as_float(I a) { return _mm256_castsi256_ps(a); }

    static SHOAL_INLINE I four(const int8_t *x) {
        int word;
        std::memcpy(&word, x, sizeof word);
        return _mm256_set1_epi32(word);
    }
    static SHOAL_INLINE I load_words(const int32_t *p) { return words(reinterpret_cast<const uint8_t *>(p)); }
    static SHOAL_INLINE void store_words(int32_t *p, I v) {
        _mm256_storeu_si256(reinterpret_cast<I *>(p), v);
    }
    static SHOAL_INLINE Pairs products(I codes, I x) { return _mm256_maddubs_epi16(codes, x); }
    static SHOAL_INLINE Pairs add_pairs(Pairs a, Pairs b) { return _mm256_add_epi16(a, b); }
    static SHOAL_INLINE I widen(Pairs pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
    static SHOAL_INLINE I add_words(I a, I b) { return _mm256_add_epi32(a, b); }
    // |x| times (w with x's sign): two products of 255 * 127 would not fit 16 bits, two of 128 * 127 do
    static SHOAL_INLINE I biased_products(I codes, I x) {
        const I w = _mm256_xor_si256(codes, _mm256_set1_epi8(static_cast<char>(0x80)));
        return widen(_mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(w, x)));
    }

    static SHOAL_INLINE uint32_t largest_magnitude(const float *x) {
        const I bits = _mm256_set1_epi32(0x7fffffff);
        I largest = _mm256_setzero_si256();
        for (int j = 0; j < 32; j += 8) {
            const I magnitude = _mm256_and_si256(words(reinterpret_cast<const uint8_t *>(x + j)), bits);
            largest = _mm256_max_epi32(largest, magnitude);
        }
        __m128i four = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
        four = _mm_max_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
        four = _mm_max_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(2, 3, 0, 1)));
        return static_cast<uint32_t>(_mm_cvtsi128_si32(four));
    }
    static SHOAL_INLINE void round_block(const float *x, float inverse, int8_t *codes, int32_t *sums) {
        const F factor = _mm256_set1_ps(inverse);
        const auto rounded = [&](int j) { return _mm256_cvtps_epi32(_mm256_mul_ps(load(x + j), factor)); };
        // packing works within halves of a register: the words it leaves interleaved are put in order at the
        // end
        const I low = _mm256_packs_epi32(rounded(0), rounded(8)),
                high = _mm256_packs_epi32(rounded(16), rounded(24));
        const I order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        const I block = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
        _mm256_storeu_si256(reinterpret_cast<I *>(codes), block);
        const I fours = widen(_mm256_maddubs_epi16(_mm256_set1_epi8(1), block));
        sums[0] = sum_of_four(_mm256_castsi256_si128(fours));
        sums[1] = sum_of_four(_mm256_extracti128_si256(fours, 1));
    }
    static SHOAL_INLINE int32_t sum_of_four(__m128i four) {
        four = _mm_add_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
        four = _mm_add_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(2, 3, 0, 1)));
        return _mm_cvtsi128_si32(four);
    }
};
#endif

#ifdef SHOAL_HAS_AVX512
struct Avx512Lanes {
    static constexpr int kWidth = 16;
    static constexpr int kRegisters = 32;
    static constexpr int kTileRows = 6;
    static constexpr int kFewRows = 2, kFewRowsPacked = 8;
    static constexpr bool kFloatsInRegisters = true;
    static constexpr bool kSumsFours = true;  // products of four codes are added to a lane at once
    using F = __m512;
    using I = __m512i;

    static SHOAL_INLINE F zero() { return _mm512_setzero_ps(); }
    static SHOAL_INLINE F load(const float *p) { return _mm512_loadu_ps(p); }
    static SHOAL_INLINE void store(float *p, F v) { _mm512_storeu_ps(p, v); }
    static SHOAL_INLINE F broadcast(float x) { return _mm512_set1_ps(x); }
    static SHOAL_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static SHOAL_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static SHOAL_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
    static SHOAL_INLINE F held(F a) {
        asm("" : "+v"(a));
        return a;
    }
    static SHOAL_INLINE F halves(const uint8_t *p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    }
    static SHOAL_INLINE F unsigned_bytes(const uint8_t *p) {
        return to_float(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
    }
    static SHOAL_INLINE F signed_bytes(const uint8_t *p) {
        return to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
    }

    static SHOAL_INLINE I words(const uint8_t *p) { return _mm512_loadu_si512(p); }
    static SHOAL_INLINE I mask(I a, uint32_t bits) {
        return _mm512_and_si512(a, _mm512_set1_epi32(static_cast<int>(bits)));
    }
    static SHOAL_INLINE I either(I a, I b) { return _mm512_or_si512(a, b); }
    template <int N>
    static SHOAL_INLINE I left(I a) {
        return _mm512_slli_epi32(a, N);
    }
    template <int N>
    static SHOAL_INLINE I right(I a) {
        return _mm512_srli_epi32(a, N);
    }
    static SHOAL_INLINE I right_by(I a, int n) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(n)); }
    static SHOAL_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
    static SHOAL_INLINE F as_float(I a) { return _mm512_castsi512_ps(a); }

    static SHOAL_INLINE I four(const int8_t *x) {
        int word;
        std::memcpy(&word, x, sizeof word);
        return _mm512_set1_epi32(word);
    }
    static SHOAL_INLINE I no_words() { return _mm512_setzero_si512(); }
    static SHOAL_INLINE I broadcast_word(int32_t x) { return _mm512_set1_epi32(x); }
    static SHOAL_INLINE I add_words(I a, I b) { return _mm512_add_epi32(a, b); }
    static SHOAL_INLINE I dot(I sum, I codes, I x) { return _mm512_dpbusd_epi32(sum, codes, x); }

    static SHOAL_INLINE uint32_t largest_magnitude(const float *x) {
        const I bits = _mm512_set1_epi32(0x7fffffff);
        const auto magnitudes = [&](int j) { return _mm512_and_si512(_mm512_loadu_si512(x + j), bits); };
        return static_cast<uint32_t>(
            _mm512_reduce_max_epi32(_mm512_max_epi32(magnitudes(0), magnitudes(16))));
    }
    static SHOAL_INLINE void round_block(const float *x, float inverse, int8_t *codes, int32_t *sums) {
        const F factor = _mm512_set1_ps(inverse);
        for (int run = 0; run < 2; ++run) {
            const I rounded = _mm512_cvtps_epi32(_mm512_mul_ps(load(x + 16 * run), factor));
            const __m128i bytes = _mm512_cvtepi32_epi8(rounded);
            _mm_storeu_si128(reinterpret_cast<__m128i *>(codes + 16 * run), bytes);
            // unsigned sums of eights, of codes that are 128 too large
            const __m128i eights =
                _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(static_cast<char>(0x80))), _mm_setzero_si128());
            sums[run] = _mm_cvtsi128_si32(eights) + _mm_extract_epi32(eights, 2) - 16 * 128;
        }
    }
};
#endif

}  // namespace shoal
