// Causal attention of many new tokens of a sequence over its paged KV (prefill), on Hopper.
//
// Floor: 4 x 128 operations a query head and visible (query, key) pair, over the rate of wgmma.
// One block takes 128 queries of one head, two warpgroups 64 each; a third streams the keys and values of 128 positions, four
// KV blocks, through two stages of each: fp16 by tensor copies, bytes by plain ones that it then expands with their scales. The products of a tile's scores are issued before those of the values of the
// tile before it, so that a softmax runs beside products: S(j) = Q K(j), O += P(j - 1) V(j - 1), then P(j) from S(j). Probabilities go from
// accumulators to operand unchanged. Tiles begin at fixed positions and run upwards, so a row's sums depend neither on its batch mates
// nor on its chunk of prefill. What lies in the cache past a sequence's end has probability 0, and is finite: the backend
// clears the cache once, and `rope` appends no infinity.
// Two query heads of a KV head may share what they read: in a cluster of two each block copies 64 columns of every tile to both. Alone, a
// block reads 64 KB of the L2 cache for 8.4 million operations, which at 600 TFLOP/s is 4.6 TB/s.
// q, out fp16 [tokens][heads][128]; maps: q in boxes of 128 tokens, the cache in boxes of 32 head rows, 64 columns each.
// Grid: (heads, flashes), in clusters of two heads or one; items come longest first. 384 threads. Dynamic shared memory: 161 KB, for bytes 33 KB more.
#include "cache.cuh"
#include "cluster.cuh"

#if HOPPER

constexpr int QUERIES = 128, KEYS = 128;
constexpr int HALF = KEYS * 128;  // bytes of 64 of d of a tile of queries, keys or values
constexpr int TILE = 2 * HALF;
constexpr int STAGES = 2;
static_assert(QUERIES == KEYS);  // TILE is of either

struct Barriers {
    uint64_t raw[2], queries, keys_full[STAGES], keys_empty[STAGES], values_full[STAGES], values_empty[STAGES];
};

// Lanes copy a half of a KV block each, to all blocks of the cluster: lanes 0..3 that of this block's rank, if there are two, and
// otherwise lanes 0..7 both.
__device__ __forceinline__ void produce(const CUtensorMap* keys, const CUtensorMap* values, const int* table, int blocks, int rounds, int kv,
                                        uint32_t tiles, Barriers& barriers, int lane) {
    int part = lane % 4, half = cluster_size() == 2 ? cluster_rank() : lane / 4 % 2;
    uint32_t to = tiles + half * HALF + part * (BLOCK * 128), copiers = 8 / cluster_size();
    int next = table[min(part, blocks - 1)];
    for (int round = 0; round < rounds; round++) {
        int row = int(cache_row(next, kv)), stage = round % STAGES;
        next = table[min((round + 1) * (KEYS / BLOCK) + part, blocks - 1)];
        auto copy = [&](uint32_t to, const CUtensorMap* map, uint64_t* full, uint64_t* empty) {
            uint32_t barrier = shared_address(full + stage);
            if (round >= STAGES) barrier_wait(shared_address(empty + stage), (round / STAGES - 1) & 1);
            if (lane == 0) barrier_expect(barrier, TILE);
            __syncwarp();
            if (lane >= copiers) return;
            if (cluster_size() == 2) copy_box_to_both(to + stage * TILE, map, half * 64, row, barrier);
            else copy_box(to + stage * TILE, map, half * 64, row, barrier);
        };
        copy(to, keys, barriers.keys_full, barriers.keys_empty);
        copy(to + STAGES * TILE, values, barriers.values_full, barriers.values_empty);
    }
}

// Bytes as they come: keys or values of a tile, then their scales.
constexpr int RAW = KEYS * HEAD, RAW_SCALES = KEYS * 4;

