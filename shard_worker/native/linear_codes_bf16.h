// Products of packed codes with x rounded to bfloat16: codes are integers of few bits, exact in bfloat16.
//
// The rule of linear.h holds: what shares a scale is one chain over its pairs of inputs in order, and an output
// takes these sums one after the other. Codes of a stretch of two panels are expanded once for all rows, into a
// buffer that stays in the first-level cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear_bf16.h"

namespace shoal {

constexpr int64_t kCodeBlocksMax = 12;  // of a stretch
constexpr int kCodePanels = 2, kCodeRows = 6;  // of a register tile
constexpr int kCodeRowsStreamed = 8;

// A block of a panel, expanded: 16 words a panel's output, of two inputs each.
struct CodeBlock {
    uint32_t words[kBlock / 2][kPanel];
    float scale[2][kPanel], offset[2][kPanel];  // of each run of inputs that share one
};

// Bytes of scratch for m rows: rounded rows, sums of their blocks, a stretch.
inline size_t code_scratch_bytes(int64_t inputs, int64_t m) {
    const int64_t rows = std::clamp<int64_t>(m, 1, pair_rows_cached(inputs));
    const int64_t blocks = (inputs + kBlock - 1) / kBlock;
    return pair_scratch_bytes(inputs, m) + static_cast<size_t>(rows * blocks) * sizeof(float) +
           kCodePanels * kCodeBlocksMax * sizeof(CodeBlock) + 64;
}

#ifdef SHOAL_HAS_AVX512_BF16

// The bits in bfloat16 of the numbers that codes below 32 mean.
struct CodeNumbers {
    alignas(64) uint16_t bits[32];

    constexpr explicit CodeNumbers(int centre) : bits{} {
        for (int code = 0; code < 32; ++code) {
            const int number = code - centre, magnitude = number < 0 ? -number : number;
            int exponent = 0;
            while (magnitude >> (exponent + 1)) ++exponent;
            const int fraction = (magnitude << (7 - exponent)) & 127, sign = number < 0 ? 0x8000 : 0;
            bits[code] = static_cast<uint16_t>(number == 0 ? 0 : sign | (127 + exponent) << 7 | fraction);
        }
    }
};

template <class P>
constexpr CodeNumbers kCodeNumbers{P::kCentre};

// Words of bfloat16 pairs from a word of four codes.
template <class P>
struct CodePairs {
    __m512i first, second;  // inputs 0 and 1, 2 and 3

    SHOAL_INLINE explicit CodePairs(__m512i codes) {
        if constexpr (P::kCodes32) {
            const __m512i numbers = _mm512_load_si512(kCodeNumbers<P>.bits);
            const auto look = [&](__m512i places) { return _mm512_permutexvar_epi16(places, numbers); };
            first = look(spread(codes, 0)), second = look(spread(codes, 2));
        } else {
            const auto number = [&](__m512i code) {
                return _mm512_castps_si512(
                    _mm512_sub_ps(_mm512_cvtepi32_ps(code), _mm512_set1_ps(static_cast<float>(P::kCentre))));
            };
            const __m512i byte = _mm512_set1_epi32(0xff);
            const __m512i n0 = number(_mm512_and_si512(codes, byte));
            const __m512i n1 = number(_mm512_and_si512(_mm512_srli_epi32(codes, 8), byte));
            const __m512i n2 = number(_mm512_and_si512(_mm512_srli_epi32(codes, 16), byte));
            const __m512i n3 = number(_mm512_srli_epi32(codes, 24));
            // at most eight significant bits: the lower half of each float is empty
            first = _mm512_or_si512(_mm512_srli_epi32(n0, 16), n1);
            second = _mm512_or_si512(_mm512_srli_epi32(n2, 16), n3);
        }
    }

private:
    // Bytes `from` and `from` + 1 of each word as halves.
    static SHOAL_INLINE __m512i spread(__m512i codes, int from) {
        const int one = from | 0x80 << 8 | (from + 1) << 16 | 0x80 << 24;
        const __m128i order = _mm_add_epi32(_mm_set1_epi32(one), _mm_setr_epi32(0, 0x040004, 0x080008, 0x0c000c));
        return _mm512_shuffle_epi8(codes, _mm512_broadcast_i32x4(order));
    }
};

// Blocks [first, end) of a panel; `ahead` runs on from call to call.
template <class P>
__attribute__((noinline)) void expand_codes(const uint8_t *panel, int64_t first, int64_t end, int64_t stride,
                                            Ahead ahead, CodeBlock *out) {
    for (int64_t b = first; b < end; ++b, out += stride) {
        const uint8_t *header = panel + header_at<P>(b), *block = panel + block_at<P>(b);
        ahead.fetch<1>(0);
#pragma GCC unroll 4
        for (int s = 0; s < 4; ++s) {
            __m512i low, high;
            P::template words<Avx512Lanes>(block, s, 0, low, high);
            const CodePairs<P> fore(low), last(high);
            _mm512_store_si512(out->words[4 * s], fore.first);
            _mm512_store_si512(out->words[4 * s + 1], fore.second);
            _mm512_store_si512(out->words[4 * s + 2], last.first);
            _mm512_store_si512(out->words[4 * s + 3], last.second);
        }
        for (int run = 0; run < kBlock / P::kScaleInputs; ++run) {
            __m512 scale, offset;
            P::template scales<Avx512Lanes>(header, block, run, 0, scale, offset);
            _mm512_store_ps(out->scale[run], scale);
            if constexpr (P::kCentre == 0) _mm512_store_ps(out->offset[run], offset);
        }
    }
}

// The sums of each row's blocks, [rows][blocks], for minima.
inline void sum_blocks(const PairRows &x, int64_t rows, int64_t blocks, float *sums) {
    const auto ones = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f803f80));
    for (int64_t i = 0; i < rows; ++i) {
        for (int64_t b = 0; b < blocks; ++b) {
            const __m512i words = _mm512_loadu_si512(x.words + i * x.stride + b * (kBlock / 2));
            sums[i * blocks + b] = _mm512_reduce_add_ps(
                _mm512_dpbf16_ps(_mm512_setzero_ps(), reinterpret_cast<__m512bh>(words), ones));
        }
    }
}

