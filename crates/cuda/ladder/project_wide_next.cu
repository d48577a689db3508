// Projection through Hopper's warpgroup products: Y = X W^T, X fp16 [tokens][cols], W fp16 [rows][cols].
//
// Floor: the weights' bytes over the memory's bandwidth for a few hundred tokens, 2 tokens rows cols operations over
// the tensor cores' rate beyond.
// The weights are the M side, so one kernel serves batches and prefill: a tile is 128 weight rows x WIDTH tokens, two
// consumer warpgroups 64 rows each. One thread of a third warpgroup streams both operands through a ring of stages of
// 64 columns by bulk tensor copies, across tiles and ahead of the activations: the first weights are under way before
// the kernel before this one has ended.
// The device's blocks share all steps of k of all tiles evenly (`ranges`): a block's range may begin or end inside a
// tile. The blocks of such a tile write their sums, and when all have, each adds up a part of the tile in the order of
// the blocks. The ranges depend on the matrix, the number of token tiles and the device alone, so among calls with as
// many token tiles (one up to 256 tokens) a token's sum does not depend on its batch mates. Where the tiles fill the
// device well by themselves, blocks take whole ones, in order of k.
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
    unsigned* arrivals;  // [tiles][2]: blocks that wrote their sums, blocks that added theirs; 0 between launches
    int token_tiles;
    int ranges;          // whether blocks share the steps evenly
};

#if HOPPER

// A piece of one tile: steps of k begin..end.
struct Segment {
    int tile, row_tile, token_tile, begin, end;
};

// The work of one block, in order.
struct Work {
    int steps;  // of k in a tile
    int tiles;  // of rows and tokens; tokens fastest, so that blocks that work at one time share weights
    int next, end;  // ranges: steps of all tiles; else tiles

    __device__ Work(const Shape& s) {
        steps = s.cols / DEPTH, tiles = s.rows / ROWS_TILE * s.token_tiles;
        next = s.ranges ? first_of(blockIdx.x) : blockIdx.x;
        end = s.ranges ? first_of(blockIdx.x + 1) : tiles;
    }

    // Where a block's range begins.
    __device__ int first_of(int block) const { return (long long)block * tiles * steps / gridDim.x; }

    // The block whose range holds a step.
    __device__ int block_of(int step) const {
        int block = (long long)step * gridDim.x / (tiles * steps);
        while (first_of(block + 1) <= step) block++;
        while (first_of(block) > step) block--;
        return block;
    }

