// RMSNorm spread over its neighbours in a batch: who ends a residual vector leaves it times the norm's weight and a power of two, in
// fp16, and sums of squares of its parts; who multiplies it by a matrix applies what is missing to the products.
//
// The power brings the vector's root mean square near 2^-4, as far as the vector before it tells: fp16 reaches from 2^-24 to 2^16, so
// that a vector may grow by 2^14 over its maximum's 2^6 from one to the next.
#pragma once

#include "common.cuh"

constexpr int MOST_TOKENS = 128;  // of a batch

// What the products of X are multiplied with is made of.
struct Normed {
    const float* squares;  // [parts][MOST_TOKENS]
    const float* powers;   // [tokens], in X
    float* next;           // [tokens]: the powers of the vectors after X
    int parts;             // of the squares
};

// A residual vector that grows.
struct Residual {
    float* x;             // [tokens][rows]
    __half* scaled;       // [tokens][rows]: x times weight times power
    const float* weight;  // [rows]
    float* powers;        // [tokens]
    float* squares;       // [parts][MOST_TOKENS]
    float factor;         // of what is added to x
};

// What fp16 cannot hold saturates.
__device__ __forceinline__ __half as_half(float x) { return __float2half_rn(fminf(fmaxf(x, -65504.0f), 65504.0f)); }

// The power for a vector like one of this mean square, which is not below EPSILON.
__device__ __forceinline__ float power_for(float mean) {
    int exponent = int(__float_as_uint(mean) >> 23) - 127;
    return __uint_as_float(uint32_t(127 - 4 - (exponent >> 1)) << 23);
}

// factors[token] by `threads` threads in turns, FLIGHT loads at once; `lead` also leaves the powers of the next vectors.
template <int FLIGHT>
__device__ __forceinline__ void norm_factors(const Normed& n, int cols, int tokens, int thread, int threads, float* factors, bool lead) {
    for (int token = thread; token < tokens; token += threads) {
        float total = 0.0f, power = n.powers[token];
        for (int first = 0; first < n.parts; first += FLIGHT) {
            float part[FLIGHT];
#pragma unroll
            for (int i = 0; i < FLIGHT; i++) part[i] = first + i < n.parts ? n.squares[(first + i) * MOST_TOKENS + token] : 0.0f;
#pragma unroll
            for (int i = 0; i < FLIGHT; i++) total += part[i];
        }
        float mean = total / cols + EPSILON;
        factors[token] = rsqrtf(mean) / power;
        if (lead) n.next[token] = power_for(mean);
    }
}
