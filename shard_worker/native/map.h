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

// Rows that a product takes: floats, or pairs of bfloat16 (shoal_linear_run_pairs).
struct Inputs {
    const float *floats;
    const uint32_t *pairs;
    int64_t stride;  // floats or words

    Inputs from(int64_t row) const {
        return pairs ? Inputs{nullptr, pairs + row * stride, stride} : Inputs{floats + row * stride, nullptr, stride};
    }
};

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
            for (int64_t i = 0; i < parts; i++) pieces.push_back(piece(matrix, at, i, parts));
            at += shoal_linear_outputs(matrix);
        }
    }

    // Of a matrix whose first output is the map's `at`.
    static Piece piece(const shoal_linear *matrix, int64_t at, int64_t part, int64_t parts) {
        const int64_t outputs = shoal_linear_outputs(matrix), panels = (outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS;
        return {matrix, part, parts, at, panels * part / parts * PANEL_OUTPUTS,
                std::min(outputs, panels * (part + 1) / parts * PANEL_OUTPUTS)};
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

    // Whether products round what they take to bfloat16.
    bool rounds() const {
        return std::all_of(matrices.begin(), matrices.end(), [](auto *m) { return shoal_linear_rounds_bf16(m) != 0; });
    }

    void run(const Piece &piece, Run multiply, const Inputs &x, int64_t rows, float *y, int64_t ldy,
             void *scratch) const {
        const float *added = bias ? bias + piece.at : nullptr;
        const int part = (int)piece.part, parts = (int)piece.parts;
        if (x.pairs)
            shoal_linear_run_pairs(piece.matrix, x.pairs, x.stride, rows, y + piece.at, ldy, added, part, parts,
                                   scratch);
        else
            multiply(piece.matrix, x.floats, x.stride, rows, y + piece.at, ldy, added, part, parts, scratch);
    }

    void run_all(Run multiply, const Inputs &x, int64_t rows, float *y, int64_t ldy, void *scratch) const {
        int64_t at = 0;
        for (const shoal_linear *matrix : matrices) {
            run({matrix, 0, 1, at, 0, 0}, multiply, x, rows, y, ldy, scratch);
            at += shoal_linear_outputs(matrix);
        }
    }
};

}  // namespace shoal
