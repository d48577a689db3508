// What a draw is, and the order of candidates. The host sampler (engine::sampling) is the definition.
#pragma once

#include "common.cuh"

constexpr int PARTS = 32;    // of a logits row, for its statistics
constexpr int MOST_TOP = 64;  // alternatives of an answer

struct Stats {
    float largest, sum;
    int token, finite;
};

struct Best {
    float value;
    int token;
};

// Larger first, then lower id.
__device__ __forceinline__ Best better(Best a, Best b) {
    return b.value > a.value || (b.value == a.value && b.token < a.token) ? b : a;
}

__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1)
        best = better(best, {__shfl_xor_sync(0xffffffffu, best.value, mask),
                             __shfl_xor_sync(0xffffffffu, best.token, mask)});
    return best;
}

// The best of a block; every thread gets it. `scratch` holds one a warp.
__device__ __forceinline__ Best block_best(Best best, Best* scratch) {
    best = warp_best(best);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) scratch[warp] = best;
    __syncthreads();
    best = warp_best(lane < blockDim.x / 32 ? scratch[lane] : Best{-INFINITY, 1 << 30});
    __syncthreads();
    return best;
}

enum Want { LOGITS, SCORE, SAMPLE };

// One answer row's request, in the step buffer. Laid out by pack_row in rows.rs.
struct Draw {
    int want;          // Want
    int token;         // SCORE: the token to score
    int position;      // SAMPLE: counter of the random numbers
    int top;           // alternatives, at most MOST_TOP
    float scale;       // 1 / temperature; 0 takes the best
    int top_k;         // 0 keeps all
    float top_p;       // 1 keeps all
    float floor;       // ln(min_p)
    uint32_t seed[2];  // key of the random numbers
    int edits, edits_at;  // [edits] Edit
    int mask_at;       // bit set of the allowed tokens; -1 allows all
    float repetition, frequency, presence;
};

// A token whose logit changes before the draw.
struct Edit {
    int token;
    int seen;    // occurrences in the output; -1: neither in prompt nor output
    float bias;
    float raw;   // the logit before the change, kept here by `sample`
};

struct Answer {
    int finite, token;
    float logprob;
    int unused;
};
