// The start of a step: embedding rows to the residual stream, and each token's rotation angles.
//
// Floor: hidden x 4 bytes written a token; latency. A token is an id or a row that the last batch drew, whose id never
// left the device. Angles are position x theta^(-2 i / 128) in fp64, since fp32 is off by 1e-3 at position 32,768.
// Residual x fp32 [tokens][hidden]; rotations (cos, sin) fp32 [tokens][64]. Grid: (tokens), 256 threads.
#include "normed.cuh"
#include "weights.cuh"

template <Type T>
__device__ __forceinline__ void embed(Weights table, const double* frequencies, const int* drawn, const Residual& r, int parts,
                                      float2* rotations, const int* step, int hidden) {
    release();
    depend();
    int token = blockIdx.x;
    if (token >= step[TOKENS]) return;
    int id = step[step[TOKEN_AT] + token];
    if (id < 0) id = drawn[-1 - id];
    constexpr int PER16 = Layout<T>::PER16;
    __shared__ float scratch[32];
    float squares = 0.0f;
    const uint4* row = reinterpret_cast<const uint4*>(table.quants + id * row_bytes<T>(hidden));
    for (int i = threadIdx.x; i < hidden / PER16; i += blockDim.x) {
        uint32_t pairs[PER16 / 2];
        expand16<T>(row[i], load_scale<T>(table, size_t(id) * (hidden / 32) + i * PER16 / 32), pairs);
        float2* to = reinterpret_cast<float2*>(r.x + size_t(token) * hidden + i * PER16);
#pragma unroll
        for (int j = 0; j < PER16 / 2; j++) {
            to[j] = __half22float2(halves(pairs[j]));
            squares += to[j].x * to[j].x + to[j].y * to[j].y;
        }
    }
    if (r.scaled != nullptr) {
        squares = block_sum(squares, scratch);
        float power = power_for(squares / hidden + EPSILON);
        if (threadIdx.x == 0) r.powers[token] = power;
        if (threadIdx.x < parts) r.squares[threadIdx.x * MOST_TOKENS + token] = threadIdx.x == 0 ? squares : 0.0f;
        for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
            size_t at = size_t(token) * hidden + i;
            r.scaled[at] = as_half(r.x[at] * r.weight[i] * power);
        }
    }
    if (threadIdx.x < HEAD / 2) {
        double sine, cosine;
        sincos(step[step[POSITION_AT] + token] * frequencies[threadIdx.x], &sine, &cosine);
        rotations[token * (HEAD / 2) + threadIdx.x] = make_float2(float(cosine), float(sine));
    }
}

#define KERNEL(type)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                            \
        embed_##type(Weights table, const double* frequencies, const int* drawn, const Residual r, int parts,    \
                     float2* rotations, const int* step, int hidden) {                                           \
        embed<type>(table, frequencies, drawn, r, parts, rotations, step, hidden);                                      \
    }
KERNEL(F16)
KERNEL(Q8_0)
KERNEL(Q4_0)
KERNEL(Q4_1)
