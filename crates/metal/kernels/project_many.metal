// out = x W^T for many tokens, on the simdgroup matrices.
//
// Floor: operations. A threadgroup of four simdgroups makes a tile of 64 rows: two by two simdgroups, each 32 rows of half
// of the tokens. bf16 weights go from memory straight into matrices and take tiles of 32 tokens. Quantised ones are
// expanded once a tile of tokens into threadgroup memory, 32 columns at a time, so their tile is 64 tokens.
// Rows are multiples of 8 (src/kernels.rs sends what is left to project_few); matrices past the last row or token are
// skipped. x fp32 [tokens][COLS] and out fp32 [tokens][width] have room for whole matrices of tokens.
// Grid: (rows / 64, tokens / tile), 128 threads. Threadgroup memory: 64 x STRIDE floats for quantised weights.
#include "projection.h"

constexpr constant int ROWS_TILE = 64;
constexpr constant int STRIDE = 36;  // floats of a row of the expanded tile: 32, and 4 against bank conflicts

// Expands columns k .. k + 32 of the tile's rows; rows past the end become zeros.
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

template <int T, int TOKENS>
inline void project_tile(Rows rows, device const float* x, device float* out, threadgroup float* tile,
                         constant Projection& shape, int token, uint thread_index, uint simdgroup) {
    int row = simdgroup % 2 * 32;               // of the tile
    token += simdgroup / 2 * (TOKENS * 8);      // TOKENS matrices of 8 a simdgroup
    int row_matrices = min(4, (rows.end - rows.first - row) / 8);
    int token_matrices = min(TOKENS, (shape.tokens - token + 7) / 8);
    device float* to = out + ulong(token) * shape.width + rows.at + rows.first + row;

    simdgroup_float8x8 sums[TOKENS][4];
    UNROLL
    for (int t = 0; t < TOKENS; t++)
        UNROLL
        for (int r = 0; r < 4; r++) {
            sums[t][r] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            if (shape.residual && t < token_matrices && r < row_matrices)
                simdgroup_load(sums[t][r], to + ulong(t) * 8 * shape.width + r * 8, shape.width);
        }
    for (int k = 0; k < COLS; k += 32) {
        if (T != BF16) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
            expand_tile<T>(rows, k, tile, thread_index);
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        UNROLL
        for (int step = 0; step < 32; step += 8) {
            simdgroup_float8x8 left[TOKENS];
            UNROLL
            for (int t = 0; t < TOKENS; t++)
                if (t < token_matrices) simdgroup_load(left[t], x + ulong(token + t * 8) * COLS + k + step, COLS);
            UNROLL
            for (int r = 0; r < 4; r++) {
                if (r >= row_matrices) continue;
                if (T == BF16) {
                    simdgroup_bfloat8x8 right;
                    device const bfloat* from = (device const bfloat*)rows.weights;
                    simdgroup_load(right, from + ulong(rows.first + row + r * 8) * COLS + k + step, COLS, 0, true);
                    UNROLL
                    for (int t = 0; t < TOKENS; t++)
                        if (t < token_matrices) simdgroup_multiply_accumulate(sums[t][r], left[t], right, sums[t][r]);
                } else {
                    simdgroup_float8x8 right;
                    simdgroup_load(right, tile + (row + r * 8) * STRIDE + step, STRIDE, 0, true);
                    UNROLL
                    for (int t = 0; t < TOKENS; t++)
                        if (t < token_matrices) simdgroup_multiply_accumulate(sums[t][r], left[t], right, sums[t][r]);
                }
            }
        }
    }
    UNROLL
    for (int t = 0; t < TOKENS; t++)
        UNROLL
        for (int r = 0; r < 4; r++)
            if (t < token_matrices && r < row_matrices)
                simdgroup_store(sums[t][r], to + ulong(t) * 8 * shape.width + r * 8, shape.width);
}

kernel void project_many(device const uchar* a [[buffer(0)]], device const uchar* b [[buffer(1)]],
                         device const uchar* c [[buffer(2)]], device const float* x [[buffer(3)]],
                         device float* out [[buffer(4)]], constant Projection& shape [[buffer(5)]],
                         threadgroup float* tile [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                         uint thread_index [[thread_index_in_threadgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    Rows rows = locate(group.x, ROWS_TILE, a, b, c, shape);
    int y = group.y;
    switch (TYPE) {
        case BF16: return project_tile<BF16, 2>(rows, x, out, tile, shape, y * 32, thread_index, simdgroup);
        case Q8_0: return project_tile<Q8_0, 4>(rows, x, out, tile, shape, y * 64, thread_index, simdgroup);
        case Q4_1: return project_tile<Q4_1, 4>(rows, x, out, tile, shape, y * 64, thread_index, simdgroup);
        case Q4_0: return project_tile<Q4_0, 4>(rows, x, out, tile, shape, y * 64, thread_index, simdgroup);
    }
}
