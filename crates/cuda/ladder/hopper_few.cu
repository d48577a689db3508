// C[M][N] = X[M][K] W[N][K]^T for 1 to 64 rows: each weight is read once, for all rows.
//
// Floor: the bytes of W over 4.25 TB/s.
//
// The operands change places: 128 rows of W are wgmma's tall operand, the tokens its width, 8 to 64. A cluster of blocks divides K;
// at the end each block adds a share of the tokens over the cluster, in rank order through distributed shared
// memory, so the bits depend on the cluster's size only. Two blocks fit a multiprocessor, so that one's end
// overlaps the other's stream.
//
// Launch: grid (splits, ceil(N / 128)), clusters of `splits` blocks (1 to 8), FEW_THREADS threads, Few<TOKENS>::BYTES of dynamic shared
// memory. Tensor maps as for hopper_gemm.cu: X in boxes of TOKENS / 8 panels, W of 16. K is a multiple of 64, N of 8.

#include <cuda.h>

#include "hopper.cuh"
#include "hopper_wgmma.cuh"

namespace hopper {

constexpr int FEW_THREADS = 288;  // two warpgroups of consumers and a producer warp
constexpr int FEW_ROWS = 128, FEW_K = 64;

struct FewArgs {
    CUtensorMap x, w;  // [M][K] and [N][K] panels
    void* out;         // f32 [M][N], or bf16 panels [M][N / 2]
    int m, n, k;
};

template <int TOKENS>
struct Few {
    static constexpr int STAGE = (FEW_ROWS + TOKENS) * FEW_K * 2;
    static constexpr int STAGES = 112000 / STAGE;
    static constexpr int BYTES = 1024 + STAGES * STAGE + 256;
};

__device__ __forceinline__ float4 load_shared(uint32_t address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
    return v;
}

template <int TOKENS, Epilogue E>
__device__ __forceinline__ void few(const FewArgs& args) {
    using F = Few<TOKENS>;
    extern __shared__ uint8_t dynamic[];
    const uint32_t stages = (shared_address(dynamic) + 1023) / 1024 * 1024, full = stages + F::STAGES * F::STAGE, empty = full + F::STAGES * 8;
    const int rank = blockIdx.x, splits = gridDim.x, chunks = args.k / FEW_K, begin = chunks * rank / splits, end = chunks * (rank + 1) / splits;
    if (threadIdx.x == 0)
        for (int i = 0; i < F::STAGES; i++) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, 2);
    fence_bulk();
    __syncthreads();
    float d[TOKENS / 8][4] = {};
    const int thread = threadIdx.x, group = thread / 128;
    if (thread == 256) {
        int stage = 0;
        uint32_t parity = 1;
        for (int k = begin; k < end; k++) {
            const uint32_t to = stages + stage * F::STAGE, barrier = full + stage * 8;
            barrier_wait(empty + stage * 8, parity);
            barrier_expect(barrier, F::STAGE);
            load_panels<false>(to, &args.w, k * (FEW_K / 32), blockIdx.y * (FEW_ROWS / 8), barrier);
            load_panels<false>(to + FEW_ROWS * FEW_K * 2, &args.x, k * (FEW_K / 32), 0, barrier);
            if (++stage == F::STAGES) stage = 0, parity ^= 1;
        }
    } else if (thread < 256) {
        int stage = 0, before = 0;
        uint32_t parity = 0;
        for (int k = begin; k < end; k++) {
            const uint32_t w = stages + stage * F::STAGE + group * 64 * FEW_K * 2, x = stages + stage * F::STAGE + FEW_ROWS * FEW_K * 2;
            barrier_wait(full + stage * 8, parity);
            wgmma_begin();
#pragma unroll
            for (int i = 0; i < FEW_K / 16; i++) wgmma<TOKENS>(d, descriptor(w + i * 256, 128, FEW_K * 16), descriptor(x + i * 256, 128, FEW_K * 16), 1);
            wgmma_commit();
            if (k > begin) {
                wgmma_wait<1>();
                if (thread % 128 == 0) barrier_arrive(empty + before * 8);
            }
            before = stage;
            if (++stage == F::STAGES) stage = 0, parity ^= 1;
        }
        wgmma_wait<0>();
        // Every stage has been read: the ring becomes the place where the sums wait for their cluster.
        sync_named(1, 256);
#pragma unroll
        for (int i = 0; i < TOKENS / 8; i++)
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(stages + (i * 256 + thread) * 16), "f"(d[i][0]), "f"(d[i][1]), "f"(d[i][2]), "f"(d[i][3])
                         : "memory");
    }
    __syncwarp();
    cluster_sync();
    if (thread < 256)
        for (int i = rank; i < TOKENS / 8; i += splits) {
            float4 sum = {};
            for (int from = 0; from < splits; from++) {
                const float4 v = load_shared(in_block(stages + (i * 256 + thread) * 16, from));
                sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
            }
            // x, y: two tokens of one row of W; z, w: of the row eight below.
            const int row = blockIdx.y * FEW_ROWS + thread / 32 * 16 + thread % 32 / 4, token = i * 8 + thread % 4 * 2;
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int t = 0; t < 2; t++) {
                    const float v = r ? (t ? sum.w : sum.z) : (t ? sum.y : sum.x);
                    const int n = row + r * 8, m = token + t;
                    if constexpr (E == GATE_UP) {
                        const float up = __shfl_xor_sync(0xffffffffu, v, 4);  // of the row below
                        if (n % 2 == 0 && n < args.n && m < args.m)
                            static_cast<bf16*>(args.out)[(size_t(m / 8) * (args.n / 16) + n / 16) * 64 + m % 8 * 8 + n / 2 % 8] =
                                __float2bfloat16(__fdividef(v, 1 + __expf(-v)) * up);
                    } else if (n < args.n && m < args.m) {
                        float* to = static_cast<float*>(args.out) + size_t(m) * args.n + n;
                        *to = E == ADD ? *to + v : v;
                    }
                }
        }
    cluster_sync();  // nobody leaves while others read its sums
}

}  // namespace hopper

#define FEW(tokens, epilogue, name)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(hopper::FEW_THREADS, 2) name(const __grid_constant__ hopper::FewArgs args) { \
        hopper::few<tokens, hopper::epilogue>(args);                                                                                       \
    }
#define FEWS(tokens)                          \
    FEW(tokens, STORE, few_store_##tokens)    \
    FEW(tokens, ADD, few_add_##tokens)        \
    FEW(tokens, GATE_UP, few_gate_up_##tokens)

FEWS(8)
FEWS(16)
FEWS(32)
FEWS(64)
