#include "linear.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#define SHOAL_PORTABLE_ONLY
#include "linear_codes_bf16.h"
#include "quant_pack.h"

namespace {

using shoal::FormatSizes;
using shoal::Kernels;

constexpr size_t kAlignment = 64;

size_t aligned(size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// ---- the instruction set in use

const Kernels *find_kernels(const char *name) {
    const Kernels *best_first[] = {shoal::avx512_kernels(), shoal::avx2_kernels(), shoal::portable_kernels()};
    for (const Kernels *kernels : best_first) {
        if (kernels && (!name || !*name || std::strcmp(name, kernels->name) == 0)) return kernels;
    }
    return nullptr;
}

const Kernels *default_kernels() {
    const Kernels *wanted = find_kernels(std::getenv("SHOAL_NATIVE_ISA"));
    return wanted ? wanted : find_kernels(nullptr);
}

std::atomic<const Kernels *> chosen_kernels{nullptr};

const Kernels *kernels_in_use() {
    const Kernels *kernels = chosen_kernels.load(std::memory_order_acquire);
    if (!kernels) chosen_kernels.store(kernels = default_kernels(), std::memory_order_release);
    return kernels;
}

// ---- packing

bool holds_minus_128(const uint8_t *row, int64_t inputs) {
    for (int64_t b = 0; b < inputs / 32; ++b) {
        if (std::memchr(row + b * 34 + 2, 0x80, 32)) return true;
    }
    return false;
}

bool sizes_fit(const FormatSizes &sizes, int64_t outputs, int64_t inputs, int64_t row_bytes) {
    constexpr int64_t kMax = int64_t{1} << 32;  // far above any model, far below overflow
    if (outputs <= 0 || inputs <= 0 || outputs > kMax || inputs > kMax) return false;
    if (inputs % sizes.row_block_inputs != 0) return false;
    return row_bytes >= inputs / sizes.row_block_inputs * sizes.row_block_bytes;
}

void pack(const FormatSizes &sizes, const uint8_t *rows, int64_t row_bytes, shoal_linear *linear) {
    for (int64_t row = 0; row < linear->outputs; ++row) {
        const uint8_t *from = rows + row * row_bytes;
        uint8_t *panel = linear->data + row / shoal::kPanel * linear->panel_bytes;
        sizes.pack_row(from, linear->inputs, static_cast<int>(row % shoal::kPanel), panel);
        if (linear->format == SHOAL_Q8_0 && holds_minus_128(from, linear->inputs)) linear->int8_exact = false;
    }
}

// ---- running

// Kernels divide by rows and may take it that there are panels.
void run_job(void (*kernel)(const shoal::Job &), const shoal_linear *linear, const float *x, int64_t ldx,
             int64_t m, float *y, int64_t ldy, const float *bias, int part, int parts, void *scratch,
             const uint32_t *words = nullptr) {
    const auto address = reinterpret_cast<uintptr_t>(scratch);
    auto *start = reinterpret_cast<uint8_t *>(aligned(address));
    const int64_t panels = linear->panels(), first = panels * part / parts, last = panels * (part + 1) / parts;
    if (m > 0 && first < last) kernel({*linear, x, ldx, m, y, ldy, bias, first, last, start, words});
}

}  // namespace

extern "C" {

shoal_linear *shoal_linear_create(int format, const uint8_t *rows, int64_t outputs, int64_t inputs,
                                  int64_t row_bytes) {
    const FormatSizes *sizes = shoal::format_sizes(format);
    if (!sizes || !sizes_fit(*sizes, outputs, inputs, row_bytes)) return nullptr;
    auto *linear = new (std::nothrow)
        shoal_linear{format, outputs, inputs, sizes->panel_bytes(inputs), nullptr, 0, true};
    if (!linear) return nullptr;
    linear->bytes = linear->panels() * linear->panel_bytes;
    const size_t bytes = aligned(static_cast<size_t>(linear->bytes));
    linear->data = static_cast<uint8_t *>(std::aligned_alloc(kAlignment, bytes));
    if (!linear->data) {
        delete linear;
        return nullptr;
    }
    std::memset(linear->data, 0, bytes);  // outputs that pad the last panel weigh nothing
    pack(*sizes, rows, row_bytes, linear);
    return linear;
}

void shoal_linear_destroy(shoal_linear *linear) {
    if (!linear) return;
    std::free(linear->data);
    delete linear;
}

int64_t shoal_linear_bytes(const shoal_linear *linear) {
    return linear->bytes;
}
int64_t shoal_linear_outputs(const shoal_linear *linear) {
    return linear->outputs;
}
int64_t shoal_linear_inputs(const shoal_linear *linear) {
    return linear->inputs;
}

size_t shoal_linear_scratch_bytes(const shoal_linear *linear, int64_t m_max) {
    const auto inputs = static_cast<size_t>(linear->inputs);
    const size_t tile = shoal::kTilePanelsMax * static_cast<size_t>(shoal::tile_inputs(linear->inputs)) *
                        shoal::kPanel * sizeof(float);
    const auto at_most = [m_max](int64_t rows) {
        return static_cast<size_t>(std::clamp<int64_t>(m_max, 1, rows));
    };
    const int64_t stretch = shoal::tile_inputs(linear->inputs);
    const size_t whole = static_cast<size_t>(std::min(m_max, shoal::rows_cached(linear->inputs))) * inputs;
    const size_t part = at_most(shoal::rows_cached(stretch)) * static_cast<size_t>(stretch);
    const size_t packed = std::max(whole, part) * sizeof(float);
    const size_t codes =
        at_most(shoal::kRowsAtOnceInt8) * (inputs + inputs / shoal::kBlock * 3 * sizeof(float));
    const size_t pairs = shoal::code_scratch_bytes(linear->inputs, m_max);
    return aligned(std::max({tile + packed, codes, pairs})) + kAlignment;
}

void shoal_linear_run(const shoal_linear *linear, const float *x, int64_t ldx, int64_t m, float *y,
                      int64_t ldy, const float *bias, int part, int parts, void *scratch) {
    const auto kernel = kernels_in_use()->by_format[linear->format].run;
    run_job(kernel, linear, x, ldx, m, y, ldy, bias, part, parts, scratch);
}

void shoal_linear_run_bf16(const shoal_linear *linear, const float *x, int64_t ldx, int64_t m, float *y,
                           int64_t ldy, const float *bias, int part, int parts, void *scratch) {
    const auto kernel = kernels_in_use()->by_format[linear->format].run_bf16;
    run_job(kernel, linear, x, ldx, m, y, ldy, bias, part, parts, scratch);
}

int64_t shoal_linear_pair_stride(int64_t inputs) {
    return shoal::pair_stride(inputs);
}

void shoal_linear_run_pairs(const shoal_linear *linear, const uint32_t *x, int64_t ldx, int64_t m, float *y,
                            int64_t ldy, const float *bias, int part, int parts, void *scratch) {
    const auto kernel = shoal::avx512_kernels()->by_format[linear->format].run_bf16;  // no other set rounds
    run_job(kernel, linear, nullptr, ldx, m, y, ldy, bias, part, parts, scratch, x);
}

int shoal_linear_rounds_bf16(const shoal_linear *linear) {
    const auto &kernels = kernels_in_use()->by_format[linear->format];
    return kernels.run_bf16 != kernels.run;
}

void shoal_linear_run_int8(const shoal_linear *linear, const float *x, int64_t ldx, int64_t m, float *y,
                           int64_t ldy, const float *bias, int part, int parts, void *scratch) {
    const auto &kernels = kernels_in_use()->by_format[linear->format];
    const auto kernel = linear->int8_exact ? kernels.run_int8 : kernels.run;
    run_job(kernel, linear, x, ldx, m, y, ldy, bias, part, parts, scratch);
}

void shoal_linear_dequantize_row(const shoal_linear *linear, int64_t row, float *out) {
    kernels_in_use()->by_format[linear->format].read_row(*linear, row, out);
}

int shoal_linear_use_isa(const char *name) {
    const Kernels *kernels = name && *name ? find_kernels(name) : default_kernels();
    if (!kernels) return -1;
    chosen_kernels.store(kernels, std::memory_order_release);
    return 0;
}

const char *shoal_linear_isa(void) {
    return kernels_in_use()->name;
}

}  // extern "C"
