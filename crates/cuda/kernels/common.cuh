// What every kernel shares: the step header, tensor-core and copy primitives, and reductions.
//
// Numbers: weights, activations that feed a tensor core, and the KV cache are fp16; the residual stream, sums
// and softmax statistics are fp32. fp16 keeps 11 significant bits where bf16 keeps 8, at the same tensor rate,
// so a projection's error is 1/64 of bf16's (as NMSE). bf16 weights convert exactly except below 2^-14, where
// the step is 2^-24; the one activation without a bound, the SwiGLU product, is stored times 2^-6.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

constexpr int HEAD = 128;      // width of one attention head
constexpr int KV_HEADS = 8;    // key/value heads
constexpr int BLOCK = 32;      // positions of one KV block
constexpr float EPSILON = 1e-6f;
constexpr float SWIGLU_SCALE = 1.0f / 64.0f;

// Header of the step buffer (int32): counts, then where each array begins in the same buffer.
enum Step {
    TOKENS,         // tokens of the batch
    ROWS,           // answer rows
    SPLITS,         // work items of split attention
    FLASHES,        // work items of prefill attention
    COPIES,         // KV blocks to duplicate
    TOKEN_AT,       // [tokens] id, or -1 - row for the token that this row of the last batch drew
    POSITION_AT,    // [tokens]
    TABLE_AT,       // [tokens] where the block table of the token's sequence begins
    ROW_AT,         // [rows] token of each row
    FLASH_AT,       // [flashes][2] first token, tokens
    COPY_AT,        // [copies][2] from, to
    DRAW_AT,        // [rows] where the row's Draw begins
    GROUP_AT,       // [groups] answer rows of each pass over the head
    ANSWERS = 14,   // two words: the address of the answers, in the host's memory
    HEADER = 16,    // behind it: [splits] Work (attend.cuh)
};

// Programmatic dependent launch: a kernel may start while its predecessor drains. `depend` waits until the
// predecessor's writes are visible; nothing mutable may be read or written before it.
__device__ __forceinline__ void depend() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the successor start; its own `depend` still waits for this grid's end.
__device__ __forceinline__ void release() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// 16 bytes that are read once: not kept in L1.
__device__ __forceinline__ uint4 load_once(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// D += A B for one 16 x 8 x 16 tile, fp16 operands, fp32 sums. With g = lane / 4 and t = lane % 4:
// a = A[g][2t..], A[g + 8][2t..], A[g][2t + 8..], A[g + 8][2t + 8..]; b = B[2t..][g], B[2t + 8..][g];
// d = D[g][2t..], D[g + 8][2t..].
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Four 8 x 8 tiles of fp16 from shared memory; lane i gives the row address of tile i / 8, row i % 8.
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// 16 bytes from global to shared memory, asynchronously; zeros where `valid` is false.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool valid = true) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;"); }

template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
    __half2 h = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&h);
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }

// Butterfly sum over the lanes of a warp: every lane gets the same bits.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) v += __shfl_xor_sync(0xffffffffu, v, mask);
    return v;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, mask));
    return v;
}

// Sum over a block of up to 32 warps, in one order; every thread gets it. `scratch` holds a float a warp.
__device__ __forceinline__ float block_sum(float v, float* scratch) {
    v = warp_sum(v);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) scratch[warp] = v;
    __syncthreads();
    v = lane < blockDim.x / 32 ? scratch[lane] : 0.0f;
    v = warp_sum(v);
    __syncthreads();
    return v;
}
