// Attention of a few new tokens of a sequence over its paged KV, split into chunks of 512 positions, the last of 256 to 767.
//
// Floor: the bytes of K and V over the memory's bandwidth. The query heads of one KV head, for up to 16 / group
// tokens, are the 16 rows of one mma tile, so K and V are read once for all of them. A block takes one chunk of one KV head; its four warps
// take every fourth KV block of it.
// Warps merge in order. The last block of a sequence and KV head to end adds the chunks, in their order. A sequence of one
// chunk is finished at once.
// Grid: (splits, 8), 128 threads, 64 KB of dynamic shared memory.
#include "attend.cuh"

constexpr int WARPS = 4;

template <Kv KIND>
__device__ __forceinline__ void attend(const __half* q, Cache keys, Cache values, __half* out, float* sums,
                                       float2* totals, unsigned* arrivals, const int* step, int heads) {
    extern __shared__ __align__(128) uint8_t rings[];
    __shared__ float2 shares[WARPS][16];
    release();
    // The step was there before this pass began.
    if (blockIdx.x >= step[SPLITS]) return;
    const Work item = work_of(step, blockIdx.x);
    int token0 = item.token, count = item.count, group = heads / KV_HEADS, kv = blockIdx.y, warp = threadIdx.x / 32;
    Walk<KIND, WARPS> walk(item, keys, values, step, kv, warp, rings + warp * RING);
    walk.stage_old(item);
    depend();
    walk.stage_rest();
    walk.load_queries(item, q, step + step[POSITION_AT] + token0, heads);
    walk.run(count * group, shares[warp]);
    __syncthreads();
    int d = threadIdx.x;
    for (int r = 0; r < count * group; r++) {
        Share all;
        float y = merge_warps(shares, rings, r, d, all);
        int token = r / group, head = kv * group + r % group;
        if (item.partial < 0) {
            out[(size_t(token0 + token) * heads + head) * HEAD + d] = __float2half_rn(y / all.total);
        } else {
            size_t at = size_t(item.partial + item.chunk * count + token) * heads + head;
            __stcg(sums + at * HEAD + d, y);
            if (d == 0) __stcg(totals + at, make_float2(all.best, all.total));
        }
    }
    if (item.partial < 0 || !last_to_come(arrivals + token0 * KV_HEADS + kv, item.chunks)) return;
    for (int r = warp; r < count * group; r += WARPS) {
        int token = r / group, head = kv * group + r % group;
        size_t first = size_t(item.partial + token) * heads + head;
        merge(sums, totals, first, size_t(count) * heads, item.chunks, out + (size_t(token0 + token) * heads + head) * HEAD);
    }
}

#define KERNEL(kind)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 3)                                                                            \
        attend_split_##kind(const __half* q, Cache keys, Cache values, __half* out, float* sums, float2* totals,      \
                            unsigned* arrivals, const int* step, int heads) {                                         \
        attend<KV_##kind>(q, keys, values, out, sums, totals, arrivals, step, heads);                                 \
    }
KERNEL(BF16)
KERNEL(Q8_0)
