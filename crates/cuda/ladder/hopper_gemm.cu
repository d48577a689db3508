// C[M][N] = X[M][K] W[N][K]^T for prefill and large batches: bf16 operands in panels (hopper.cuh), f32 sums.
//
// Floor: 2 M N K operations at the rate of wgmma, about 800 TFLOP/s on random data.
//
// A cluster of two blocks computes two tiles of 128 x BN that lie below each other. Each block's producer warp copies its
// own 128 rows of X and half of the BN rows of W, the latter to both blocks, into a ring of stages of 32 or 64 columns,
// one tensor copy each. Panels need no swizzle to be free of bank conflicts for wgmma. Two warpgroups of 64 rows multiply. The blocks are persistent; the next tile's copies run during a tile's epilogue.
//
// Epilogues: STORE writes f32 rows, ADD adds to f32 rows (the residual), GATE_UP writes silu(gate) * up of the interleaved
// gate-up matrix as bf16 panels of N / 2 columns.
//
// The tensor maps see a matrix as [rows / 8][columns * 8 / 256][256] bf16, without swizzle; their boxes are 16 and BN / 16
// panels of BK / 32 x 256 elements. What lies outside reads as zero.
//
// Launch: as many blocks as multiprocessors (an even number), clusters of 2, GEMM_THREADS threads, Gemm<BN>::BYTES of
// dynamic shared memory. M is any number of rows; X has storage for M rounded up to 8. K is a multiple of 64, N of 8.

#include <cuda.h>

#include "hopper.cuh"
#include "hopper_wgmma.cuh"

namespace hopper {

constexpr int GEMM_THREADS = 384;  // a producer warpgroup and two consumers
constexpr int BM = 128;
constexpr int BAND = 16;  // tile rows that are walked together, so that their X stays in the L2 cache

struct GemmArgs {
    CUtensorMap x, w;  // [M][K] and [N][K] panels
    void* out;         // f32 [M][N], or bf16 panels [M][N / 2]
    int m, n, k;
};

template <int BN>
struct Gemm {
    static constexpr int BK = BN >= 192 ? 32 : 64;  // columns of a stage
    static constexpr int STAGE = (BM + BN) * BK * 2;
    static constexpr int STAGES = (232448 - 1024 - 256) / STAGE < 16 ? (232448 - 1024 - 256) / STAGE : 16;
    static constexpr int BYTES = 1024 + STAGES * STAGE + 256;
};

// The tiles of a cluster, pairs of tile rows by columns, in bands.
struct Tiles {
    int pairs, columns, next;

    __device__ bool take(int step, int& pair, int& column) {
        if (next >= pairs * columns) return false;
        const int band = BAND / 2, first = next / (band * columns) * band, height = min(band, pairs - first);
        const int in = next - first * columns;
        pair = first + in % height;
        column = in / height;
        next += step;
        return true;
    }
};

// Without .release.cluster: that would be a fence of the whole chip, and only the copy engine and wgmma touch the stages.
__device__ __forceinline__ void arrive_in_block(uint32_t barrier, uint32_t rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(in_block(barrier, rank)) : "memory");
}

template <int BN>
__device__ void produce_tiles(const GemmArgs& args, Tiles tiles, int step, uint32_t stages, uint32_t full, uint32_t empty) {
    using G = Gemm<BN>;
    constexpr int BK = G::BK;
    const int rank = cluster_rank();
    int stage = 0, pair, column;
    uint32_t parity = 1;
    while (tiles.take(step, pair, column)) {
        const int row = (pair * 2 + rank) * (BM / 8), half = column * (BN / 8) + rank * (BN / 16);
        for (int k = 0; k < args.k; k += BK) {
            const uint32_t to = stages + stage * G::STAGE, barrier = full + stage * 8;
            barrier_wait(empty + stage * 8, parity);
            barrier_expect(barrier, G::STAGE);
            load_panels<false>(to, &args.x, k / 32, row, barrier);
            load_panels<true>(to + BM * BK * 2 + rank * (BN / 16) * BK * 16, &args.w, k / 32, half, barrier);
            if (++stage == G::STAGES) stage = 0, parity ^= 1;
        }
    }
}

