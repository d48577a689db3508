// Projection of a batch through Hopper's warpgroup products: Y = X W^T for 2 to 256 tokens, X fp16 [tokens][cols],
// W fp16 [rows][cols].
//
// Floor: the weights' bytes over the memory's bandwidth; each is read once, for all tokens.
// The weights are the M side of wgmma, 64 rows a consumer warpgroup, the tokens N, WIDTH at once. One thread streams
// both operands through a ring of stages of 64 columns by bulk tensor copies. The first weights are under way before
// the kernel before this one has ended: the ring is as large as what the memory delivers in that time. Products of
// rows that a tile does not have are made of whatever lies there, and dropped.
// A token's sum depends on neither its batch mates nor WIDTH.
// Grid: one block a multiprocessor at most; 128 GROUPS + 32 threads.
#include "batch.cuh"
#include "hopper.cuh"

#if HOPPER

constexpr int DEPTH = 64;  // columns of a stage
constexpr int MOST_STAGES = 16;

template <int WIDTH, int GROUPS, Epilogue E>
__device__ __forceinline__ void project(const CUtensorMap* lower, const CUtensorMap* upper, const CUtensorMap* x,
                                        const Shape& s) {
    extern __shared__ __align__(1024) uint8_t ring[];
    __shared__ __align__(8) uint64_t barriers[2 * MOST_STAGES];
    uint32_t full = shared_address(barriers), empty = full + MOST_STAGES * 8, base = shared_address(ring);
    if (threadIdx.x == 0) {
        for (int i = 0; i < s.stages; i++) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, GROUPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    release();
    constexpr int X_BYTES = WIDTH * DEPTH * 2;
    const int stage_bytes = X_BYTES + most_rows(s) * DEPTH * 2;

    if (threadIdx.x >= GROUPS * 128) {
        if (threadIdx.x != GROUPS * 128) return;
        auto weights = [&](const Item& item, int k, int stage) {
            int rows = item.rows;
            barrier_expect(full + stage * 8, X_BYTES + rows * DEPTH * 2);
            copy_box_once(base + stage * stage_bytes + X_BYTES, rows == most_rows(s) ? upper : lower, k * DEPTH, item.row,
                          full + stage * 8);
        };
        // The weights of the first stages do not wait for the activations.
        int ahead = 0;
        for (int i = blockIdx.x; i < s.ranges * s.splits && ahead < s.stages; i += gridDim.x) {
            Item item(s, i, DEPTH);
            for (int k = item.begin; k < item.end && ahead < s.stages; k++, ahead++) weights(item, k, ahead);
        }
        depend();
        asm volatile("fence.proxy.async;" ::: "memory");
        int step = 0;
        Ring at(s.stages);
        for (int i = blockIdx.x; i < s.ranges * s.splits; i += gridDim.x) {
            Item item(s, i, DEPTH);
            for (int k = item.begin; k < item.end; k++, step++, at.next()) {
                if (step >= ahead) {
                    barrier_wait(empty + at.stage * 8, at.parity ^ 1);
                    weights(item, k, at.stage);
                }
                copy_box(base + at.stage * stage_bytes, x, k * DEPTH, 0, full + at.stage * 8);
            }
        }
        return;
    }

    int tokens = min(*s.count, WIDTH), group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
    Ring at(s.stages);
    for (int i = blockIdx.x; i < s.ranges * s.splits; i += gridDim.x) {
        Item item(s, i, DEPTH);
        float sum[WIDTH / 2];
        int before = 0;
        for (int k = item.begin; k < item.end; k++, at.next()) {
            barrier_wait(full + at.stage * 8, at.parity);
            uint64_t b = operand(base + at.stage * stage_bytes);
            uint64_t a = operand(base + at.stage * stage_bytes + X_BYTES + group * (64 * DEPTH * 2));
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < DEPTH / 16; j++) wgmma<WIDTH>(sum, a + j * 2, b + j * 2, k > item.begin || j > 0);
            wgmma_commit();
            // The stage before this one is read: its products are done when at most this one's are pending.
            wgmma_wait<1>();
            if (k > item.begin && threadIdx.x % 128 == 0) barrier_arrive(empty + before * 8);
            before = at.stage;
        }
        wgmma_wait<0>();
#pragma unroll
        for (int j = 0; j < WIDTH / 2; j++) asm volatile("" : "+f"(sum[j])::"memory");  // no use moves up past the wait
        if (threadIdx.x % 128 == 0) barrier_arrive(empty + before * 8);
        int row = group * 64 + warp * 16;
        if (row < item.rows) leave<E, WIDTH>(s, sum, item.row + row, item.split, tokens);
    }
}

#endif

#define KERNEL(width, groups, epilogue)                                                                          \
    extern "C" __global__ void __launch_bounds__(groups * 128 + 32, 1) project_batch_##width##_##groups##_##epilogue( \
        const __grid_constant__ CUtensorMap lower, const __grid_constant__ CUtensorMap upper,                    \
        const __grid_constant__ CUtensorMap x, const Shape s) {                                                  \
        RUN(width, groups, epilogue)                                                                             \
    }
#if HOPPER
#define RUN(width, groups, epilogue) project<width, groups, epilogue>(&lower, &upper, &x, s);
#else
#define RUN(width, groups, epilogue)
#endif
#define WIDTHS(groups, epilogue) \
    KERNEL(16, groups, epilogue) KERNEL(32, groups, epilogue) KERNEL(64, groups, epilogue) KERNEL(128, groups, epilogue)
#define GROUPS(epilogue)                                            \
    WIDTHS(1, epilogue) WIDTHS(2, epilogue) WIDTHS(3, epilogue) \
    KERNEL(256, 1, epilogue) KERNEL(256, 2, epilogue)
GROUPS(STORE)
GROUPS(SWIGLU)
