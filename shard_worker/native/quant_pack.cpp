#include "quant_pack.h"

#include <cstring>

#include "linear.h"
#define SHOAL_PORTABLE_ONLY
#include "panels.h"

namespace shoal {
namespace {

// ---- the two ways codes lie in a packed block; `code` holds the 32 of one output

void put_bytes(const uint8_t *code, int lane, uint8_t *words) {
    for (int w = 0; w < 8; ++w) std::memcpy(words + (w * kPanel + lane) * 4, code + 4 * w, 4);
}

void put_nibbles(const uint8_t *code, int lane, uint8_t *words) {
    for (int step = 0; step < 4; ++step) {
        for (int b = 0; b < 4; ++b) {
            const int low = code[8 * step + b] & 15;
            const int high = code[8 * step + 4 + b] & 15;
            words[(step * kPanel + lane) * 4 + b] = static_cast<uint8_t>(low | high << 4);
        }
    }
}

// GGUF's small blocks keep codes 0..15 in the low nibbles of 16 bytes and 16..31 in the high ones.
void split_nibbles(const uint8_t *bytes, uint8_t *code) {
    for (int i = 0; i < 16; ++i) {
        code[i] = bytes[i] & 15;
        code[16 + i] = bytes[i] >> 4;
    }
}

// ---- one row block each: `header` and `block` are the panel's

void pack_q8_0(const uint8_t *in, int lane, uint8_t *block) {
    uint8_t code[32];
    for (int i = 0; i < 32; ++i) code[i] = in[2 + i] ^ 0x80;
    std::memcpy(block + 2 * lane, in, 2);
    put_bytes(code, lane, block + Q8_0Panel::kCodes);
}

void pack_q4_0(const uint8_t *in, int lane, uint8_t *block) {
    uint8_t code[32];
    split_nibbles(in + 2, code);
    std::memcpy(block + 2 * lane, in, 2);
    put_nibbles(code, lane, block + Q4_0Panel::kCodes);
}

void pack_q4_1(const uint8_t *in, int lane, uint8_t *block) {
    uint8_t code[32];
    split_nibbles(in + 4, code);
    std::memcpy(block + 2 * lane, in, 2);
    std::memcpy(block + Q4_1Panel::kMinima + 2 * lane, in + 2, 2);
    put_nibbles(code, lane, block + Q4_1Panel::kCodes);
}

void pack_q5_0(const uint8_t *in, int lane, uint8_t *block) {
    uint8_t code[32];
    uint8_t high[4] = {};
    split_nibbles(in + 6, code);
    for (int i = 0; i < 32; ++i) {
        const int bit = in[2 + i / 8] >> (i % 8) & 1;
        high[i % 4] = static_cast<uint8_t>(high[i % 4] | bit << (i / 4));
    }
    std::memcpy(block + 2 * lane, in, 2);
    std::memcpy(block + Q5_0Panel::kHigh + 4 * lane, high, 4);
    put_nibbles(code, lane, block + Q5_0Panel::kCodes);
}

struct ScaleAndMin {
    int scale, min;
};

// Six bits each, twelve bytes for the eight of a block.
ScaleAndMin q4_k_scale(const uint8_t *packed, int i) {
    if (i < 4) return {packed[i] & 63, packed[i + 4] & 63};
    return {(packed[i + 4] & 15) | (packed[i - 4] >> 6) << 4, packed[i + 4] >> 4 | (packed[i] >> 6) << 4};
}

void pack_q4_k(const uint8_t *in, int lane, uint8_t *header) {
    std::memcpy(header + 2 * lane, in, 2);
    std::memcpy(header + 32 + 2 * lane, in + 2, 2);
    for (int i = 0; i < 8; ++i) {
        uint8_t *block = header + Q4KPanel::kHeaderBytes + i * Q4KPanel::kBlockBytes;
        const uint8_t *bytes = in + 16 + (i / 2) * 32;
        const ScaleAndMin both = q4_k_scale(in + 4, i);
        uint8_t code[32];
        for (int j = 0; j < 32; ++j) code[j] = i % 2 == 0 ? bytes[j] & 15 : bytes[j] >> 4;
        block[lane] = static_cast<uint8_t>(both.scale);
        block[Q4KPanel::kMinima + lane] = static_cast<uint8_t>(both.min);
        put_nibbles(code, lane, block + Q4KPanel::kCodes);
    }
}

void pack_q6_k(const uint8_t *in, int lane, uint8_t *header) {
    const uint8_t *low = in, *top = in + 128, *scales = in + 192;
    std::memcpy(header + 2 * lane, in + 208, 2);
    for (int i = 0; i < 8; ++i) {
        uint8_t *block = header + Q6KPanel::kHeaderBytes + i * Q6KPanel::kBlockBytes;
        const uint8_t *bytes = low + (i / 4) * 64 + (i % 2) * 32;
        uint8_t code[32];
        uint8_t high[2][4] = {};
        for (int j = 0; j < 32; ++j) {
            code[j] = static_cast<uint8_t>(bytes[j] >> (i % 4 / 2 * 4) & 15);
            const int bits = top[(i / 4) * 32 + j] >> (2 * (i % 4)) & 3;
            uint8_t &place = high[j / 16][j % 4];
            place = static_cast<uint8_t>(place | bits << (2 * (j % 16 / 4)));
        }
        block[lane] = scales[2 * i];
        block[kPanel + lane] = scales[2 * i + 1];
        std::memcpy(block + Q6KPanel::kHigh + 4 * lane, high[0], 4);
        std::memcpy(block + Q6KPanel::kHigh + 4 * (kPanel + lane), high[1], 4);
        put_nibbles(code, lane, block + Q6KPanel::kCodes);
    }
}

// ---- a whole row

void pack_row_f32(const uint8_t *row, int64_t inputs, int lane, uint8_t *panel) {
    for (int64_t k = 0; k < inputs; ++k) std::memcpy(panel + (k * kPanel + lane) * 4, row + 4 * k, 4);
}

void pack_row_bf16(const uint8_t *row, int64_t inputs, int lane, uint8_t *panel) {
    for (int64_t k = 0; k < inputs; ++k) {
        std::memcpy(panel + (k / 2 * kPanel + lane) * 4 + k % 2 * 2, row + 2 * k, 2);
    }
}

void pack_row_f16(const uint8_t *row, int64_t inputs, int lane, uint8_t *panel) {
    for (int64_t k = 0; k < inputs; ++k) std::memcpy(panel + (k * kPanel + lane) * 2, row + 2 * k, 2);
}

template <class P, int kRowBytes, void (*pack)(const uint8_t *, int, uint8_t *)>
void pack_row_quantised(const uint8_t *row, int64_t inputs, int lane, uint8_t *panel) {
    constexpr int64_t kPanelBytes = P::kHeaderBytes + int64_t{P::kBlocks} * P::kBlockBytes;
    const int64_t groups = inputs / (P::kBlocks * kBlock);
    for (int64_t g = 0; g < groups; ++g) pack(row + g * kRowBytes, lane, panel + g * kPanelBytes);
}

template <class P, int kRowBytes, void (*pack)(const uint8_t *, int, uint8_t *)>
constexpr FormatSizes quantised() {
    return {P::kBlocks * kBlock, kRowBytes, panel_bytes<P>, pack_row_quantised<P, kRowBytes, pack>};
}

constexpr FormatSizes kFormats[] = {
    {1, 4, panel_bytes<F32Panel>, pack_row_f32}, {1, 2, panel_bytes<Bf16Panel>, pack_row_bf16},
    {1, 2, panel_bytes<F16Panel>, pack_row_f16}, quantised<Q8_0Panel, 34, pack_q8_0>(),
    quantised<Q4_0Panel, 18, pack_q4_0>(),       quantised<Q4_1Panel, 20, pack_q4_1>(),
    quantised<Q5_0Panel, 22, pack_q5_0>(),       quantised<Q4KPanel, 144, pack_q4_k>(),
    quantised<Q6KPanel, 210, pack_q6_k>(),
};

}  // namespace

const FormatSizes *format_sizes(int format) {
    return format >= SHOAL_F32 && format <= SHOAL_Q6_K ? &kFormats[format] : nullptr;
}

}  // namespace shoal
