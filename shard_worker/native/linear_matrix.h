// A packed matrix, and the tables of kernels that run over it.
#pragma once

#include <cstdint>

#include "linear.h"

constexpr int kShoalPanelOutputs = 16;

struct shoal_linear {
    int format;
    int64_t outputs, inputs;
    int64_t panel_bytes;
    uint8_t *data;  // panels, one after the other
    int64_t bytes;
    bool int8_exact;  // no code of -128, whose sign 8 bits cannot change

    int64_t panels() const { return (outputs + kShoalPanelOutputs - 1) / kShoalPanelOutputs; }
    const uint8_t *panel(int64_t index) const { return data + index * panel_bytes; }
};

namespace shoal {

struct Job;

struct FormatKernels {
    void (*run)(const Job &);
    void (*run_bf16)(const Job &);
    void (*run_int8)(const Job &);
    void (*read_row)(const shoal_linear &, int64_t row, float *out);
};

struct Kernels {
    const char *name;
    FormatKernels by_format[9];
};

// nullptr: not compiled in, or not for this processor.
const Kernels *portable_kernels();
const Kernels *avx2_kernels();
const Kernels *avx512_kernels();

}  // namespace shoal
