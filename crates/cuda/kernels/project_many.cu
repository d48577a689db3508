// Projection of many tokens: Y = X W^T, X fp16 [tokens][cols], W any type [rows][cols].
//
// Floor: 2 tokens rows cols operations over the tensor cores' rate through mma.sync.
// One block computes 128 tokens x 128 weight rows, eight warps 64 x 32 each, over a ring of four stages of 32
// columns in shared memory. Activations (and fp16 weights) arrive by cp.async; quantised weights pass through
// registers, where they become fp16, one stage ahead. k runs upwards in steps of 16 in every warp, so a token's
// sum does not depend on its batch mates. Where a matrix has too few tiles to fill the device, its columns are
// split over blockIdx.z by a rule of the matrix alone; the last block of a tile adds the parts in order of z.
// Grid: (tokens / 128, rows / 128, splits). rows % 128 = 0, cols % 32 = 0.
#include "epilogue.cuh"
#include "weights.cuh"

constexpr int TILE = 128;    // tokens, and weight rows, of a block
constexpr int DEPTH = 32;    // columns of a stage
constexpr int STAGES = 4;
constexpr int OPERAND = TILE * DEPTH * 2;  // bytes of one operand of a stage

// Byte offset of 16-byte piece c (0..3) of row r: pieces move so that eight rows of one column hit all banks.
__device__ __forceinline__ uint32_t place(int r, int c) { return r * (DEPTH * 2) + ((c ^ (r >> 1 & 3)) << 4); }

template <Type T, Epilogue E>
__device__ __forceinline__ void project(Weights w, const __half* x, void* out, float factor, int rows, int cols,
                                        const int* count, float* parts, unsigned* arrivals) {
    extern __shared__ __align__(128) uint8_t ring[];
    int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    release();
    depend();
    int token0 = blockIdx.x * TILE, row0 = blockIdx.y * TILE;
    if (token0 >= *count) return;
    int stages = cols / DEPTH, splits = gridDim.z;
    int begin = stages * blockIdx.z / splits, end = stages * (blockIdx.z + 1) / splits;

    // Two threads a row and operand; each moves two 16-byte pieces.
    int r = tid / 2, c = tid % 2 * 2;
    bool valid = token0 + r < *count;
    const __half* from_x = x + size_t(valid ? token0 + r : token0) * cols + c * 8;
    const uint8_t* from_w = w.quants + size_t(row0 + r) * row_bytes<T>(cols) + tid % 2 * row_bytes<T>(16);
    size_t scale_row = size_t(row0 + r) * (cols / 32);
    uint32_t base = shared_address(ring);

    auto copy = [&](int stage) {  // what needs no conversion
        uint32_t to = base + stage % STAGES * (2 * OPERAND);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            copy_async(to + place(r, c + i), from_x + size_t(stage) * DEPTH + i * 8, valid);
            if constexpr (T == F16) copy_async(to + OPERAND + place(r, c + i), from_w + size_t(stage) * 64 + i * 16);
        }
    };
    uint32_t quants[4];
    Scale scale;
    auto load = [&](int stage) {  // 16 quantised weights to registers
        if constexpr (T == Q8_0) {
            uint4 v = *reinterpret_cast<const uint4*>(from_w + size_t(stage) * 32);
            quants[0] = v.x, quants[1] = v.y, quants[2] = v.z, quants[3] = v.w;
        } else if constexpr (T != F16) {
            uint2 v = *reinterpret_cast<const uint2*>(from_w + size_t(stage) * 16);
            quants[0] = v.x, quants[1] = v.y;
        }
        scale = load_scale<T>(w, scale_row + stage);
    };
    auto convert = [&](int stage) {  // and from there to the stage
        if constexpr (T != F16) {
            constexpr int PAIRS = T == Q8_0 ? 2 : 4;
            uint32_t pairs[8];
#pragma unroll
            for (int i = 0; i < 8 / PAIRS; i++) expand<T>(quants[i], scale, pairs + i * PAIRS);
            uint8_t* to = ring + stage % STAGES * (2 * OPERAND) + OPERAND;
            *reinterpret_cast<uint4*>(to + place(r, c)) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            *reinterpret_cast<uint4*>(to + place(r, c + 1)) = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
        }
    };

