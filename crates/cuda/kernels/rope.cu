// Between the QKV projection and attention: per-head RMSNorm of Q and K, rotary embedding, and the append to the cache.
//
// Floor: (heads + 16) x 128 x 4 bytes read and half of that written a token; latency. One warp a head: a lane holds
// elements 2 l, 2 l + 1 and their partners 64 further, so a rotation never leaves its lane.
// qkv fp32 [tokens][heads + 16][128], q fp16 [tokens][heads][128]. Grid: (tokens, (heads + 16) / 8), 256 threads.
#include "cache.cuh"

// bf16 rounding, kept as fp16; what fp16 cannot hold saturates, so that a cache never holds an infinity.
__device__ __forceinline__ float as_bf16(float x) {
    return fminf(fmaxf(__bfloat162float(__float2bfloat16_rn(x)), -65504.0f), 65504.0f);
}

template <Kv KIND>
__device__ __forceinline__ void append(const Cache& cache, size_t row, int lane, float2 low, float2 high) {
    if constexpr (KIND == KV_BF16) {
        uint32_t* to = reinterpret_cast<uint32_t*>(cache.values) + row * (HEAD / 2) + lane;
        to[0] = pack(as_bf16(low.x), as_bf16(low.y));
        to[32] = pack(as_bf16(high.x), as_bf16(high.y));
    } else {
        float most = warp_max(fmaxf(fmaxf(fabsf(low.x), fabsf(low.y)), fmaxf(fabsf(high.x), fabsf(high.y))));
        float scale = most / 127.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        char2* to = reinterpret_cast<char2*>(cache.values) + row * (HEAD / 2) + lane;
        to[0] = make_char2(__float2int_rn(low.x * inverse), __float2int_rn(low.y * inverse));
        to[32] = make_char2(__float2int_rn(high.x * inverse), __float2int_rn(high.y * inverse));
        if (lane == 0) cache.scales[row] = scale;
    }
}

template <Kv KIND>
__device__ __forceinline__ void rope(const float* qkv, const float* q_norm, const float* k_norm,
                                     const float2* rotations, __half* q, Cache keys, Cache values, const int* step,
                                     int heads) {
    release();
    depend();
    int token = blockIdx.x, head = blockIdx.y * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (token >= step[TOKENS]) return;
    const float2* from = reinterpret_cast<const float2*>(qkv + (size_t(token) * (heads + 2 * KV_HEADS) + head) * HEAD);
    float2 low = from[lane], high = from[lane + 32];
    int position = step[step[POSITION_AT] + token];
    int block = step[step[step[TABLE_AT] + token] + position / BLOCK];
    if (head >= heads + KV_HEADS) {
        append<KIND>(values, cache_row(block, head - heads - KV_HEADS) + position % BLOCK, lane, low, high);
        return;
    }
    float squares = warp_sum(low.x * low.x + low.y * low.y + high.x * high.x + high.y * high.y);
    float factor = rsqrtf(squares / HEAD + EPSILON);
    const float2* weight = reinterpret_cast<const float2*>(head < heads ? q_norm : k_norm);
    float2 w0 = weight[lane], w1 = weight[lane + 32];
    low = make_float2(low.x * factor * w0.x, low.y * factor * w0.y);
    high = make_float2(high.x * factor * w1.x, high.y * factor * w1.y);
    float4 r = reinterpret_cast<const float4*>(rotations + token * (HEAD / 2))[lane];  // cos, sin of two pairs
    float2 a = make_float2(low.x * r.x - high.x * r.y, low.y * r.z - high.y * r.w);
    float2 b = make_float2(high.x * r.x + low.x * r.y, high.y * r.z + low.y * r.w);
    if (head < heads) {
        uint32_t* to = reinterpret_cast<uint32_t*>(q + (size_t(token) * heads + head) * HEAD) + lane;
        to[0] = pack(a.x, a.y);
        to[32] = pack(b.x, b.y);
    } else {
        append<KIND>(keys, cache_row(block, head - heads) + position % BLOCK, lane, a, b);
    }
}

#define KERNEL(kind)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256)                                                             \
        rope_##kind(const float* qkv, const float* q_norm, const float* k_norm, const float2* rotations, __half* q, \
                    Cache keys, Cache values, const int* step, int heads) {                                       \
        rope<KV_##kind>(qkv, q_norm, k_norm, rotations, q, keys, values, step, heads);                            \
    }
KERNEL(BF16)
KERNEL(Q8_0)
