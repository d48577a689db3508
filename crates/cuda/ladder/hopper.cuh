// What the Hopper kernels share: shared-memory barriers, bulk copies, tensor-core tiles, and the layouts.
//
// Weights, [N][K] in bf16, lie in *panels*: [N / 8][K / 8][8 rows][8 columns], so that every 8 x 8 tile is
// 128 contiguous bytes. ldmatrix and wgmma (without swizzle) read such tiles free of bank conflicts, and any
// run of a panel's columns is one contiguous bulk copy. The gate and up projections are one matrix of
// 2 * ffn rows, row 2j the gate and row 2j + 1 the up projection of channel j; Q, K and V are one matrix, in
// this order.
//
// The KV cache is [layer][block][8 heads][K, V][32 positions / 8][128 / 8][8 positions][8 channels]: the keys
// and the values of a head in a block are two panels of 8 KB, 16 KB together.

#pragma once

#include <cuda_bf16.h>
#include <cstdint>

namespace hopper {

using bf16 = __nv_bfloat16;

constexpr int HEAD = 128;       // head width
constexpr int KV_HEADS = 8;     // of the whole family
constexpr int BLOCK = 32;       // positions of a KV block
constexpr int KV_TILE = 16384;  // bytes of one head's keys and values in a block
constexpr float EPSILON = 1e-6f;

// What the matrix products do with a tile: write f32 rows, add to f32 rows (the residual), or write silu(gate) * up of the interleaved
// gate-up matrix as bf16 panels.
enum Epilogue { STORE, ADD, GATE_UP };

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- barriers in shared memory

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier, uint32_t count = 1) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier), "r"(parity) : "memory");
}

// Synchronises `threads` threads of the block on the named barrier `id`.
__device__ __forceinline__ void sync_named(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void arrive_named(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Orders this thread's ordinary writes to shared memory before later bulk copies that touch it.
__device__ __forceinline__ void fence_bulk() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- bulk copies

// A cache policy for bytes that are read once a step.
__device__ __forceinline__ uint64_t evict_first() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// And one for bytes that other blocks will read soon.
__device__ __forceinline__ uint64_t evict_last() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Starts copying `bytes` (a multiple of 16) from global to shared memory; `barrier` counts them in.
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                                          uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// Copies `bytes` (a multiple of 16) from shared to global memory.
__device__ __forceinline__ void bulk_store(void* to, const void* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}

// Waits until this thread's bulk stores have been written, or very nearly so: a relaxed operation that follows has
// been seen to overtake them.
__device__ __forceinline__ void bulk_store_wait() {
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
}

// Starts copying a box of panels, at 256-element column `column` and panel `panel`; to both blocks of the cluster if `BOTH`.
template <bool BOTH>
__device__ __forceinline__ void load_panels(uint32_t to, const void* map, int column, int panel, uint32_t barrier) {
    if constexpr (BOTH)
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
            "l"(map), "r"(0), "r"(column), "r"(panel), "r"(barrier), "h"(uint16_t(3))
            : "memory");
    else
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to), "l"(map),
                     "r"(0), "r"(column), "r"(panel), "r"(barrier)
                     : "memory");
}

// ---- words that blocks exchange through the L2 cache
//
// The lowest bit of a word tells whether it is the one awaited: whoever writes a vector anew turns that bit of every
// word over, whoever reads it reads again until all bits are as they will be. Neither needs a fence, a counter
// or an acknowledgement, and a float loses one bit of 24.

__device__ __forceinline__ float tag_word(float v, uint32_t tag) { return __uint_as_float((__float_as_uint(v) & ~1u) | tag); }

__device__ __forceinline__ bool tagged(float v, uint32_t tag) { return (__float_as_uint(v) & 1) == tag; }

__device__ __forceinline__ bool tagged(float2 v, uint32_t tag) { return tagged(v.x, tag) && tagged(v.y, tag); }

__device__ __forceinline__ bool tagged(float4 v, uint32_t tag) {
    uint32_t x = __float_as_uint(v.x), y = __float_as_uint(v.y), z = __float_as_uint(v.z), w = __float_as_uint(v.w);
    return (((x ^ tag) | (y ^ tag) | (z ^ tag) | (w ^ tag)) & 1) == 0;
}

__device__ __forceinline__ void load_posted(float& v, const float* p) {
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
}

__device__ __forceinline__ void load_posted(float2& v, const float* p) {
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
}

__device__ __forceinline__ void load_posted(float4& v, const float* p) {
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p)
                 : "memory");
}

// A count of arrivals, spread over four lines of the cache. It says when it is worth looking, no more: nothing orders
// it after the words.
constexpr int COUNT_WORDS = 4 * 32;

__device__ __forceinline__ void count(uint32_t* counter) {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter + blockIdx.x % 4 * 32) : "memory");
}

// Waits, as a warp, until `arrivals` have been counted.
__device__ __forceinline__ void await_count(const uint32_t* counter, uint32_t arrivals) {
    uint32_t n;
    do {
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(counter + threadIdx.x % 4 * 32) : "memory");
        n += __shfl_xor_sync(0xffffffffu, n, 1);
        n += __shfl_xor_sync(0xffffffffu, n, 2);
    } while (n < arrivals);
}

// ---- clusters

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}

// The address, in the cluster's window, of what lies at `address` in block `rank` of the cluster.
__device__ __forceinline__ uint32_t in_block(uint32_t address, uint32_t rank) {
    uint32_t r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
    return r;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Makes barrier_init visible to the cluster, before cluster_sync().
__device__ __forceinline__ void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// ---- tensor-core tiles

// Four 8 x 8 tiles; lane l gives the address of row l % 8 of tile l / 8.
__device__ __forceinline__ void load_tiles(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_tiles_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// c[16 x 8] += a[16 x 16] * b[16 x 8]; a0, a2 are rows 0-7 and a1, a3 rows 8-15.
__device__ __forceinline__ void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint32_t b0, uint32_t b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two floats as a pair of bf16, `x` in the low half.
__device__ __forceinline__ uint32_t pack(float x, float y) {
    __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<uint32_t&>(v);
}

// Splits two floats into bf16 pairs whose sum carries 16 bits of mantissa.
__device__ __forceinline__ void split(float x, float y, uint32_t& high, uint32_t& low) {
    high = pack(x, y);
    low = pack(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xffff0000u));
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float warp_sum(float v) {
    for (int m = 16; m > 0; m /= 2) v += __shfl_xor_sync(0xffffffffu, v, m);
    return v;
}

}  // namespace hopper