// kRows rows of x, from the stretch's first input on, times `blocks` blocks of kPanels panels.
template <class P, int kRows, int kPanels>
__attribute__((noinline)) void multiply_codes(const CodeBlock *code, int64_t blocks, const PairRows x,
                                              const float *x_sums, int64_t sums_stride, const Target &to) {
    constexpr int kRuns = kBlock / P::kScaleInputs, kPairs = kBlock / 2 / kRuns;
    Sums<Avx512Lanes, kRows, kPanels> sums;
    sums.open(to);
    const uint32_t *words = x.words;
    for (int64_t b = 0; b < blocks; ++b, code += kPanels, words += kBlock / 2) {
        for (int run = 0; run < kRuns; ++run) {
            __m512 products[kRows][kPanels];
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
                for (int p = 0; p < kPanels; ++p) products[i][p] = _mm512_setzero_ps();
#pragma GCC unroll 4
            for (int k = run * kPairs; k < (run + 1) * kPairs; ++k) {
                __m512bh held[kPanels];
#pragma GCC unroll 4
                for (int p = 0; p < kPanels; ++p)
                    held[p] = reinterpret_cast<__m512bh>(_mm512_load_si512(code[p].words[k]));
#pragma GCC unroll 8
                for (int i = 0; i < kRows; ++i) {
                    const auto pair = reinterpret_cast<__m512bh>(
                        _mm512_set1_epi32(static_cast<int>(words[i * x.stride + k])));
#pragma GCC unroll 4
                    for (int p = 0; p < kPanels; ++p)
                        products[i][p] = _mm512_dpbf16_ps(products[i][p], pair, held[p]);
                }
            }
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p) {
                const __m512 scale = _mm512_load_ps(code[p].scale[run]);
                const __m512 offset = _mm512_load_ps(code[p].offset[run]);
#pragma GCC unroll 8
                for (int i = 0; i < kRows; ++i) {
                    auto &sum = sums.at[i][p][0];
                    if constexpr (P::kCentre == 0)
                        sum = _mm512_fmadd_ps(offset, _mm512_set1_ps(x_sums[i * sums_stride + b]), sum);
                    sum = _mm512_fmadd_ps(products[i][p], scale, sum);
                }
            }
        }
    }
    sums.close(to);
}

