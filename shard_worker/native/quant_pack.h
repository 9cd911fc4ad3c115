// From the rows of a file to panels: the only place that knows how GGUF lays its blocks out.
#pragma once

#include <cstdint>

namespace shoal {

// What a format is, for whoever has only its number.
struct FormatSizes {
    int row_block_inputs;  // inputs are a multiple of this
    int row_block_bytes;   // in a row of a file
    int64_t (*panel_bytes)(int64_t inputs);
    void (*pack_row)(const uint8_t *row, int64_t inputs, int lane, uint8_t *panel);
};

// nullptr: no such format.
const FormatSizes *format_sizes(int format);

}  // namespace shoal
