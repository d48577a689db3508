// Between the QKV projection and attention, for few tokens: per-head RMSNorm of Q and K, rotary embedding, and the append to the cache
// (heads.cuh). On Hopper the projection of a batch, or of many tokens, does it itself.
//
// Floor: (heads + 16) x 128 x 4 bytes read and half of that written a token; latency. One warp a head.
// qkv is fp32 [tokens][heads + 16][128]. Grid: (tokens, (heads + 16) / 8), 256 threads.
#include "heads.cuh"

extern "C" __global__ void __launch_bounds__(256) rope(const float* qkv, const Heads h) {
    release();
    // The step and the norms' weights were there before this pass began.
    int token = blockIdx.x, head = blockIdx.y * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    bool live = token < h.step[TOKENS];
    int slot = live ? cache_slot(h.step, token) : 0;
    float2 weight[2];
    head_norm(h, head, lane, weight);
    depend();
    if (!live) return;
    float4 turn = reinterpret_cast<const float4*>(h.rotations + token * (HEAD / 2))[lane];
    const float2* from = reinterpret_cast<const float2*>(qkv + (size_t(token) * (h.heads + 2 * KV_HEADS) + head) * HEAD);
    place_head(h, head, token, slot, lane, from[lane], from[lane + 32], weight, turn);
}
