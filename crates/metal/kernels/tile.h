// Weights that have to be expanded before they are multiplied, a tile of rows and columns at a time.
#pragma once

#include "projection.h"

constexpr constant int ROWS_TILE = 64;
constexpr constant int COLS_TILE = 32;
constexpr constant int STRIDE = 36;  // floats of a row of the expanded tile: 32, and 4 against bank conflicts

// Expands columns k .. k + 32 of the tile's rows with 128 threads; rows past the end become zeros.
template <int T>
inline void expand_tile(Rows rows, int k, threadgroup float* tile, uint thread_index) {
    int r = thread_index / 2, c = thread_index % 2 * 16;
    float values[16];
    if (rows.first + r < rows.end) {
        device const uchar* row = rows.weights + (rows.first + r) * row_bytes<T>(COLS);
        expand8<T>(row, k + c, values);
        expand8<T>(row, k + c + 8, values + 8);
    } else {
        for (int i = 0; i < 16; i++) values[i] = 0.0f;
    }
    for (int i = 0; i < 16; i++) tile[r * STRIDE + c + i] = values[i];
}