__device__ __forceinline__ void copy_bytes(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Threads 0..3 fetch a KV block each, all 128 expand: a thread 16 bytes of every sixteenth key.
__device__ __forceinline__ void produce_from_bytes(const Cache& keys, const Cache& values, const int* table, int blocks, int rounds, int kv, int end,
                                                   uint32_t tiles, uint8_t* raw, Barriers& barriers, int tid) {
    auto fetch = [&](int operand, int round) {
        if (tid >= 32 || round >= rounds) return;
        uint32_t barrier = shared_address(barriers.raw + operand);
        if (tid == 0) barrier_expect(barrier, RAW + RAW_SCALES);
        __syncwarp();
        if (tid >= KEYS / BLOCK) return;
        const Cache& cache = operand == 0 ? keys : values;
        size_t row = cache_row(table[min(round * (KEYS / BLOCK) + tid, blocks - 1)], kv);
        uint32_t to = shared_address(raw) + operand * (RAW + RAW_SCALES);
        copy_bytes(to + tid * (BLOCK * HEAD), cache.values + row * HEAD, BLOCK * HEAD, barrier);
        copy_bytes(to + RAW + tid * (BLOCK * 4), cache.scales + row, BLOCK * 4, barrier);
    };
    fetch(0, 0);
    fetch(1, 0);
    int piece = tid % 8;
    for (int round = 0; round < rounds; round++) {
        int stage = round % STAGES;
        auto expand = [&](int operand, uint64_t* full, uint64_t* empty) {
            const uint8_t* from = raw + operand * (RAW + RAW_SCALES);
            uint32_t to = tiles + (operand * STAGES + stage) * TILE + piece / 4 * HALF;
            barrier_wait(shared_address(barriers.raw + operand), round & 1);
            if (round >= STAGES) barrier_wait(shared_address(empty + stage), (round / STAGES - 1) & 1);
#pragma unroll
            for (int i = 0; i < KEYS / 16; i++) {
                int key = i * 16 + tid / 8;
                uint4 v = reinterpret_cast<const uint4*>(from)[key * (HEAD / 16) + piece];
                // What lies past the end may have a scale that is not finite.
                float scale = reinterpret_cast<const float*>(from + RAW)[key];
                __half2 factor = __float2half2_rn(round * KEYS + key < end ? scale : 0.0f);
                uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    uint32_t out[4];
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        uint2 pair = widen(word[half * 2 + j]);
                        __half2 low = __hmul2(*reinterpret_cast<__half2*>(&pair.x), factor), high = __hmul2(*reinterpret_cast<__half2*>(&pair.y), factor);
                        out[j * 2] = *reinterpret_cast<uint32_t*>(&low), out[j * 2 + 1] = *reinterpret_cast<uint32_t*>(&high);
                    }
                    uint32_t at = to + key * 128 + (((piece % 4 * 2 + half) ^ (key & 7)) << 4);
                    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(out[0]), "r"(out[1]), "r"(out[2]), "r"(out[3]) : "memory");
                }
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            barrier_arrive(shared_address(full + stage));
            asm volatile("bar.sync 1, 128;" ::: "memory");  // all have read what the next copies overwrite
            fetch(operand, round + 1);
        };
        expand(0, barriers.keys_full, barriers.keys_empty);
        expand(1, barriers.values_full, barriers.values_empty);
    }
}

