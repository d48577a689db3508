// Projection through Hopper's warpgroup products: Y = X W^T, X fp16 [tokens][cols], W fp16 [rows][cols].
//
// Floor: the weights' bytes over the memory's bandwidth for a few hundred tokens, 2 tokens rows cols operations over
// the tensor cores' rate beyond.
// The weights are the M side, so one kernel serves batches and prefill: a tile is 128 weight rows x WIDTH tokens, two
// consumer warpgroups 64 rows each. One thread of a third warpgroup streams both operands through a ring of stages of
// 64 columns by bulk tensor copies, across tiles and ahead of the activations: the first weights are under way before
// the kernel before this one has ended.
// Up to 256 tokens there is one tile of tokens, and the device's blocks share rows x cols evenly (`ranges`): a block's
// range may begin or end inside a tile. The blocks of such a tile write their sums, and when all have, each adds up a
// part of the tile in the order of the blocks. The ranges depend on the matrix and the device alone, so a token's sum
// does not depend on its batch mates. Beyond 256 tokens a block takes whole tiles, in order of k.
// Grid: at most one block a multiprocessor, since blocks wait for each other; 384 threads.
#include "epilogue.cuh"
#include "hopper.cuh"

constexpr int ROWS_TILE = 128;
constexpr int DEPTH = 64;  // columns of a stage
constexpr int WEIGHT_BYTES = ROWS_TILE * DEPTH * 2;

// What does not depend on the tile; `parts` holds two tiles of sums a block, fp32 [WIDTH][128].
struct Shape {
    void* out;
    float factor;
    int rows, cols;
    const int* count;
    float* parts;
    unsigned* arrivals;  // [row tiles][2]: blocks that wrote their sums, blocks that added theirs; 0 between launches
    int ranges;          // whether blocks share the columns evenly
};

#if HOPPER

// A piece of one tile: steps of k begin..end.
struct Segment {
    int row_tile, token_tile, begin, end;
};

// The work of one block, in order.
struct Work {
    int steps;         // of k in a tile
    int row_tiles, token_tiles;
    long long next, end;  // ranges: steps of all tiles; else tiles
    int stride;

    __device__ Work(const Shape& s, int token_tiles_) {
        steps = s.cols / DEPTH, row_tiles = s.rows / ROWS_TILE, token_tiles = token_tiles_;
        if (s.ranges) {
            next = first_of(blockIdx.x), end = first_of(blockIdx.x + 1);
        } else {
            next = blockIdx.x, end = (long long)row_tiles * token_tiles, stride = gridDim.x;
        }
    }

    // Where a block's range begins.
    __device__ long long first_of(int block) const { return (long long)block * row_tiles * steps / gridDim.x; }

    // The block whose range holds a step.
    __device__ int block_of(long long step) const {
        int block = int(step * gridDim.x / ((long long)row_tiles * steps));
        while (first_of(block + 1) <= step) block++;
        while (first_of(block) > step) block--;
        return block;
    }

    __device__ bool take(const Shape& s, Segment& segment) {
        if (next >= end) return false;
        if (s.ranges) {
            int tile = int(next / steps), begin = int(next % steps);
            int upto = int(min((long long)steps, begin + (end - next)));
            segment = {tile, 0, begin, upto};
            next += upto - begin;
        } else {  // tokens fastest, so that the blocks at work share weights
            segment = {int(next / token_tiles), int(next % token_tiles), 0, steps};
            next += stride;
        }
        return true;
    }
};