// Writes a warp's 16 x BN part of a tile: lane (g, t) holds columns 2t and 2t + 1 of rows g and g + 8 of each 8-column tile.
template <int BN, Epilogue E>
__device__ __forceinline__ void finish(const GemmArgs& args, float (&d)[BN / 8][4], int row, int column) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int m = row + g + r * 8;
        if constexpr (E == GATE_UP) {
            // Column 2t is a gate, 2t + 1 its up projection. Two tiles give a row of eight values; neighbours swap, so that
            // each lane stores two that lie side by side.
            const int width = args.n / 2;
#pragma unroll
            for (int i = 0; i < BN / 16; i++) {
                float h[2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const float gate = d[2 * i + j][2 * r], up = d[2 * i + j][2 * r + 1];
                    h[j] = __fdividef(gate, 1 + __expf(-gate)) * up;
                }
                const float other = __shfl_xor_sync(0xffffffffu, t % 2 ? h[0] : h[1], 1);
                const uint32_t both = t % 2 ? pack(other, h[1]) : pack(h[0], other);
                const int at = (column + i * 16) / 2;
                if (m < args.m && at < width)
                    reinterpret_cast<uint32_t*>(args.out)[(size_t(m / 8) * (width / 8) + at / 8) * 32 + m % 8 * 4 + (t % 2) * 2 + t / 2] = both;
            }
        } else {
            float* out = static_cast<float*>(args.out) + size_t(m) * args.n + column + 2 * t;
            constexpr int BATCH = BN % 64 == 0 ? 8 : BN / 8 / 2;  // reads in flight before the first write
#pragma unroll
            for (int i = 0; i < BN / 8; i += BATCH) {
                float2 before[BATCH] = {};
#pragma unroll
                for (int j = 0; j < BATCH; j++)
                    if (E == ADD && m < args.m && column + (i + j) * 8 < args.n) before[j] = *reinterpret_cast<float2*>(out + (i + j) * 8);
#pragma unroll
                for (int j = 0; j < BATCH; j++)
                    if (m < args.m && column + (i + j) * 8 < args.n)
                        *reinterpret_cast<float2*>(out + (i + j) * 8) = make_float2(before[j].x + d[i + j][2 * r], before[j].y + d[i + j][2 * r + 1]);
            }
        }
    }
}

template <int BN, Epilogue E>
__device__ void consume_tiles(const GemmArgs& args, Tiles tiles, int step, uint32_t stages, uint32_t full, uint32_t empty) {
    using G = Gemm<BN>;
    constexpr int BK = G::BK;
    const int group = threadIdx.x / 128 - 1, rank = cluster_rank();
    int stage = 0, pair, column;
    uint32_t parity = 0;
    float d[BN / 8][4];
    auto release = [&](int s) {
        if (threadIdx.x % 128 < 2) arrive_in_block(empty + s * 8, threadIdx.x % 128);
    };
    while (tiles.take(step, pair, column)) {
        int before = 0;
        for (int k = 0; k < args.k; k += BK) {
            const uint32_t a = stages + stage * G::STAGE + group * 64 * BK * 2, b = stages + stage * G::STAGE + BM * BK * 2;
            barrier_wait(full + stage * 8, parity);
            wgmma_begin();
#pragma unroll
            for (int i = 0; i < BK / 16; i++) wgmma<BN>(d, descriptor(a + i * 256, 128, BK * 16), descriptor(b + i * 256, 128, BK * 16), k > 0 || i > 0);
            wgmma_commit();
            if (k > 0) {
                wgmma_wait<1>();
                release(before);
            }
            before = stage;
            if (++stage == G::STAGES) stage = 0, parity ^= 1;
        }
        wgmma_wait<0>();
        release(before);
        finish<BN, E>(args, d, (pair * 2 + rank) * BM + group * 64 + threadIdx.x % 128 / 32 * 16, column * BN);
    }
}

template <int BN, Epilogue E>
__device__ __forceinline__ void gemm(const GemmArgs& args) {
    using G = Gemm<BN>;
    extern __shared__ uint8_t dynamic[];
    const uint32_t stages = (shared_address(dynamic) + 1023) / 1024 * 1024;
    const uint32_t full = stages + G::STAGES * G::STAGE, empty = full + G::STAGES * 8;
    if (threadIdx.x == 0) {
        for (int i = 0; i < G::STAGES; i++) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, 4);  // two warpgroups of two blocks
        }
        fence_init();
    }
    cluster_sync();
    const Tiles tiles{(args.m + 2 * BM - 1) / (2 * BM), (args.n + BN - 1) / BN, static_cast<int>(blockIdx.x) / 2};
    const int step = gridDim.x / 2;
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
                if (threadIdx.x == 0) produce_tiles<BN>(args, tiles, step, stages, full, empty);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume_tiles<BN, E>(args, tiles, step, stages, full, empty);
    }
    __syncwarp();
    cluster_sync();  // nobody leaves while the other block still writes to it
}

}  // namespace hopper

#define GEMM(bn, epilogue, name)                                                                                                 \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(hopper::GEMM_THREADS, 1) name(const __grid_constant__ hopper::GemmArgs args) { \
        hopper::gemm<bn, hopper::epilogue>(args);                                                                                \
    }
#define GEMMS(bn)                         \
    GEMM(bn, STORE, gemm_store_##bn)      \
    GEMM(bn, ADD, gemm_add_##bn)          \
    GEMM(bn, GATE_UP, gemm_gate_up_##bn)

GEMMS(256)
GEMMS(192)
GEMMS(160)
GEMMS(128)
GEMMS(80)
GEMMS(64)
