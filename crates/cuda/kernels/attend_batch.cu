// Attention of a few new tokens of a sequence over its paged KV, on Hopper: chunks of 1,024 positions, the last of 512 to 1,535.
//
// Floor: the bytes of K and V over the memory's bandwidth; in small batches, latency. The query heads of one KV head, for up to 16 / group
// tokens, are the 16 rows of one mma tile, so K and V are read once for all of them. A cluster of four blocks takes one chunk of one KV head;
// its sixteen warps take every sixteenth KV block, each through a ring of its own of tiles, keys and values in turns, that arrive
// asynchronously. What lay in the cache before this call is on its way before the queries are there. Blocks merge through shared memory,
// 32 of d each; the last of a sequence's chunks, if there are several, adds them. Merges have an order, so the bits do.
// Grid: (4 splits, 8), 128 threads, 64 KB of dynamic shared memory.
#include "attend.cuh"
#include "cluster.cuh"

#if HOPPER

constexpr int WARPS = 4, BLOCKS = 4;

// Asynchronously to another block's shared memory; its barrier counts the bytes.
__device__ __forceinline__ void send(uint32_t to, float v, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(v), "r"(barrier) : "memory");
}
__device__ __forceinline__ uint32_t there(uint32_t address, uint32_t rank) {
    uint32_t mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

template <Kv KIND>
__device__ __forceinline__ void attend(const __half* q, Cache keys, Cache values, __half* out, float* sums, float2* totals, unsigned* arrivals,
                                       const int* step, int heads) {
    extern __shared__ __align__(128) uint8_t rings[];
    __shared__ float2 shares[WARPS][16];
    __shared__ __align__(16) float parts[BLOCKS][16][32];
    __shared__ float2 part_shares[BLOCKS][16];
    __shared__ __align__(8) uint64_t arrived_barrier;
    // The step was there before this pass began.
    if (blockIdx.x / BLOCKS >= step[SPLITS]) return;
    const Work item = work_of(step, blockIdx.x / BLOCKS);
    const int token0 = item.token, count = item.count, group = heads / KV_HEADS, kv = blockIdx.y, rows = count * group;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = cluster_rank();
    uint32_t arrived = shared_address(&arrived_barrier);
    if (threadIdx.x == 0) {
        barrier_init(arrived, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        barrier_expect(arrived, BLOCKS * rows * (32 * 4 + 8));
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    release();

    Walk<KIND, WARPS * BLOCKS> walk(item, keys, values, step, kv, rank * WARPS + warp, rings + warp * RING);
    walk.stage_old(item);
    depend();
    walk.stage_rest();
    walk.load_queries(item, q, step + step[POSITION_AT] + token0, heads);
    walk.run(rows, shares[warp]);
    __syncthreads();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // the other blocks are there

    // Thread d adds the warps' sums of each row, and sends them to the block that ends d: that of its warp's number.
    uint32_t there_arrived = there(arrived, warp);
    uint32_t there_part = there(shared_address(&parts[rank][0][lane]), warp), there_share = there(shared_address(&part_shares[rank][0]), warp);
    for (int r = 0; r < rows; r++) {
        Share all;
        float y = merge_warps(shares, rings, r, threadIdx.x, all);
        send(there_part + r * 32 * 4, y, there_arrived);
        if (lane == 0) send(there_share + r * 8, all.best, there_arrived);
        if (lane == 1) send(there_share + r * 8 + 4, all.total, there_arrived);
    }
    barrier_wait(arrived, 0);
    int d = rank * 32 + lane;
    for (int r = warp; r < rows; r += WARPS) {
        Share all;
        float y = 0.0f;
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) all.best = fmaxf(all.best, part_shares[b][r].x);
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            float weight = exp2f(part_shares[b][r].x - all.base());
            all.total += weight * part_shares[b][r].y;
            y += weight * parts[b][r][lane];
        }
        int token = r / group, head = kv * group + r % group;
        if (item.partial < 0) {
            out[(size_t(token0 + token) * heads + head) * HEAD + d] = __float2half_rn(y / all.total);
        } else {
            size_t at = size_t(item.partial + item.chunk * count + token) * heads + head;
            __stcg(sums + at * HEAD + d, y);
            if (d == 0) __stcg(totals + at, make_float2(all.best, all.total));
        }
    }
    if (item.partial < 0 || !last_to_come(arrivals + token0 * KV_HEADS + kv, item.chunks * BLOCKS)) return;
    for (int r = warp; r < rows; r += WARPS) {
        int token = r / group, head = kv * group + r % group;
        size_t first = size_t(item.partial + token) * heads + head;
        merge(sums, totals, first, size_t(count) * heads, item.chunks, out + (size_t(token0 + token) * heads + head) * HEAD);
    }
}

#endif

#if HOPPER
#define CLUSTER __cluster_dims__(4, 1, 1)
#define RUN(kind) attend<KV_##kind>(q, keys, values, out, sums, totals, arrivals, step, heads);
#else
#define CLUSTER
#define RUN(kind)
#endif
#define KERNEL(kind)                                                                                                                   \
    extern "C" __global__ void CLUSTER __launch_bounds__(128, 3) attend_batch_##kind(const __half* q, Cache keys, Cache values, __half* out, \
                                                                                     float* sums, float2* totals, unsigned* arrivals,   \
                                                                                     const int* step, int heads) {                      \
        RUN(kind)                                                                                                                       \
    }
KERNEL(BF16)
KERNEL(Q8_0)
