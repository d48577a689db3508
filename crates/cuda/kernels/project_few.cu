// Projection of up to 64 tokens: Y = X W^T, X fp16 [tokens][cols], W any type [rows][cols].
//
// Floor: the weights' bytes over the memory's bandwidth; each is read once for all tokens of a tile.
// One block takes 16 weight rows as the M side of mma m16n8k16, the tokens are N in tiles of 8. Weights go from
// global memory straight to fragments: the order of k within a dot product is free as long as both operands agree,
// so a thread's 16 bytes of a row serve as its fragment elements of consecutive instructions. Eight warps take
// every eighth step of k; their sums meet in shared memory in warp order. A token's sum depends on neither the
// number of tokens nor the tile it is in, so all of 1..64 tokens are one kernel class, and so is any number of
// tokens over blockIdx.y (--deterministic).
// Grid: (rows / 16, tokens / (8 * TILES)). rows % 16 = 0, cols % 128 = 0.
#include "epilogue.cuh"
#include "weights.cuh"

constexpr int WARPS = 8;
constexpr int AHEAD = 4;  // steps of k whose weights are in flight

template <Type T, int TILES, Epilogue E>
__device__ __forceinline__ void project(Weights w, const __half* x, void* out, float factor, int rows, int cols,
                                        const int* count) {
    constexpr int PER16 = Layout<T>::PER16;
    constexpr int PAIRS = PER16 / 2;
    __shared__ float partial[WARPS][TILES * 128];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int row = blockIdx.x * 16 + g;
    const uint8_t* low = w.quants + row * row_bytes<T>(cols) + t * 16;
    const uint8_t* high = low + 8 * row_bytes<T>(cols);
    size_t low_scale = size_t(row) * (cols / 32) + t * PER16 / 32, high_scale = low_scale + 8 * (cols / 32);
    int steps = cols / (4 * PER16);

    uint4 a[AHEAD][2];
    Scale s[AHEAD][2];
    auto fetch = [&](int first) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int step = first + i * WARPS;
            if (step < steps) {
                a[i][0] = load_once(low + size_t(step) * 64);
                a[i][1] = load_once(high + size_t(step) * 64);
                s[i][0] = load_scale<T>(w, low_scale + step * (PER16 / 8));
                s[i][1] = load_scale<T>(w, high_scale + step * (PER16 / 8));
            }
        }
    };
    fetch(warp);  // weights never change: they may be under way before the activations are there
    release();
    depend();

    int tokens = *count - blockIdx.y * (8 * TILES);
    if (tokens <= 0) return;
    x += size_t(blockIdx.y) * (8 * TILES) * cols;
    float sum[TILES][4] = {};
    for (int first = warp; first < steps; first += AHEAD * WARPS) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int step = first + i * WARPS;
            if (step >= steps) break;
            uint32_t lows[PAIRS], highs[PAIRS];
            expand16<T>(a[i][0], s[i][0], lows);
            expand16<T>(a[i][1], s[i][1], highs);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                int token = tile * 8 + g;
                const uint4* from =
                    reinterpret_cast<const uint4*>(x + size_t(token) * cols + (step * 4 + t) * PER16);
#pragma unroll
                for (int j = 0; j < PER16 / 8; j++) {
                    uint4 b = token < tokens ? from[j] : make_uint4(0, 0, 0, 0);
                    mma(sum[tile], lows[4 * j], highs[4 * j], lows[4 * j + 1], highs[4 * j + 1], b.x, b.y);
                    mma(sum[tile], lows[4 * j + 2], highs[4 * j + 2], lows[4 * j + 3], highs[4 * j + 3], b.z, b.w);
                }
            }
        }
        fetch(first + AHEAD * WARPS);
    }

    // Lane (g, t) holds rows g, g + 8 of tokens 2t, 2t + 1: keep them as [tile][token][row].
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int c = 0; c < 4; c++)
            partial[warp][tile * 128 + (2 * t + c % 2) * 16 + g + c / 2 * 8] = sum[tile][c];
    }
    __syncthreads();
    auto total = [&](int token, int r) {  // of two adjacent rows
        float2 y = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int k = 0; k < WARPS; k++) {
            float2 p = *reinterpret_cast<const float2*>(partial[k] + token * 16 + r);
            y = make_float2(y.x + p.x, y.y + p.y);
        }
        return y;
    };
    constexpr int PAIRS_A_TOKEN = E == SWIGLU ? 4 : 8;
    for (int i = threadIdx.x; i < TILES * 8 * PAIRS_A_TOKEN; i += WARPS * 32) {
        int token = i / PAIRS_A_TOKEN, r = i % PAIRS_A_TOKEN * 2;
        if (token >= tokens) break;
        int at = blockIdx.y * (8 * TILES) + token, n = blockIdx.x * 16 + r;
        float2 y = total(token, r);
        if constexpr (E == SWIGLU) finish_swiglu(out, at, n, rows, y, total(token, r + 8));
        else finish<E>(out, factor, at, n, rows, y.x, y.y);
    }
}

#define KERNEL(type, tiles, epilogue)                                                                            \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                     \
        project_few_##type##_##tiles##_##epilogue(Weights w, const __half* x, void* out, float factor, int rows, \
                                                  int cols, const int* count) {                                  \
        project<type, tiles, epilogue>(w, x, out, factor, rows, cols, count);                                    \
    }
#define TILES(type, epilogue) \
    KERNEL(type, 1, epilogue) KERNEL(type, 2, epilogue) KERNEL(type, 4, epilogue) KERNEL(type, 8, epilogue)
#define EPILOGUES(type) TILES(type, STORE) TILES(type, RESIDUAL) TILES(type, SWIGLU)
EPILOGUES(F16)
EPILOGUES(Q8_0)
EPILOGUES(Q4_0)
EPILOGUES(Q4_1)
