// What becomes of a projection's sums. One thread owns an output element, so the residual add needs no atomics.
#pragma once

#include "common.cuh"

enum Epilogue {
    STORE,     // out fp32 [tokens][rows] = y
    RESIDUAL,  // out fp32 [tokens][rows] += y * factor
    SWIGLU,    // weight rows alternate gate, up: out fp16 [tokens][rows / 2] = silu(gate) * up * SWIGLU_SCALE
};

// Two adjacent weight rows (n even) of one token.
template <Epilogue E>
__device__ __forceinline__ void finish(void* out, float factor, int token, int n, int rows, float y0, float y1) {
    if constexpr (E == SWIGLU) {
        static_cast<__half*>(out)[size_t(token) * (rows / 2) + n / 2] = __float2half_rn(silu(y0) * y1 * SWIGLU_SCALE);
    } else {
        float2* at = reinterpret_cast<float2*>(static_cast<float*>(out) + size_t(token) * rows + n);
        if constexpr (E == STORE) {
            *at = make_float2(y0, y1);
        } else {
            float2 x = *at;
            *at = make_float2(x.x + y0 * factor, x.y + y1 * factor);
        }
    }
}
