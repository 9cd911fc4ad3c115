// Matrices with the same input, and how a product by them is shared out between threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "stage.h"

namespace shoal {

constexpr int64_t PANEL_OUTPUTS = 16;  // linear.h shares out outputs in whole panels

using Run = decltype(&shoal_linear_run);  // one of linear.h's, by what activations may be rounded to

// A share of one of a map's matrices.
struct Piece {
    const shoal_linear *matrix;
    int64_t part, parts;
    int64_t at;          // the matrix's first among the map's outputs
    int64_t first, end;  // the piece's among the matrix's outputs
};

struct Map {
    std::vector<const shoal_linear *> matrices;
    std::vector<Piece> pieces;  // matrix by matrix: long ones, that memory is read in a stream and x packed once
    const float *bias = nullptr;

    Map() = default;

    // `parts` of each matrix.
    Map(const shoal_map &map, int64_t parts)
        : matrices(map.matrices, map.matrices + map.count), bias(map.bias) {
        int64_t at = 0;
        for (const shoal_linear *matrix : matrices) {
            const int64_t outputs = shoal_linear_outputs(matrix), panels = (outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS;
            for (int64_t i = 0; i < parts; i++)
                pieces.push_back({matrix, i, parts, at, panels * i / parts * PANEL_OUTPUTS,
                                  std::min(outputs, panels * (i + 1) / parts * PANEL_OUTPUTS)});
            at += outputs;
        }
    }

    // Two matrices whose outputs belong together one by one, as gate and up do.
    bool pairs(int64_t outputs) const {
        return matrices.size() == 2 && shoal_linear_outputs(matrices[0]) == outputs &&
               shoal_linear_outputs(matrices[1]) == outputs;
    }

    size_t scratch_bytes(int64_t rows) const {
        size_t most = 0;
        for (const shoal_linear *matrix : matrices) most = std::max(most, shoal_linear_scratch_bytes(matrix, rows));
        return most;
    }

    void run(const Piece &piece, Run multiply, const float *x, int64_t ldx, int64_t rows, float *y, int64_t ldy,
             void *scratch) const {
        multiply(piece.matrix, x, ldx, rows, y + piece.at, ldy, bias ? bias + piece.at : nullptr, (int)piece.part,
                 (int)piece.parts, scratch);
    }

    void run_all(Run multiply, const float *x, int64_t ldx, int64_t rows, float *y, int64_t ldy, void *scratch) const {
        int64_t at = 0;
        for (const shoal_linear *matrix : matrices) {
            run({matrix, 0, 1, at, 0, 0}, multiply, x, ldx, rows, y, ldy, scratch);
            at += shoal_linear_outputs(matrix);
        }
    }
};

}  // namespace shoal
