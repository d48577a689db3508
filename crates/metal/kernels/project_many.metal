// out = x W^T for many tokens, on the simdgroup matrices.
//
// Floor: operations. A threadgroup of four simdgroups makes a tile of 64 rows: two by two simdgroups, each 32 rows of half
// of the tokens. bf16 weights go from memory straight into matrices and take tiles of 32 tokens. Quantised ones are
// expanded once a tile of tokens into threadgroup memory, 32 columns at a time, so their tile is 64 tokens.
// Rows are multiples of 8 (src/kernels.rs sends what is left to project_few); matrices past the last row or token are
// skipped. x fp32 [tokens][COLS] and out fp32 [tokens][width] have room for whole matrices of tokens.
// Grid: (rows / 64, tokens / tile), 128 threads. Threadgroup memory: 64 x STRIDE floats for quantised weights.
#include "tile.h"

template <int T>
inline void project_tile(Rows rows, device const float* x, device float* out, threadgroup float* tile,
                         constant Projection& shape, int y, uint thread_index, uint simdgroup) {
    constexpr int TOKENS = T == BF16 ? 2 : 4;          // matrices of 8 a simdgroup
    int row = simdgroup % 2 * 32;                      // of the tile
    int token = (y * 2 + simdgroup / 2) * TOKENS * 8;
    int row_matrices = min(4, (rows.end - rows.first - row) / 8);
    int token_matrices = min(TOKENS, (shape.tokens - token + 7) / 8);
    device float* to = out + ulong(token) * shape.width + rows.at + rows.first + row;

    simdgroup_float8x8 sums[TOKENS][4];
    UNROLL
    for (int t = 0; t < TOKENS; t++)
        UNROLL
        for (int r = 0; r < 4; r++) {
            sums[t][r] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
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
    simdgroup_float8x8 one(1.0f);
    UNROLL
    for (int t = 0; t < TOKENS; t++)
        UNROLL
        for (int r = 0; r < 4; r++)
            if (t < token_matrices && r < row_matrices) {
                device float* at = to + ulong(t) * 8 * shape.width + r * 8;
                if (shape.residual) {
                    // Last, and not as the first summand: every product would be rounded to the residual's size.
                    simdgroup_float8x8 before;
                    simdgroup_load(before, at, shape.width);
                    simdgroup_multiply_accumulate(sums[t][r], one, before, sums[t][r]);
                }
                simdgroup_store(sums[t][r], at, shape.width);
            }
}

kernel void project_many(device const uchar* a [[buffer(0)]], device const uchar* b [[buffer(1)]],
                         device const uchar* c [[buffer(2)]], device const float* x [[buffer(3)]],
                         device float* out [[buffer(4)]], constant Projection& shape [[buffer(5)]],
                         threadgroup float* tile [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                         uint thread_index [[thread_index_in_threadgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    Rows rows = locate(group.x, ROWS_TILE, a, b, c, shape);
    WITH_TYPE(project_tile, rows, x, out, tile, shape, group.y, thread_index, simdgroup)
}
