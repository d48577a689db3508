// What a consumer warp of the decode kernel (decode.cuh) carries through the phases, and how warps hand on what they have.
#pragma once

#include "decode_plan.cuh"

#if HOPPER

// SwiGLU products are posted times this, so that fp16 holds up to a million.
constexpr float PRODUCT_SCALE = 1.0f / 16.0f;
constexpr int AT_ONCE = 5;  // groups of four columns that a lane waits for together: as many as the widest hidden vector has

// What is computed from this is computed where it is used: kept in registers through all phases, as the compiler would,
// such addresses push out what the products hold there.
__device__ __forceinline__ int here(int lane) {
    asm volatile("" : "+r"(lane));
    return lane;
}

// What a consumer warp carries through the phases.
struct Consumer {
    Ring ring;
    int warp, lane;
    uint8_t* vector;          // the phase's input, a region a warp
    float* sums;              // [CONSUMERS][sum_rows]
    int sum_rows;
    float* squares;           // [CONSUMERS]
    const float2* rotations;  // [64]
    uint32_t early;           // arrivals that nobody waits for, unless they are more than half

    __device__ void sync() const { sync_named(1, CONSUMERS * 32); }

    // Waits until `arrivals` warps have posted their words, or very nearly so.
    __device__ void await(const uint32_t* counter, uint32_t arrivals) const {
        if (warp == CONSUMERS - 1) await_count(counter, arrivals, min(early, arrivals / 2));
        sync();
    }

    // A row's sum over the warps.
    __device__ float row_sum(int row) const {
        float s = 0;
#pragma unroll
        for (int w = 0; w < CONSUMERS; w++) s += sums[w * sum_rows + row];
        return s;
    }

    // The sum of squares of the last vector that was normed.
    __device__ float sum_of_squares() const {
        float s = 0;
#pragma unroll
        for (int w = 0; w < CONSUMERS; w++) s += squares[w];
        return s;
    }

    // Adds the lanes' squares of the vector that was normed; nobody waits for the sum before the phase's end.
    __device__ void share_squares(float mine) const {
        mine = warp_sum(mine);
        if (lane == 0) squares[warp] = mine;
    }

    // Posts `outputs` values, 32 a warp, as floats or as PAIRS of fp16; the other warps go on. They cannot overtake, since
    // the next phase's input depends on what is posted.
    template <bool PAIRS = false, class Value>
    __device__ void publish(int outputs, float* to, uint32_t tag, uint32_t* counter, Value value) const {
        if (outputs == 0) return;
        if (warp * 32 >= outputs) {
            arrive_named(2, CONSUMERS * 32);
            return;
        }
        sync_named(2, CONSUMERS * 32);
        const int i = warp * 32 + lane;
        const float v = i < outputs ? value(i) : 0;
        if constexpr (PAIRS) {
            const float next = __shfl_down_sync(0xffffffffu, v, 1);
            if (i < outputs && lane % 2 == 0) post_pair(to + i / 2, v, next, tag);
        } else {
            if (i < outputs) post(to + i, v, tag);
        }
        __syncwarp();
        if (lane == 0) count(counter);
    }
};

// Where a phase's vector comes from.
struct Source {
    const float* posted;
    uint32_t tag;
    const uint32_t* counter;
    uint32_t arrivals;
};

__device__ __forceinline__ void load_shared(uint32_t& a, uint32_t at) {
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(a) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_shared(uint32_t& a, uint32_t& b, uint32_t at) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_shared(uint32_t (&a)[4], uint32_t at) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t at, uint32_t a) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(a) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t at, uint32_t a, uint32_t b) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}

#endif
