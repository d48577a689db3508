// Between the QKV projection and attention, for few tokens: per-head RMSNorm of Q and K, rotary embedding, and the append to the cache
// (heads.cuh). Many tokens on Hopper: the projection does it itself.
//
// Floor: (heads + 16) x 128 x 4 bytes read and half of that written a token; latency. One warp a head.
// qkv is fp32 [tokens][heads + 16][128], in parts that are added here. Grid: (tokens, (heads + 16) / 8), 256 threads.
#include "heads.cuh"

extern "C" __global__ void __launch_bounds__(256) rope(const Parts qkv, const Heads h) {
    release();
    // The step and the norms' weights were there before this pass began.
    int token = blockIdx.x, head = blockIdx.y * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    bool live = token < h.step[TOKENS];
    int slot[1] = {live ? cache_slot(h.step, token) : 0};
    float2 low[1] = {}, high[1] = {}, weight[2];
    head_norm(h, head, lane, weight);
    depend();
    if (!live) return;
    float4 turn[1] = {reinterpret_cast<const float4*>(h.rotations + token * (HEAD / 2))[lane]};
    const float2* from = reinterpret_cast<const float2*>(qkv.at + (size_t(token) * (h.heads + 2 * KV_HEADS) + head) * HEAD);
#pragma unroll 4
    for (int k = 0; k < qkv.count; k++) {
        const float2* part = from + size_t(k) * (qkv.plane / 2);
        float2 a = part[lane], b = part[lane + 32];
        low[0] = make_float2(low[0].x + a.x, low[0].y + a.y);
        high[0] = make_float2(high[0].x + b.x, high[0].y + b.y);
    }
    place_heads<1>(h, head, token, token + 1, slot, lane, low, high, weight, turn);
}