__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 64 queries; `first` is the position of the first, rows g and g + 8 of each warp's 16 are this thread's. Where registers are left they hold the
// queries, so that products read a third less of the shared memory.
template <Kv KIND>
__device__ __forceinline__ void consume(uint32_t queries, uint32_t keys, uint32_t values, Barriers& barriers, int first, int rounds, float (&o)[64],
                                        float (&total)[2]) {
    constexpr float SCALE = 0.08838834764831845f * 1.4426950408889634f;  // exp(x / sqrt(128)) as a power of two
    constexpr float LEEWAY = 8.0f;
    int tid = threadIdx.x % 128, t = tid % 4, row = first + tid / 32 * 16 + tid % 32 / 4;
    float s[64], highest[2] = {-INFINITY, -INFINITY}, decay[2];
    uint32_t p[8][4], q[8][4];
    if constexpr (KIND == KV_BF16) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint32_t from = queries + i / 4 * HALF + (tid / 32 * 16 + tid % 16) * 128 + (((i % 4 * 2 + tid % 32 / 16) ^ tid % 8) << 4);
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(q[i][0]), "=r"(q[i][1]), "=r"(q[i][2]), "=r"(q[i][3])
                         : "r"(from)
                         : "memory");
        }
    }

    auto score = [&](int round) {
        int stage = round % STAGES;
        barrier_wait(shared_address(barriers.keys_full + stage), round / STAGES & 1);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint64_t k = operand(keys + stage * TILE + i / 4 * HALF) + i % 4 * 2;
            if constexpr (KIND == KV_BF16) wgmma<KEYS>(s, q[i], k, i > 0);
            else wgmma<KEYS>(s, operand(queries + i / 4 * HALF) + i % 4 * 2, k, i > 0);
        }
        wgmma_commit();
    };
    // Values lie with d contiguous: 64 of d a piece of HALF bytes, 8 keys a kilobyte.
    auto gather = [&](int round) {
        int stage = round % STAGES;
        barrier_wait(shared_address(barriers.values_full + stage), round / STAGES & 1);
        uint64_t v = uint64_t(((values + stage * TILE) & 0x3ffff) >> 4) | uint64_t(HALF >> 4) << 16 | 64ull << 32 | 1ull << 62;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 8; i++) wgmma<HEAD, true>(o, p[i], v + i * 128, round > 0 || i > 0);
        wgmma_commit();
    };
    // To all blocks that fill it, if they will: whoever has left is then arrived at no more.
    auto leave = [&](uint64_t* empty, int round) {
        if (tid < cluster_size() && round + STAGES < rounds) barrier_arrive_in(shared_address(empty + round % STAGES), tid);
    };
    auto soften = [&](int round) {  // scores to probabilities
        if ((round + 1) * KEYS > first + 1) {  // some key may come after some query
#pragma unroll
            for (int i = 0; i < 64; i++)
                if (round * KEYS + i / 4 * 8 + 2 * t + i % 2 > row + i / 2 % 2 * 8) s[i] = -INFINITY;
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = highest[r];
#pragma unroll
            for (int j = 0; j < 16; j++) top = fmaxf(top, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            // Key 0 is visible to every row, so the maxima are finite from the first round on. A row keeps the maximum that it has until scores
            // are past it by LEEWAY powers of two, which fp16 probabilities bear: sums are then seldom scaled.
            float next = (top - highest[r]) * SCALE > LEEWAY ? top : highest[r];
            decay[r] = power((highest[r] - next) * SCALE);
            highest[r] = next;
            float offset = next * SCALE, sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 16; j++) {
#pragma unroll
                for (int i = 4 * j + 2 * r; i < 4 * j + 2 * r + 2; i++) sum += s[i] = power(fmaf(s[i], SCALE, -offset));
            }
            total[r] = total[r] * decay[r] + sum;
        }
    };
    auto hand_over = [&] {
#pragma unroll
        for (int i = 0; i < 32; i++) p[i / 4][i % 4] = pack(s[2 * i], s[2 * i + 1]);
    };

    score(0);
    wgmma_wait<0>();
    settled(s);
    leave(barriers.keys_empty, 0);
    soften(0);
    hand_over();
    int group = threadIdx.x / 128;
    if (group == 1 && rounds > 1) asm volatile("bar.arrive 2, 256;" ::: "memory");
    for (int round = 1; round < rounds; round++) {
        // Warpgroups take turns with the tensor cores, so that one's softmax runs beside the other's products.
        asm volatile("bar.sync %0, 256;" ::"r"(2 + group) : "memory");
        score(round);
        gather(round - 1);
        if (group == 0 || round + 1 < rounds) asm volatile("bar.arrive %0, 256;" ::"r"(3 - group) : "memory");
        wgmma_wait<1>();
        settled(s);
        leave(barriers.keys_empty, round);
        soften(round);
        // ptxas puts the wait before all of the softmax, which then runs beside no products, unless a branch between them needs its sums.
        if (total[0] + total[1] < 0.0f) asm volatile("nanosleep.u32 0;");
        wgmma_wait<0>();
        settled(o);
        leave(barriers.values_empty, round - 1);
        if (__any_sync(0xffffffffu, decay[0] != 1.0f || decay[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < 64; i++) o[i] *= decay[i / 2 % 2];
        }
        hand_over();
    }
    gather(rounds - 1);
    wgmma_wait<0>();
    settled(o);
}

