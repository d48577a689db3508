// What the blocks of the decode kernel (decode.cuh) use to hand vectors to each other through the L2 cache, and to bring
// memory into theirs.
//
// The two lowest bits of an exchanged float tell whether it is the one awaited: they are 1 and 2 in turn from layer to
// layer, and 3 in the last one, so whatever a word held before, in this step or in one long ago, has another tag. Whoever
// reads a word reads again until the tag is right; neither a fence nor an acknowledgement is needed, and a float keeps
// 22 bits. The longest vectors go as pairs of fp16, half the words for all blocks to read, with a bit of the tag in the
// lowest bit of each. A count of arrivals says when it is worth looking, no more: nothing orders it after the words.
#pragma once

#include "hopper.cuh"

#if HOPPER

constexpr uint32_t TAG = 3;

__device__ __forceinline__ uint32_t tag_of(int layer, int layers) { return layer + 1 == layers ? 3 : 1 + (layer & 1); }

__device__ __forceinline__ float tag_word(float v, uint32_t tag) {
    return __uint_as_float((__float_as_uint(v) & ~TAG) | tag);
}

__device__ __forceinline__ uint32_t off_tag(float v, uint32_t tag) { return (__float_as_uint(v) ^ tag) & TAG; }
__device__ __forceinline__ bool tagged(float v, uint32_t tag) { return off_tag(v, tag) == 0; }
__device__ __forceinline__ bool tagged(float2 v, uint32_t tag) { return (off_tag(v.x, tag) | off_tag(v.y, tag)) == 0; }
__device__ __forceinline__ bool tagged(float4 v, uint32_t tag) {
    return (off_tag(v.x, tag) | off_tag(v.y, tag) | off_tag(v.z, tag) | off_tag(v.w, tag)) == 0;
}

// The nearer of the two fp16 around a value whose lowest bit is `bit`; what fp16 cannot hold saturates.
__device__ __forceinline__ uint32_t tag_half(float x, uint32_t bit) {
    x = fminf(fmaxf(x, -65504.0f), 65504.0f);
    const __half nearest = __float2half_rn(x);
    const uint32_t bits = __half_as_ushort(nearest);
    const bool larger = fabsf(x) > fabsf(__half2float(nearest)) || (bits & 0x7fff) == 0;
    return (bits & 1) == bit ? bits : larger ? bits + 1 : bits - 1;
}
__device__ __forceinline__ uint32_t tag_pair(float x, float y, uint32_t tag) {
    return tag_half(x, tag & 1) | tag_half(y, tag >> 1) << 16;
}
// Whether all pairs of four words are there.
__device__ __forceinline__ bool tagged_pairs(const uint4& v, uint32_t tag) {
    const uint32_t t = (tag & 1) | tag >> 1 << 16;
    return (((v.x ^ t) | (v.y ^ t) | (v.z ^ t) | (v.w ^ t)) & 0x00010001u) == 0;
}

__device__ __forceinline__ void post(float* p, float v, uint32_t tag) {
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(p), "f"(tag_word(v, tag)) : "memory");
}
__device__ __forceinline__ void post_pair(float* p, float x, float y, uint32_t tag) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(tag_pair(x, y, tag)) : "memory");
}

__device__ __forceinline__ void load_posted(float& v, const float* p) {
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
}
__device__ __forceinline__ void load_posted(float2& v, const float* p) {
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
}
__device__ __forceinline__ void load_posted_if(bool wanted, uint4& v, const float* p) {
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.u32 wanted, %5, 0;\n"
        "@wanted ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(p), "r"(uint32_t(wanted))
        : "memory");
}
__device__ __forceinline__ void load_posted_if(bool wanted, float4& v, const float* p) {
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.u32 wanted, %5, 0;\n"
        "@wanted ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w)
        : "l"(p), "r"(uint32_t(wanted))
        : "memory");
}

// A wait that nothing can end is a fault: it ends the kernel, by a write to nowhere, instead of hanging the device. (With
// `trap` the compiler keeps to the registers of the launch.)
struct Patience {
    uint32_t left = 1u << 22;

    __device__ __forceinline__ void spend() {
        if (--left == 0) asm volatile("st.global.u32 [%0], 0;" ::"l"(0ull) : "memory");
    }
};

__device__ __forceinline__ float await_word(const float* p, uint32_t tag) {
    Patience patience;
    float v;
    for (load_posted(v, p); !tagged(v, tag); load_posted(v, p)) patience.spend();
    return v;
}

// A counter is spread over four lines of the cache.
constexpr int COUNTER_WORDS = 4 * 32;

__device__ __forceinline__ void count(uint32_t* counter) {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter + blockIdx.x % 4 * 32) : "memory");
}

// Waits, as a warp, until all but `early` of `arrivals` have been counted: the last words arrive while the others are read.
__device__ __forceinline__ void await_count(const uint32_t* counter, uint32_t arrivals, uint32_t early) {
    Patience patience;
    for (;;) {
        uint32_t n;
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(counter + threadIdx.x % 4 * 32) : "memory");
        n += __shfl_xor_sync(0xffffffffu, n, 1);
        n += __shfl_xor_sync(0xffffffffu, n, 2);
        if (n + early >= arrivals) return;
        patience.spend();
    }
}

// Orders this thread's ordinary writes to shared memory before later bulk copies that touch it.
__device__ __forceinline__ void fence_bulk() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A policy for bytes that are read once.
__device__ __forceinline__ uint64_t evict_first() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// What follows is done by one thread of a warp that is together.
__device__ __forceinline__ void expect(uint32_t barrier, uint32_t bytes) {
    asm volatile(
        "{\n"
        ".reg .pred one;\n"
        "elect.sync _|one, 0xffffffff;\n"
        "@one mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;\n"
        "}" ::"r"(barrier),
        "r"(bytes)
        : "memory");
}

// A panel's lines: [128 bytes][rows][groups][layers]; or 32 head rows of the cache: [128 bytes][rows][1 or 2][keys, values of layers].
__device__ __forceinline__ void copy_lines(uint32_t to, const CUtensorMap* map, int row, int group, int layer, uint32_t barrier,
                                           uint64_t policy) {
    asm volatile(
        "{\n"
        ".reg .pred one;\n"
        "elect.sync _|one, 0xffffffff;\n"
        "@one cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], "
        "[%6], %7;\n"
        "}" ::"r"(to),
        "l"(map), "r"(0), "r"(row), "r"(group), "r"(layer), "r"(barrier), "l"(policy)
        : "memory");
}

// Their scales: [words][rows][layers]; or [head rows][keys, values of layers].
__device__ __forceinline__ void copy_scales(uint32_t to, const CUtensorMap* map, int word, int row, int layer, uint32_t barrier,
                                            uint64_t policy) {
    asm volatile(
        "{\n"
        ".reg .pred one;\n"
        "elect.sync _|one, 0xffffffff;\n"
        "@one cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], "
        "%6;\n"
        "}" ::"r"(to),
        "l"(map), "r"(word), "r"(row), "r"(layer), "r"(barrier), "l"(policy)
        : "memory");
}

// Named barriers of the block.
__device__ __forceinline__ void sync_named(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_named(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#endif
