// Between the QKV projection and attention: per-head RMSNorm of Q and K, rotary embedding, and the append to the cache.
//
// Floor: (heads + 16) x 128 x 4 bytes read and half of that written a token; latency. A simdgroup takes a head: a lane
// holds elements 2 l, 2 l + 1 and their partners 64 further, so a rotation never leaves its lane.
// qkv fp32 [tokens][heads + 16][128]; queries are rewritten in place. Grid: (tokens, (heads + 16) / 8), 256 threads.
#include "cache.h"

// To bf16, to nearest even. What it cannot hold saturates and a NaN becomes a number (the residual stream still has it),
// so that the cache is finite.
inline uint round_bf16(float x) {
    const float most = as_type<float>(0x7f7f0000);
    uint bits = as_type<uint>(fmin(fmax(x, -most), most));
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// To a signed byte, to nearest even.
inline uint round_byte(float x) { return uint(int(rint(x))) & 0xff; }

// Elements 2 l, 2 l + 1 and 64 further of a head row.
inline void append(device uchar* values, device float* scales, ulong row, float4 x, uint lane) {
    if (KV == KV_BF16) {
        device uint* to = (device uint*)values + row * (HEAD / 2) + lane;
        to[0] = round_bf16(x.x) | round_bf16(x.y) << 16;
        to[HEAD / 4] = round_bf16(x.z) | round_bf16(x.w) << 16;
        return;
    }
    const float most = 1e38f;
    for (int i = 0; i < 4; i++) x[i] = fmin(fmax(x[i], -most), most);
    float largest = simd_max(max(max(fabs(x.x), fabs(x.y)), max(fabs(x.z), fabs(x.w))));
    float scale = largest / 127.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    uint low = round_byte(x.x * inverse) | round_byte(x.y * inverse) << 8;
    uint high = round_byte(x.z * inverse) | round_byte(x.w * inverse) << 8;
    // Lanes write whole words: the even one of two takes the low elements of both, the odd one the high.
    uint other_low = simd_shuffle_xor(low, 1), other_high = simd_shuffle_xor(high, 1);
    device uint* to = (device uint*)(values + row * HEAD) + lane / 2;
    if (lane % 2 == 0) to[0] = low | other_low << 16;
    else to[HEAD / 8] = other_high | high << 16;
    if (lane == 0) scales[row] = scale;
}

kernel void rope(device float* qkv [[buffer(0)]], device const float* q_norm [[buffer(1)]],
                 device const float* k_norm [[buffer(2)]], device uchar* keys [[buffer(3)]],
                 device float* key_scales [[buffer(4)]], device uchar* values [[buffer(5)]],
                 device float* value_scales [[buffer(6)]], device const int* step [[buffer(7)]],
                 uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                 uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    int token = group.x, head = group.y * 8 + simdgroup;
    device float2* from = (device float2*)(qkv + ulong(token) * qkv_width() + head * HEAD);
    float2 low = from[lane], high = from[lane + 32];
    int position = step[step[POSITION_AT] + token];
    int block = step[step[step[TABLE_AT] + token] + position / BLOCK];
    if (head >= HEADS + KV_HEADS) {
        ulong row = cache_row(block, head - HEADS - KV_HEADS) + position % BLOCK;
        float4 value = {low.x, low.y, high.x, high.y};
        append(values, value_scales, row, value, lane);
        return;
    }
    float squares = simd_sum(low.x * low.x + low.y * low.y + high.x * high.x + high.y * high.y);
    float factor = rsqrt(squares / HEAD + EPSILON);
    device const float2* weight = (device const float2*)(head < HEADS ? q_norm : k_norm);
    low = low * factor * weight[lane];
    high = high * factor * weight[lane + 32];
    // Cosine and sine of this lane's two pairs.
    device const float4* rotations = (device const float4*)(step + step[ROTATION_AT]);
    float4 r = rotations[ulong(token) * 32 + lane];
    float4 turned = {low.x * r.x - high.x * r.y, low.y * r.z - high.y * r.w, high.x * r.x + low.x * r.y,
                     high.y * r.z + low.y * r.w};
    if (head < HEADS) {
        from[lane] = turned.xy;
        from[lane + 32] = turned.zw;
    } else {
        append(keys, key_scales, cache_row(block, head - HEADS) + position % BLOCK, turned, lane);
    }
}
