// What becomes of a projection's sums. One thread owns an output element, so the residual add needs no atomics.
#pragma once

#include "common.cuh"

enum Epilogue {
    STORE,     // out fp32 [tokens][rows] = y
    RESIDUAL,  // out fp32 [tokens][rows] += y * factor
    SWIGLU,    // weight rows are 8 of gate, 8 of up in turns: out fp16 [tokens][rows / 2] = silu(gate) * up * SWIGLU_SCALE
};

// Two adjacent weight rows of one token.
template <Epilogue E>
__device__ __forceinline__ void finish(void* out, float factor, int token, int row, int rows, float y0, float y1) {
    float2* at = reinterpret_cast<float2*>(static_cast<float*>(out) + size_t(token) * rows + row);
    if constexpr (E == STORE) {
        *at = make_float2(y0, y1);
    } else {
        float2 x = *at;
        *at = make_float2(x.x + y0 * factor, x.y + y1 * factor);
    }
}

__device__ __forceinline__ float swiglu(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up * SWIGLU_SCALE; }

// Two adjacent gate rows, `row` among all weight rows, and the up rows 8 further.
__device__ __forceinline__ void finish_swiglu(void* out, int token, int row, int rows, float2 gate, float2 up) {
    __half* at = static_cast<__half*>(out) + size_t(token) * (rows / 2) + row / 16 * 8 + row % 8;
    *reinterpret_cast<uint32_t*>(at) = pack(swiglu(gate.x, up.x), swiglu(gate.y, up.y));
}