template <int WIDTH, int STAGES, Epilogue E>
__device__ __forceinline__ void project(const CUtensorMap* weights, const CUtensorMap* x, const Shape& s) {
    constexpr int STAGE_BYTES = WEIGHT_BYTES + WIDTH * DEPTH * 2;
    extern __shared__ __align__(1024) uint8_t ring[];
    __shared__ __align__(8) uint64_t barriers[2 * STAGES];
    uint32_t full = shared_address(barriers), empty = full + STAGES * 8, base = shared_address(ring);
    int group = threadIdx.x / 128, tid = threadIdx.x % 128;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, 2);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    release();

    if (group == 2) {
        fewer_registers<40>();
        if (tid != 0) return;
        // The weights of the first stages do not wait for the activations; which segments they belong to does, unless
        // there is one tile of tokens.
        Segment segment;
        int ahead = 0;
        if (s.ranges) {
            Work work(s, 1);
            while (ahead < STAGES && work.take(s, segment)) {
                for (int k = segment.begin; k < segment.end && ahead < STAGES; k++, ahead++) {
                    barrier_expect(full + ahead * 8, STAGE_BYTES);
                    copy_box(base + ahead * STAGE_BYTES, weights, k * DEPTH, segment.row_tile * ROWS_TILE,
                             full + ahead * 8);
                }
            }
        }
        depend();
        asm volatile("fence.proxy.async;" ::: "memory");
        Work work(s, (*s.count + WIDTH - 1) / WIDTH);
        int step = 0;
        while (work.take(s, segment)) {
            for (int k = segment.begin; k < segment.end; k++, step++) {
                int stage = step % STAGES;
                uint32_t at = base + stage * STAGE_BYTES, barrier = full + stage * 8;
                if (step >= ahead) {
                    if (step >= STAGES) barrier_wait(empty + stage * 8, (step / STAGES - 1) & 1);
                    barrier_expect(barrier, STAGE_BYTES);
                    copy_box(at, weights, k * DEPTH, segment.row_tile * ROWS_TILE, barrier);
                }
                copy_box(at + WEIGHT_BYTES, x, k * DEPTH, segment.token_tile * WIDTH, barrier);
            }
        }
        return;
    }

    more_registers<232>();
    depend();
    int tokens = *s.count, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
    int own_row = group * 64 + warp * 16 + g;  // in the tile; the other is 8 further
    Work work(s, (tokens + WIDTH - 1) / WIDTH);
    Segment segment;
    int step = 0;
    int begun_tile = -1, ended_tile = -1;  // tiles shared with the blocks before and behind this one
    while (work.take(s, segment)) {
        float sum[WIDTH / 2];
        for (int k = segment.begin; k < segment.end; k++, step++) {
            int stage = step % STAGES;
            barrier_wait(full + stage * 8, step / STAGES & 1);
            uint64_t a = operand(base + stage * STAGE_BYTES + group * (WEIGHT_BYTES / 2));
            uint64_t b = operand(base + stage * STAGE_BYTES + WEIGHT_BYTES);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < DEPTH / 16; i++) wgmma<WIDTH>(sum, a + i * 2, b + i * 2, k > segment.begin || i > 0);
            wgmma_commit();
            // The stage before this one is read: its products are done when at most this one's are pending.
            wgmma_wait<1>();
            if (k > segment.begin && tid == 0) barrier_arrive(empty + (step - 1) % STAGES * 8);
        }
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) asm volatile("" : "+f"(sum[i])::"memory");  // no use moves up past the wait
        if (tid == 0) barrier_arrive(empty + (step - 1) % STAGES * 8);

        int token0 = segment.token_tile * WIDTH, row0 = segment.row_tile * ROWS_TILE + own_row;
        bool whole = segment.begin == 0 && segment.end == work.steps;
        if (!whole) {
            float* part = s.parts + (size_t(blockIdx.x) * 2 + (segment.begin == 0)) * (WIDTH * ROWS_TILE);
#pragma unroll
            for (int i = 0; i < WIDTH / 2; i++) {
                int token = i / 4 * 8 + 2 * t + i % 2;
                if (token < tokens) __stcg(part + token * ROWS_TILE + own_row + i / 2 % 2 * 8, sum[i]);
            }
            __threadfence();
            asm volatile("bar.sync 1, 256;" ::: "memory");
            if (threadIdx.x == 0) atomicAdd(s.arrivals + segment.row_tile * 2, 1);
            (segment.begin == 0 ? ended_tile : begun_tile) = segment.row_tile;
        } else if constexpr (E == SWIGLU) {
            __half* out = static_cast<__half*>(s.out);
#pragma unroll
            for (int i = 0; i < WIDTH / 2; i++) {
                int token = token0 + i / 4 * 8 + 2 * t + i % 2;
                if (i % 4 < 2 && token < tokens)
                    out[size_t(token) * (s.rows / 2) + row0 / 16 * 8 + g] = __float2half_rn(swiglu(sum[i], sum[i + 2]));
            }
        } else {
            float* out = static_cast<float*>(s.out);
#pragma unroll
            for (int i = 0; i < WIDTH / 2; i++) {
                int token = token0 + i / 4 * 8 + 2 * t + i % 2;
                float* at = out + size_t(token) * s.rows + row0 + i / 2 % 2 * 8;
                if (token < tokens) *at = E == STORE ? sum[i] : *at + sum[i] * s.factor;
            }
        }
    }

    // Tiles that several blocks share: when all have written, each adds its part, in the order of the blocks.
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int tile = i == 0 ? begun_tile : ended_tile;
        if (tile < 0) continue;
        int first = work.block_of((long long)tile * work.steps);
        int last = work.block_of((long long)(tile + 1) * work.steps - 1);
        int sharers = last - first + 1, mine = blockIdx.x - first;
        volatile unsigned* arrived = s.arrivals + tile * 2;
        if (threadIdx.x == 0) {
            while (*arrived < sharers) __nanosleep(20);
            __threadfence();
        }
        asm volatile("bar.sync 1, 256;" ::: "memory");
        auto total = [&](int token, int r) {  // of two adjacent rows
            float2 y = make_float2(0.0f, 0.0f);
            for (int block = first; block <= last; block++) {
                // Only the first sharer's piece may begin the tile; every other's begins its own range.
                bool begins = block == first && work.first_of(first) <= (long long)tile * work.steps;
                const float* part = s.parts + (size_t(block) * 2 + begins) * (WIDTH * ROWS_TILE);
                float2 v = __ldcg(reinterpret_cast<const float2*>(part + token * ROWS_TILE + r));
                y = make_float2(y.x + v.x, y.y + v.y);
            }
            return y;
        };
        constexpr int PAIRS_A_TOKEN = E == SWIGLU ? ROWS_TILE / 4 : ROWS_TILE / 2;
        int pairs = tokens * PAIRS_A_TOKEN;
        for (int p = pairs * mine / sharers + threadIdx.x; p < pairs * (mine + 1) / sharers; p += 256) {
            int token = p / PAIRS_A_TOKEN, r = p % PAIRS_A_TOKEN * 2;
            if constexpr (E == SWIGLU) {
                r = r / 8 * 16 + r % 8;
                finish_swiglu(s.out, token, tile * ROWS_TILE + r, s.rows, total(token, r), total(token, r + 8));
            } else {
                float2 y = total(token, r);
                finish<E>(s.out, s.factor, token, tile * ROWS_TILE + r, s.rows, y.x, y.y);
            }
        }
        asm volatile("bar.sync 1, 256;" ::: "memory");
        if (threadIdx.x == 0 && atomicAdd(s.arrivals + tile * 2 + 1, 1) == sharers - 1) {
            s.arrivals[tile * 2] = 0;
            s.arrivals[tile * 2 + 1] = 0;
        }
    }
}

#endif

#define KERNEL(width, stages, epilogue)                                                                      \
    extern "C" __global__ void __launch_bounds__(384, 1)                                                     \
        project_wide_##width##_##epilogue(const __grid_constant__ CUtensorMap weights,                       \
                                          const __grid_constant__ CUtensorMap x, const Shape s) {            \
        RUN(width, stages, epilogue)                                                                         \
    }
#if HOPPER
#define RUN(width, stages, epilogue) project<width, stages, epilogue>(&weights, &x, s);
#else
#define RUN(width, stages, epilogue)
#endif
#define EPILOGUES(width, stages) \
    KERNEL(width, stages, STORE) KERNEL(width, stages, RESIDUAL) KERNEL(width, stages, SWIGLU)
EPILOGUES(32, 10)
EPILOGUES(64, 9)
EPILOGUES(128, 6)
EPILOGUES(256, 4)
