// out = x W^T for many tokens, by Metal 4's operation on tensors (matmul2d of the Metal Performance Primitives).
//
// Floor: operations. A threadgroup of four simdgroups makes a tile of 64 tokens and 64 rows. bf16 weights are multiplied where
// they lie, in one operation over all columns; others are expanded into threadgroup memory, 32 columns at a time, and sums
// stay with the threads, in a cooperative tensor whose layout is the operation's own affair.
// The operation reads nothing outside of its operands' extents, which are (columns, rows): innermost first. So rows and
// tokens are as many as there are. x fp32 [tokens][COLS], out fp32 [tokens][width].
// Grid: (rows / 64, tokens / 64), 128 threads. Threadgroup memory: 64 x STRIDE floats for expanded weights.
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

#include "tile.h"

using namespace mpp::tensor_ops;

constexpr constant int TOKENS_TILE = 64;

typedef dextents<int, 2> Extents;
typedef tensor<device float, Extents, tensor_inline> Floats;
typedef tensor<device bfloat, Extents, tensor_inline> Bfloats;
typedef tensor<threadgroup float, Extents, tensor_inline> Tile;
typedef execution_simdgroups<4> Everybody;

// Writes the sums of the tile that begins at `token` and the first of the rows.
template <typename Sums>
inline void store_sums(thread Sums& sums, Rows rows, device float* out, constant Projection& shape, int token) {
    UNROLL
    for (int i = 0; i < sums.get_capacity(); i++) {
        if (!sums.is_valid_element(i)) continue;
        auto at = sums.get_multidimensional_index(i);
        int row = rows.first + at[0], t = token + at[1];
        if (row >= rows.end || t >= shape.tokens) continue;
        device float* to = out + ulong(t) * shape.width + rows.at + row;
        *to = shape.residual ? *to + sums[i] : sums[i];
    }
}

template <int T>
inline void project_tile(Rows rows, device const float* x, device float* out, threadgroup float* tile,
                         constant Projection& shape, int y, uint thread_index) {
    int token = y * TOKENS_TILE;
    Floats inputs((device float*)x, Extents(COLS, shape.tokens));
    if (T == BF16) {
        constexpr auto whole = matmul2d_descriptor(TOKENS_TILE, ROWS_TILE, static_cast<int>(dynamic_extent), false, true);
        matmul2d<whole, Everybody> product;
        Bfloats weights((device bfloat*)rows.weights, Extents(COLS, rows.end));
        auto left = inputs.slice(0, token);
        auto right = weights.slice(0, rows.first);
        auto sums = product.get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
        product.run(left, right, sums);
        return store_sums(sums, rows, out, shape, token);
    }
    constexpr auto part = matmul2d_descriptor(TOKENS_TILE, ROWS_TILE, COLS_TILE, false, true, false,
                                              matmul2d_descriptor::mode::multiply_accumulate);
    matmul2d<part, Everybody> product;
    Tile right(tile, Extents(COLS_TILE, ROWS_TILE), array<int, 2>({1, STRIDE}));
    auto sums = product.get_destination_cooperative_tensor<Floats, Tile, float>();
    UNROLL
    for (int i = 0; i < sums.get_capacity(); i++)
        if (sums.is_valid_element(i)) sums[i] = 0.0f;
    for (int k = 0; k < COLS; k += COLS_TILE) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        expand_tile<T>(rows, k, tile, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        auto left = inputs.slice(k, token);
        product.run(left, right, sums);
    }
    store_sums(sums, rows, out, shape, token);
}

kernel void project_tensor(device const uchar* a [[buffer(0)]], device const uchar* b [[buffer(1)]],
                           device const uchar* c [[buffer(2)]], device const float* x [[buffer(3)]],
                           device float* out [[buffer(4)]], constant Projection& shape [[buffer(5)]],
                           threadgroup float* tile [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                           uint thread_index [[thread_index_in_threadgroup]]) {
    Rows rows = locate(group.x, ROWS_TILE, a, b, c, shape);
    WITH_TYPE(project_tile, rows, x, out, tile, shape, group.y, thread_index)
}
