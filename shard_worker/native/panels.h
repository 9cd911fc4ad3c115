// How packed weights lie in memory and how a kernel reads them: panels of 16 outputs, inputs in order within
// a panel.
//
// Float formats interleave the 16 outputs of each input (bf16: of each pair, so that one operation widens
// either). Quantised formats interleave 32-bit words of four codes of consecutive inputs, one word per
// output: a word is what an integer dot product takes, and a mask and a conversion make floats of its bytes.
// All codes are unsigned; a weight is scale * code + offset, exactly: a scale has at most 18 significant
// bits, a code fits what is left of 24.
#pragma once

#include <cstdint>

#include "lanes.h"

namespace shoal {

constexpr int kPanel = 16;
constexpr int kBlock = 32;  // inputs of a quantised block as packed, and of an 8-bit activation block

// ---- float formats: a block is four inputs

struct F32Panel {
    static constexpr bool kQuantised = false;
    static constexpr int kBlockInputs = 4;
    static constexpr int kBlockBytes = 4 * kPanel * 4;

    template <class V>
    struct Reader {
        const uint8_t *block;
        template <int J>
        SHOAL_INLINE typename V::F value(int half) const {
            return V::load(reinterpret_cast<const float *>(block) + J * kPanel + half * V::kWidth);
        }
    };
};

struct Bf16Panel {
    static constexpr bool kQuantised = false;
    static constexpr int kBlockInputs = 4;
    static constexpr int kBlockBytes = 4 * kPanel * 2;

    template <class V>
    struct Reader {
        const uint8_t *block;
        template <int J>
        SHOAL_INLINE typename V::F value(int half) const {
            const auto pair = V::words(block + (J / 2) * kPanel * 4 + half * V::kWidth * 4);
            return V::as_float(J % 2 == 0 ? V::template left<16>(pair) : V::mask(pair, 0xffff0000u));
        }
    };
};

struct F16Panel {
    static constexpr bool kQuantised = false;
    static constexpr int kBlockInputs = 4;
    static constexpr int kBlockBytes = 4 * kPanel * 2;

    template <class V>
    struct Reader {
        const uint8_t *block;
        template <int J>
        SHOAL_INLINE typename V::F value(int half) const {
            return V::halves(block + J * kPanel * 2 + half * V::kWidth * 2);
        }
    };
};

// ---- quantised formats: a block is 32 inputs; kBlocks of them follow one header
//
// kScaleInputs: inputs that share a scale. kChain: words whose products can be summed in 16 bits (code * 127,
// two a pair). kCentre: the code that means zero, 0 where each block has a minimum of its own. kCodes32: all
// codes are below 32. `words`: step s of a block is 8 inputs, as two words: inputs 8s..8s+3 and 8s+4..8s+7.

constexpr uint32_t kNibbles = 0x0f0f0f0fu;

template <class V>
SHOAL_INLINE void nibbles(const uint8_t *codes, int step, int half, typename V::I &first,
                          typename V::I &second) {
    const auto word = V::words(codes + (step * kPanel + half * V::kWidth) * 4);
    first = V::mask(word, kNibbles);
    second = V::mask(V::template right<4>(word), kNibbles);
}

struct Q8_0Panel {  // scales[16] f16, words [8][16]
    static constexpr bool kQuantised = true;
    static constexpr bool kCodes32 = false;
    static constexpr int kBlocks = 1, kHeaderBytes = 0, kScaleInputs = 32, kChain = 0, kCentre = 128;
    static constexpr int kCodes = 32, kBlockBytes = kCodes + 8 * kPanel * 4;

    template <class V>
    static SHOAL_INLINE void scales(const uint8_t *, const uint8_t *block, int, int half,
                                    typename V::F &scale, typename V::F &offset) {
        scale = V::halves(block + half * V::kWidth * 2);
        offset = V::mul(scale, V::broadcast(-128.0f));
    }
    template <class V>
    static SHOAL_INLINE void words(const uint8_t *block, int step, int half, typename V::I &first,
                                   typename V::I &second) {
        const uint8_t *codes = block + kCodes + (step * 2 * kPanel + half * V::kWidth) * 4;
        first = V::words(codes);
        second = V::words(codes + kPanel * 4);
    }
};

struct Q4_0Panel {  // scales[16] f16, words of nibbles [4][16]
    static constexpr bool kQuantised = true;
    static constexpr bool kCodes32 = true;
    static constexpr int kBlocks = 1, kHeaderBytes = 0, kScaleInputs = 32, kChain = 8, kCentre = 8;
    static constexpr int kCodes = 32, kBlockBytes = kCodes + 4 * kPanel * 4;