template <Kv KIND>
__device__ __forceinline__ void attend(const CUtensorMap* q, const CUtensorMap* key_map, const CUtensorMap* value_map, const Cache& keys,
                                       const Cache& values, __half* out, const int* step, int heads) {
    extern __shared__ uint8_t dynamic[];
    __shared__ __align__(8) Barriers barriers;
    uint32_t padding = -shared_address(dynamic) & 1023, queries = shared_address(dynamic) + padding, tiles = queries + TILE;
    if (threadIdx.x == 0) {
        const int FILLERS = KIND == KV_BF16 ? 1 : 128, READERS = 2 * cluster_size();
        barrier_init(shared_address(&barriers.queries), 1);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared_address(barriers.raw + i), 1);
            barrier_init(shared_address(barriers.keys_full + i), FILLERS), barrier_init(shared_address(barriers.keys_empty + i), READERS);
            barrier_init(shared_address(barriers.values_full + i), FILLERS), barrier_init(shared_address(barriers.values_empty + i), READERS);
        }
    }
    barriers_ready();
    release();
    depend();
    const int* item = step + step[FLASH_AT] + blockIdx.y * 2;
    int token0 = item[0], count = item[1], head = blockIdx.x, kv = head / (heads / KV_HEADS);
    int position0 = step[step[POSITION_AT] + token0], end = position0 + count;
    int blocks = (end - 1) / BLOCK + 1, rounds = (end - 1) / KEYS + 1;
    int group = threadIdx.x / 128, tid = threadIdx.x % 128;

    if (group == 2) {
        fewer_registers<KIND == KV_BF16 ? 40 : 72>();
        if (KIND == KV_BF16 && tid >= 32) return;
        if (tid == 0) {
            barrier_expect(shared_address(&barriers.queries), TILE);
            for (int half = 0; half < 2; half++)
                copy_box(queries + half * HALF, q, head * HEAD + half * 64, token0, shared_address(&barriers.queries));
        }
        const int* table = step + step[step[TABLE_AT] + token0];
        if constexpr (KIND == KV_BF16) {
            produce(key_map, value_map, table, blocks, rounds, kv, tiles, barriers, tid);
        } else {
            uint8_t* raw = dynamic + padding + (1 + 2 * STAGES) * TILE;
            produce_from_bytes(keys, values, table, blocks, rounds, kv, end, tiles, raw, barriers, tid);
        }
        return;
    }
    more_registers<KIND == KV_BF16 ? 232 : 216>();
    barrier_wait(shared_address(&barriers.queries), 0);
    float o[64], total[2] = {};
    consume<KIND>(queries + group * (64 * 128), tiles, tiles + STAGES * TILE, barriers, position0 + group * 64, rounds, o, total);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        total[r] += __shfl_xor_sync(0xffffffffu, total[r], 1);
        total[r] += __shfl_xor_sync(0xffffffffu, total[r], 2);
        int token = group * 64 + tid / 32 * 16 + tid % 32 / 4 + r * 8;
        if (token >= count) continue;
        float factor = 1.0f / total[r];
        __half* to = out + (size_t(token0 + token) * heads + head) * HEAD + tid % 4 * 2;
#pragma unroll
        for (int j = 0; j < 16; j++)
            *reinterpret_cast<uint32_t*>(to + j * 8) = pack(o[4 * j + 2 * r] * factor, o[4 * j + 2 * r + 1] * factor);
    }
}

#endif

extern "C" __global__ void __launch_bounds__(384, 1)
    attend_tiles_BF16(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap keys, const __grid_constant__ CUtensorMap values,
                      __half* out, const int* step, int heads) {
#if HOPPER
    attend<KV_BF16>(&q, &keys, &values, Cache{}, Cache{}, out, step, heads);
#endif
}

extern "C" __global__ void __launch_bounds__(384, 1)
    attend_tiles_Q8_0(const __grid_constant__ CUtensorMap q, const __grid_constant__ Cache keys, const __grid_constant__ Cache values, __half* out,
                      const int* step, int heads) {
#if HOPPER
    attend<KV_Q8_0>(&q, nullptr, nullptr, keys, values, out, step, heads);
#endif
}