#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (begin + i < end) {
            copy(begin + i);
            if constexpr (T != F16) load(begin + i), convert(begin + i);
        }
        copy_commit();
    }

    int warp_token = warp / 4 * 64, warp_row = warp % 4 * 32;
    // Where this lane's ldmatrix rows begin; 16 rows further on the pieces lie alike, and k = 1 flips bit 5.
    uint32_t from_a = place(warp_token + lane % 16, lane / 16);
    uint32_t from_b = OPERAND + place(warp_row + lane / 16 * 8 + lane % 8, lane / 8 % 2);
    float sum[4][4][4] = {};
    for (int stage = begin; stage < end; stage++) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        int next = stage + STAGES - 1;
        if (next < end) {
            copy(next);
            if constexpr (T != F16) load(next);
        }
        copy_commit();
        uint32_t at = base + stage % STAGES * (2 * OPERAND);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            uint32_t a[4], b[2][4];
#pragma unroll
            for (int j = 0; j < 2; j++)
                ldmatrix(b[j], (at + from_b + j * 16 * DEPTH * 2) ^ (k << 5));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                ldmatrix(a, (at + from_a + i * 16 * DEPTH * 2) ^ (k << 5));
#pragma unroll
                for (int j = 0; j < 4; j++)
                    mma(sum[i][j], a[0], a[1], a[2], a[3], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
            }
        }
        if constexpr (T != F16) {
            if (next < end) convert(next);
        }
    }

    // Calls f(token, row, value of row, value of row + 1) for all that this thread holds.
    int tokens = *count;
    auto each = [&](auto f) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    int token = token0 + warp_token + i * 16 + h * 8 + lane / 4;
                    if (token < tokens)
                        f(token, row0 + warp_row + j * 8 + lane % 4 * 2, sum[i][j][2 * h], sum[i][j][2 * h + 1]);
                }
            }
        }
    };
    if (splits > 1) {
        size_t plane = size_t(tokens) * rows;
        each([&](int token, int row, float& y0, float& y1) {
            float* at = parts + blockIdx.z * plane + size_t(token) * rows + row;
            __stcg(reinterpret_cast<float2*>(at), make_float2(y0, y1));
        });
        __shared__ bool last;
        __threadfence();
        __syncthreads();
        if (tid == 0) {
            unsigned* counter = arrivals + blockIdx.x * gridDim.y + blockIdx.y;
            last = atomicAdd(counter, 1) == splits - 1;
            if (last) *counter = 0;  // for the next launch
        }
        __syncthreads();
        if (!last) return;
        __threadfence();
        each([&](int token, int row, float& y0, float& y1) {
            y0 = y1 = 0.0f;
            for (int z = 0; z < splits; z++) {
                const float* at = parts + z * plane + size_t(token) * rows + row;
                float2 p = __ldcg(reinterpret_cast<const float2*>(at));
                y0 += p.x, y1 += p.y;
            }
        });
    }
    if constexpr (E == SWIGLU) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    int token = token0 + warp_token + i * 16 + h * 8 + lane / 4;
                    if (token < tokens)
                        finish_swiglu(out, token, row0 + warp_row + j * 8 + lane % 4 * 2, rows,
                                      make_float2(sum[i][j][2 * h], sum[i][j][2 * h + 1]),
                                      make_float2(sum[i][j + 1][2 * h], sum[i][j + 1][2 * h + 1]));
                }
            }
        }
    } else {
        each([&](int token, int row, float y0, float y1) { finish<E>(out, factor, token, row, rows, y0, y1); });
    }
}

#define KERNEL(type, epilogue)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                        \
        project_many_##type##_##epilogue(Weights w, const __half* x, void* out, float factor, int rows,         \
                                         int cols, const int* count, float* parts, unsigned* arrivals) {        \
        project<type, epilogue>(w, x, out, factor, rows, cols, count, parts, arrivals);                         \
    }
#define EPILOGUES(type) KERNEL(type, STORE) KERNEL(type, RESIDUAL) KERNEL(type, SWIGLU)
EPILOGUES(F16)
EPILOGUES(Q8_0)
EPILOGUES(Q4_0)
EPILOGUES(Q4_1)
