// out = x W^T for few tokens: the weights stream by once for TILE of them.
//
// Floor: the weights' bytes over the memory's bandwidth. A simdgroup takes four rows; a lane takes 8 neighbouring columns
// of each, 256 columns a turn, so that a row of bf16 is read in whole 512-byte pieces. A sum is the same bits for any
// TILE: 8 products, turn by turn, then the simdgroup's tree.
// x fp32 [tokens][COLS], out fp32 [tokens][width]. Grid: (rows / 16, tokens / TILE), 128 threads.
#include "projection.h"

constexpr constant int ROWS_EACH = 4;  // rows of a simdgroup

template <int T, int TOKENS>
inline void project_rows(Rows rows, device const float* x, device float* out, constant Projection& shape, int token,
                         uint lane, uint simdgroup) {
    int first = rows.first + simdgroup * ROWS_EACH;
    float4 sums[TOKENS];  // an element a row
    UNROLL
    for (int t = 0; t < TOKENS; t++) sums[t] = 0.0f;
    for (int k = lane * 8; k < COLS; k += 256) {
        float w[ROWS_EACH][8];
        UNROLL
        for (int r = 0; r < ROWS_EACH; r++) {
            ulong row = min(first + r, rows.end - 1);
            expand8<T>(rows.weights + row * row_bytes<T>(COLS), k, w[r]);
        }
        UNROLL
        for (int t = 0; t < TOKENS; t++) {
            // Past the last token the last one is computed again, and not stored.
            device const float4* from = (device const float4*)(x + ulong(min(token + t, shape.tokens - 1)) * COLS + k);
            float4 low = from[0], high = from[1];
            UNROLL
            for (int r = 0; r < ROWS_EACH; r++)
                UNROLL
                for (int i = 0; i < 4; i++) {
                    sums[t][r] = fma(w[r][i], low[i], sums[t][r]);
                    sums[t][r] = fma(w[r][i + 4], high[i], sums[t][r]);
                }
        }
    }
    UNROLL
    for (int t = 0; t < TOKENS; t++) {
        if (token + t >= shape.tokens) continue;
        float4 sum = simd_sum(sums[t]);
        int row = first + lane;
        if (lane >= ROWS_EACH || row >= rows.end) continue;
        device float* to = out + ulong(token + t) * shape.width + rows.at + row;
        *to = shape.residual ? *to + sum[lane] : sum[lane];
    }
}

template <int T>
inline void project_tokens(Rows rows, device const float* x, device float* out, constant Projection& shape, int token,
                           uint lane, uint simdgroup) {
    switch (TILE) {
        case 1: return project_rows<T, 1>(rows, x, out, shape, token, lane, simdgroup);
        case 2: return project_rows<T, 2>(rows, x, out, shape, token, lane, simdgroup);
        case 4: return project_rows<T, 4>(rows, x, out, shape, token, lane, simdgroup);
        case 8: return project_rows<T, 8>(rows, x, out, shape, token, lane, simdgroup);
    }
}

kernel void project_few(device const uchar* a [[buffer(0)]], device const uchar* b [[buffer(1)]],
                        device const uchar* c [[buffer(2)]], device const float* x [[buffer(3)]],
                        device float* out [[buffer(4)]], constant Projection& shape [[buffer(5)]],
                        uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    Rows rows = locate(group.x, 4 * ROWS_EACH, a, b, c, shape);
    int token = group.y * TILE;
    WITH_TYPE(project_tokens, rows, x, out, shape, token, lane, simdgroup)
}