    template <class V>
    static SHOAL_INLINE void scales(const uint8_t *, const uint8_t *block, int, int half,
                                    typename V::F &scale, typename V::F &offset) {
        scale = V::halves(block + half * V::kWidth * 2);
        offset = V::mul(scale, V::broadcast(-8.0f));
    }
    template <class V>
    static SHOAL_INLINE void words(const uint8_t *block, int step, int half, typename V::I &first,
                                   typename V::I &second) {
        nibbles<V>(block + kCodes, step, half, first, second);
    }
};

struct Q4_1Panel {  // scales[16] f16, minima[16] f16, words of nibbles [4][16]
    static constexpr bool kQuantised = true;
    static constexpr bool kCodes32 = true;
    static constexpr int kBlocks = 1, kHeaderBytes = 0, kScaleInputs = 32, kChain = 8, kCentre = 0;
    static constexpr int kMinima = 32, kCodes = 64, kBlockBytes = kCodes + 4 * kPanel * 4;

    template <class V>
    static SHOAL_INLINE void scales(const uint8_t *, const uint8_t *block, int, int half,
                                    typename V::F &scale, typename V::F &offset) {
        scale = V::halves(block + half * V::kWidth * 2);
        offset = V::halves(block + kMinima + half * V::kWidth * 2);
    }
    template <class V>
    static SHOAL_INLINE void words(const uint8_t *block, int step, int half, typename V::I &first,
                                   typename V::I &second) {
        nibbles<V>(block + kCodes, step, half, first, second);
    }
};

struct Q5_0Panel {  // scales[16] f16, fifth bits [16] (bit w of byte b: input 4w + b), words of nibbles
                    // [4][16]
    static constexpr bool kQuantised = true;
    static constexpr bool kCodes32 = true;
    static constexpr int kBlocks = 1, kHeaderBytes = 0, kScaleInputs = 32, kChain = 4, kCentre = 16;
    static constexpr int kHigh = 32, kCodes = kHigh + kPanel * 4, kBlockBytes = kCodes + 4 * kPanel * 4;

    template <class V>
    static SHOAL_INLINE void scales(const uint8_t *, const uint8_t *block, int, int half,
                                    typename V::F &scale, typename V::F &offset) {
        scale = V::halves(block + half * V::kWidth * 2);
        offset = V::mul(scale, V::broadcast(-16.0f));
    }
    template <class V>
    static SHOAL_INLINE void words(const uint8_t *block, int step, int half, typename V::I &first,
                                   typename V::I &second) {
        constexpr uint32_t kFifth = 0x10101010u;
        nibbles<V>(block + kCodes, step, half, first, second);
        const auto high = V::right_by(V::words(block + kHigh + half * V::kWidth * 4), 2 * step);
        first = V::either(first, V::mask(V::template left<4>(high), kFifth));
        second = V::either(second, V::mask(V::template left<3>(high), kFifth));
    }
};

// Header: scale[16] f16 and scale of minima[16] f16 of 256 inputs. Block: multiples of the scale [16] u8, of
// the minimum [16] u8, words of nibbles [4][16].
struct Q4KPanel {
    static constexpr bool kQuantised = true;
    static constexpr bool kCodes32 = true;
    static constexpr int kBlocks = 8, kHeaderBytes = 64, kScaleInputs = 32, kChain = 8, kCentre = 0;
    static constexpr int kMinima = 16, kCodes = 32, kBlockBytes = kCodes + 4 * kPanel * 4;

    template <class V>
    static SHOAL_INLINE void scales(const uint8_t *header, const uint8_t *block, int, int half,
                                    typename V::F &scale, typename V::F &offset) {
        const int lane = half * V::kWidth;
        scale = V::mul(V::halves(header + lane * 2), V::unsigned_bytes(block + lane));
        const auto minimum =
            V::mul(V::halves(header + 32 + lane * 2), V::unsigned_bytes(block + kMinima + lane));
        offset = V::mul(minimum, V::broadcast(-1.0f));
    }
    template <class V>
    static SHOAL_INLINE void words(const uint8_t *block, int step, int half, typename V::I &first,
                                   typename V::I &second) {
        nibbles<V>(block + kCodes, step, half, first, second);
    }
};

// Header: scale[16] f16 of 256 inputs. Block: multiples of the scale [2][16] i8 (of 16 inputs each), two top
// bits [2][16] (bits 2w and 2w+1 of byte b: input 4w + b of a half block), words of nibbles [4][16].
struct Q6KPanel {
    static constexpr bool kQuantised = true;
    static constexpr bool kCodes32 = false;
    static constexpr int kBlocks = 8, kHeaderBytes = 32, kScaleInputs = 16, kChain = 2, kCentre = 32;
    static constexpr int kHigh = 32, kCodes = kHigh + 2 * kPanel * 4, kBlockBytes = kCodes + 4 * kPanel * 4;