    __device__ bool take(const Shape& s, Segment& segment) {
        if (next >= end) return false;
        int tile = s.ranges ? next / steps : next, begin = s.ranges ? next % steps : 0;
        int upto = s.ranges ? min(steps, begin + end - next) : steps;
        segment = {tile, tile / s.token_tiles, tile % s.token_tiles, begin, upto};
        next += s.ranges ? upto - begin : gridDim.x;
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
        // The weights of the first stages do not wait for the activations.
        Segment segment;
        Work early(s);
        int ahead = 0;
        while (ahead < STAGES && early.take(s, segment)) {
            for (int k = segment.begin; k < segment.end && ahead < STAGES; k++, ahead++) {
                barrier_expect(full + ahead * 8, STAGE_BYTES);
                copy_box(base + ahead * STAGE_BYTES, weights, k * DEPTH, segment.row_tile * ROWS_TILE, full + ahead * 8);
            }
        }
        depend();
        asm volatile("fence.proxy.async;" ::: "memory");
        Work work(s);
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
    Work work(s);
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
                if (token0 + token < tokens) __stcg(part + token * ROWS_TILE + own_row + i / 2 % 2 * 8, sum[i]);
            }
            __threadfence();
            asm volatile("bar.sync 1, 256;" ::: "memory");
            if (threadIdx.x == 0) atomicAdd(s.arrivals + segment.tile * 2, 1);
            (segment.begin == 0 ? ended_tile : begun_tile) = segment.tile;
        } else if constexpr (E == SWIGLU) {
            __half* out = static_cast<__half*>(s.out);
#pragma unroll
            for (int i = 0; i < WIDTH / 2; i++) {
                int token = token0 + i / 4 * 8 + 2 * t + i % 2;
                if (i % 4 < 2 && token < tokens)
                    out[size_t(token) * (s.rows / 2) + row0 / 16 * 8 + g] = __float2half_rn(swiglu(sum[i], sum[i + 2]));
            }
        } else {
            float* out = static_cast<float*>(s.out) + size_t(token0) * s.rows + row0;
            int inside = tokens - token0;
            constexpr int FLIGHT = WIDTH / 2 < 32 ? WIDTH / 2 : 32;  // reads before writes: in turns, each waits for the last
#pragma unroll
            for (int first = 0; first < WIDTH / 2; first += FLIGHT) {
                if constexpr (E == RESIDUAL) {
#pragma unroll
                    for (int i = first; i < first + FLIGHT; i++) {
                        int token = i / 4 * 8 + 2 * t + i % 2;
                        if (token < inside) sum[i] = out[token * s.rows + i / 2 % 2 * 8] + sum[i] * s.factor;
                    }
                }
#pragma unroll
                for (int i = first; i < first + FLIGHT; i++) {
                    int token = i / 4 * 8 + 2 * t + i % 2;
                    if (token < inside) out[token * s.rows + i / 2 % 2 * 8] = sum[i];
                }
            }
        }
    }

    // Tiles that several blocks share: when all have written, each adds its part, in the order of the blocks.
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int tile = i == 0 ? begun_tile : ended_tile;
        if (tile < 0) continue;
        int first = work.block_of(tile * work.steps);
        int last = work.block_of((tile + 1) * work.steps - 1);
        int sharers = last - first + 1, mine = blockIdx.x - first;
        volatile unsigned* arrived = s.arrivals + tile * 2;
        if (threadIdx.x == 0) {
            while (*arrived < sharers) __nanosleep(20);
            __threadfence();
        }
        asm volatile("bar.sync 1, 256;" ::: "memory");
        // Only the first sharer's piece may begin the tile; every other's begins its own range.
        bool begins = work.first_of(first) <= tile * work.steps;
        int token0 = tile % s.token_tiles * WIDTH, row0 = tile / s.token_tiles * ROWS_TILE;
        constexpr int PIECE = WIDTH * ROWS_TILE;
        constexpr int FLIGHT = 8;  // reads under way at once
        constexpr int PAIRS_A_TOKEN = E == SWIGLU ? ROWS_TILE / 4 : ROWS_TILE / 2;
        int pairs = min(WIDTH, tokens - token0) * PAIRS_A_TOKEN, end = pairs * (mine + 1) / sharers;
        for (int p = pairs * mine / sharers + threadIdx.x; p < end; p += FLIGHT * 256) {
            float2 y[FLIGHT] = {}, up[FLIGHT] = {};  // of two adjacent rows; up for SwiGLU only
            int token[FLIGHT], r[FLIGHT];
#pragma unroll
            for (int i = 0; i < FLIGHT; i++) {
                int pair = min(p + i * 256, end - 1);
                token[i] = pair / PAIRS_A_TOKEN, r[i] = pair % PAIRS_A_TOKEN * 2;
                if (E == SWIGLU) r[i] = r[i] / 8 * 16 + r[i] % 8;
            }
            for (int block = first; block <= last; block++) {
                const float* part = s.parts + (size_t(block) * 2 + (block == first && begins)) * PIECE;
#pragma unroll
                for (int i = 0; i < FLIGHT; i++) {
                    const float2* at = reinterpret_cast<const float2*>(part + token[i] * ROWS_TILE + r[i]);
                    float2 v = __ldcg(at);
                    y[i] = make_float2(y[i].x + v.x, y[i].y + v.y);
                    if constexpr (E == SWIGLU) {
                        v = __ldcg(at + 4);
                        up[i] = make_float2(up[i].x + v.x, up[i].y + v.y);
                    }
                }
            }
            auto place = [&](int i) {
                return reinterpret_cast<float2*>(static_cast<float*>(s.out) + size_t(token0 + token[i]) * s.rows + row0 + r[i]);
            };
            if constexpr (E == RESIDUAL) {
#pragma unroll
                for (int i = 0; i < FLIGHT; i++) {
                    float2 x = *place(i);
                    y[i] = make_float2(x.x + y[i].x * s.factor, x.y + y[i].y * s.factor);
                }
            }
#pragma unroll
            for (int i = 0; i < FLIGHT; i++) {
                if (p + i * 256 >= end) break;
                if constexpr (E == SWIGLU) finish_swiglu(s.out, token0 + token[i], row0 + r[i], s.rows, y[i], up[i]);
                else *place(i) = y[i];
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