// The same from a packed panel, for so few rows that expanding it would take longer.
template <class P, int kRows>
__attribute__((noinline)) void stream_codes(const uint8_t *panel, int64_t blocks, const PairRows x,
                                            const float *x_sums, const Target &to, Ahead ahead) {
    constexpr int kRuns = kBlock / P::kScaleInputs, kSteps = 4 / kRuns;
    Sums<Avx512Lanes, kRows, 1> sums;
    sums.open(to);
    for (int64_t b = 0; b < blocks; ++b) {
        const uint8_t *header = panel + header_at<P>(b), *block = panel + block_at<P>(b);
        const uint32_t *words = x.words + b * (kBlock / 2);
        ahead.fetch<1>(0);
#pragma GCC unroll 2
        for (int run = 0; run < kRuns; ++run) {
            __m512 products[kRows];
            for (auto &product : products) product = _mm512_setzero_ps();
#pragma GCC unroll 4
            for (int s = run * kSteps; s < (run + 1) * kSteps; ++s) {
                __m512i low, high;
                P::template words<Avx512Lanes>(block, s, 0, low, high);
                const CodePairs<P> fore(low), last(high);
                const __m512i pairs[4] = {fore.first, fore.second, last.first, last.second};
#pragma GCC unroll 4
                for (int k = 0; k < 4; ++k) {
#pragma GCC unroll 8
                    for (int i = 0; i < kRows; ++i) {
                        const auto pair = reinterpret_cast<__m512bh>(
                            _mm512_set1_epi32(static_cast<int>(words[i * x.stride + 4 * s + k])));
                        products[i] =
                            _mm512_dpbf16_ps(products[i], pair, reinterpret_cast<__m512bh>(pairs[k]));
                    }
                }
            }
            __m512 scale, offset;
            P::template scales<Avx512Lanes>(header, block, run, 0, scale, offset);
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i) {
                auto &sum = sums.at[i][0][0];
                if constexpr (P::kCentre == 0)
                    sum = _mm512_fmadd_ps(offset, _mm512_set1_ps(x_sums[i * blocks + b]), sum);
                sum = _mm512_fmadd_ps(products[i], scale, sum);
            }
        }
    }
    sums.close(to);
}

template <class P>
void stream_panels_bf16(const Job &job, const PairRows &x, const float *x_sums) {
    with_rows<kCodeRowsStreamed>(job.m, [&](auto height) {
        constexpr int kRows = decltype(height)::value;
        for (int64_t panel = job.first; panel < job.last; ++panel) {
            const uint8_t *weights = job.w.panel(panel);
            const Ahead ahead{weights + 2 * kBytesAhead, P::kBlockBytes};
            into<kRows, 1>(job, 0, panel, false, true, [&](const Target &to) {
                stream_codes<P, kRows>(weights, job.w.inputs / kBlock, x, x_sums, to, ahead);
            });
        }
    });
}

template <class P>
void run_codes_bf16(const Job &job) {
    static_assert(P::kCentre != 0 || P::kScaleInputs == kBlock);
    const int64_t inputs = job.w.inputs, blocks = inputs / kBlock, at_once = pair_rows_cached(inputs);
    const int64_t stretches = (blocks + kCodeBlocksMax - 1) / kCodeBlocksMax;
    auto *codes = reinterpret_cast<CodeBlock *>(job.scratch);
    auto *words = reinterpret_cast<uint32_t *>(codes + kCodePanels * kCodeBlocksMax);
    for (int64_t row = 0; row < job.m; row += at_once) {
        const int64_t rows = std::min(at_once, job.m - row);
        auto *x_sums = reinterpret_cast<float *>(words + rows * pair_stride(inputs));
        const PairRows x = pair_rows(job, row, rows, words);
        if constexpr (P::kCentre == 0) sum_blocks(x, rows, blocks, x_sums);
        if (job.m <= kCodeRowsStreamed) return stream_panels_bf16<P>(job, x, x_sums);
        each_panel_group<kCodePanels>(job, [&](int64_t panel, auto panels) {
            constexpr int kPanels = decltype(panels)::value;
            for (int64_t s = 0; s < stretches; ++s) {
                const int64_t begin = blocks * s / stretches, end = blocks * (s + 1) / stretches;
                for (int p = 0; p < kPanels; ++p) {
                    const uint8_t *weights = job.w.panel(panel + p);
                    const Ahead ahead{weights + block_at<P>(begin) + 2 * kBytesAhead, P::kBlockBytes};
                    expand_codes<P>(weights, begin, end, kPanels, ahead, codes + p);
                }
                each_row_tile<kCodeRows>(rows, [&](int64_t at, auto height) {
                    constexpr int kRows = decltype(height)::value;
                    const PairRows part{x.from(at).words + begin * (kBlock / 2), x.stride};
                    into<kRows, kPanels>(job, row + at, panel, s > 0, end == blocks, [&](const Target &to) {
                        multiply_codes<P, kRows, kPanels>(codes, end - begin, part, x_sums + at * blocks + begin,
                                                          blocks, to);
                    });
                });
            }
        });
    }
}

#endif

}  // namespace shoal