    template <class V>
    static SHOAL_INLINE void scales(const uint8_t *header, const uint8_t *block, int run, int half,
                                    typename V::F &scale, typename V::F &offset) {
        const int lane = half * V::kWidth;
        scale = V::mul(V::halves(header + lane * 2), V::signed_bytes(block + run * kPanel + lane));
        offset = V::mul(scale, V::broadcast(-32.0f));
    }
    template <class V>
    static SHOAL_INLINE void words(const uint8_t *block, int step, int half, typename V::I &first,
                                   typename V::I &second) {
        constexpr uint32_t kTop = 0x30303030u;
        nibbles<V>(block + kCodes, step, half, first, second);
        const uint8_t *top = block + kHigh + ((step / 2) * kPanel + half * V::kWidth) * 4;
        const auto high = V::right_by(V::words(top), 4 * (step % 2));
        first = V::either(first, V::mask(V::template left<4>(high), kTop));
        second = V::either(second, V::mask(V::template left<2>(high), kTop));
    }
};

// ---- places in a panel

template <class P>
constexpr int inputs_of_block() {
    if constexpr (P::kQuantised) {
        return kBlock;
    } else {
        return P::kBlockInputs;
    }
}

template <class P>
constexpr int64_t panel_bytes(int64_t inputs) {
    if constexpr (P::kQuantised) {
        const int64_t blocks = inputs / kBlock;
        return blocks / P::kBlocks * P::kHeaderBytes + blocks * P::kBlockBytes;
    } else {
        return (inputs + P::kBlockInputs - 1) / P::kBlockInputs * P::kBlockBytes;
    }
}

// The header of a block's group; the blocks follow it.
template <class P>
SHOAL_INLINE int64_t header_at(int64_t block) {
    return block / P::kBlocks * (P::kHeaderBytes + P::kBlocks * P::kBlockBytes);
}

template <class P>
SHOAL_INLINE int64_t block_at(int64_t block) {
    if constexpr (P::kQuantised) {
        return header_at<P>(block) + P::kHeaderBytes + block % P::kBlocks * P::kBlockBytes;
    } else {
        return block * P::kBlockBytes;
    }
}

// Floats of the inputs that share a scale, from their words.
template <class V, class P>
struct RunReader {
    static constexpr int kHalves = kPanel / V::kWidth;
    typename V::F scale[kHalves], scale8[kHalves], scale16[kHalves], offset[kHalves];
    typename V::I word[2][kHalves];

    SHOAL_INLINE void open(const uint8_t *header, const uint8_t *block, int run) {
        for (int h = 0; h < kHalves; ++h) {
            P::template scales<V>(header, block, run, h, scale[h], offset[h]);
            scale8[h] =
                V::mul(scale[h], V::broadcast(0x1p-8f));  // a byte in the middle of a word counts 2^8 times,
            scale16[h] = V::mul(scale[h], V::broadcast(0x1p-16f));  // or 2^16 times
        }
    }
    SHOAL_INLINE void step(const uint8_t *block, int step) {
        for (int h = 0; h < kHalves; ++h) P::template words<V>(block, step, h, word[0][h], word[1][h]);
    }
    template <int J>
    SHOAL_INLINE typename V::F value(int half) const {
        const auto w = word[J / 4][half];
        if constexpr (J % 4 == 0) return V::fma(V::to_float(V::mask(w, 0xffu)), scale[half], offset[half]);
        if constexpr (J % 4 == 1) return V::fma(V::to_float(V::mask(w, 0xff00u)), scale8[half], offset[half]);
        if constexpr (J % 4 == 2)
            return V::fma(V::to_float(V::mask(w, 0xff0000u)), scale16[half], offset[half]);
        if constexpr (J % 4 == 3)
            return V::fma(V::to_float(V::template right<24>(w)), scale[half], offset[half]);
    }
};

}  // namespace shoal
