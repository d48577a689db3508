// What every kernel shares: the model's dimensions, the header of the step buffer, and sums over a threadgroup.
//
// Activations, sums and softmax are fp32: fp32 products of simdgroup matrices run at the rate of fp16 ones on Apple's
// GPUs but for the registers, and the logits then agree with the oracle's to 1e-6 (ARCHITECTURE.md). Weights and cache
// keep their files' types and are widened where they are used.
//
// Threads of every kernel: `group` the threadgroup, `thread` in it, `lane` of 32 in its `simdgroup`.
#pragma once

#include <metal_stdlib>
using namespace metal;

// Before loops over arrays of matrices or sums, which are registers only where every index is known.
#ifdef __METAL_VERSION__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL
#endif

// Set when a pipeline is made (src/kernels.rs, `Constants`).
constant int HIDDEN [[function_constant(0)]];  // width of the residual stream
constant int FFN [[function_constant(1)]];     // width of the feed-forward
constant int HEADS [[function_constant(2)]];   // query heads
constant int VOCAB [[function_constant(3)]];   // rows of the head
constant int KV [[function_constant(4)]];      // how keys and values are stored (cache.h)
constant int TYPE [[function_constant(5)]];    // how the weights are stored (weights.h)
constant int COLS [[function_constant(6)]];    // columns of the weights
constant int TILE [[function_constant(7)]];    // tokens that project_few reads the weights once for

constexpr constant int HEAD = 128;         // width of one attention head
constexpr constant int KV_HEADS = 8;       // key/value heads
constexpr constant int BLOCK = 32;         // positions of one KV block
constexpr constant int CHUNK = 4 * BLOCK;  // positions of one split of decode attention
constexpr constant float EPSILON = 1e-6f;

// Header of the step buffer: counts, then where each array begins in the same buffer (src/step.rs).
enum Step {
    TOKENS,       // tokens of the batch
    ROWS,         // answer rows
    TOKEN_AT,     // [tokens] id, or -1 - row for the token that this row of the last batch drew
    POSITION_AT,  // [tokens]
    ROTATION_AT,  // [tokens][64] cosine and sine, as floats
    TABLE_AT,     // [tokens] where the block table of the token's sequence begins
    ROW_AT,       // [rows] token of each row
    SPLIT_AT,     // [splits][4] first token, tokens, chunk, first partial (-1: the only chunk)
    MERGE_AT,     // [merges][4] token, first partial, stride of partials, chunks
    FLASH_AT,     // [flashes][2] first token, tokens
    COPY_AT,      // [copies][2] from, to
    DRAW_AT,      // [rows] where the row's Draw begins
};

// Elements of a token's queries, keys and values.
inline int qkv_width() { return (HEADS + 2 * KV_HEADS) * HEAD; }

// Sum over a threadgroup of at most 32 simdgroups; every thread gets it. `scratch` holds a float a simdgroup.
inline float group_sum(float value, threadgroup float* scratch, uint lane, uint simdgroup, uint simdgroups) {
    value = simd_sum(value);
    if (lane == 0) scratch[simdgroup] = value;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    value = simd_sum(lane < simdgroups ? scratch[lane] : 0.0f);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return value;
}
